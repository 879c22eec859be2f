"""Fewer and larger kernels for a transformer in half precision; on a GPU small ones cost more than what they compute.

`fuse` replaces modules of diffusers by ones that compute the same in fewer passes over memory. Sums are rounded in
another order, so float32 models keep diffusers' modules and their bits.
"""

import importlib.util
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from protocol.config.model import ModelConfig
from protocol.errors import ModelError

PACKAGES = {
    "norms=triton": "triton",
    "attention=flash3": "flash_attn_interface",
    "attention=cudnn": "torch",
    "attention=_native_efficient": "torch",
}
"""By key and value of `model`, the package that has the kernel, for GPUs only."""
MOST_WIDTH = 256
"""Numbers of a row that the Triton kernel takes, sixteen rows in a program."""


def require_kernels(model: ModelConfig, device: str) -> None:
    """Check that this machine has the kernels that a config asks for.

    Raises:
        ModelError: the package that has it is missing, or `device` is no GPU.
    """
    for asked, package in PACKAGES.items():
        key, _, value = asked.partition("=")
        if getattr(model, key) != value:
            continue
        if device != "cuda":
            raise ModelError(f"model.{asked} needs GPUs for rollout and learner, got none: leave it out")
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"model.{asked} needs the package {package}, got none: install it, or leave the key out")


def fuse(transformer: nn.Module, *, norms: str = "torch") -> None:
    """Replace diffusers' RMSNorm and SD3's attention in a frozen transformer; every other module stays.

    Args:
        norms: `triton` for a kernel of our own where a row is short and a power of two, also for torch's RMSNorm.
    """
    from diffusers.models.normalization import RMSNorm

    join_attention(transformer)
    norms_there: Any = [module for module in transformer.modules() if type(module) in (RMSNorm, nn.RMSNorm)]
    for module in norms_there:
        if module.weight is None:
            continue
        width = module.weight.numel()
        if norms == "triton" and width <= MOST_WIDTH and width & (width - 1) == 0:
            module.forward = MethodType(_triton_norm, module)
        elif type(module) is RMSNorm and module.bias is None:
            module.forward = MethodType(_rms_norm, module)


def join_attention(transformer: nn.Module) -> None:
    """Replace SD3's attention, which in diffusers has no choice of a back end."""
    from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0

    for module in transformer.modules():
        if isinstance(module, Attention) and type(module.processor) is JointAttnProcessor2_0:
            processor: Any = JointAttention()
            module.set_processor(processor)


def _rms_norm(norm: Any, hidden_states: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    """Return x / sqrt(mean(x^2) + eps) * weight: one kernel where torch has it, in float32, rounded once."""
    return rms_norm(hidden_states, tuple(norm.dim), norm.weight, norm.eps)


def _triton_norm(norm: Any, hidden_states: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    from flow.triton_norm import TritonNorm  # needs triton, which comes with torch for a GPU

    return TritonNorm.apply(hidden_states, norm.weight, norm.eps)


def keep_as_on_gpu(transformer: nn.Module) -> None:
    """Let the fused RMSNorms of a transformer without values keep for a backward what they keep on a GPU.

    There torch keeps the input and one number for each row. Its kernel for the CPU also keeps the input in float32.
    """
    for module in transformer.modules():
        if getattr(module.forward, "__func__", None) is _rms_norm:
            module.forward = _HollowNorm.apply


class _HollowNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_states, torch.empty(hidden_states.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden_states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return torch.empty_like(gradients[0])


class JointAttention:
    """Attention of SD3's blocks over image and text tokens.

    Queries, keys and values stay [B, tokens, heads, width] until the kernel reads them, so joining the streams and
    normalising them read and write contiguous memory.
    """

    _attention_backend = _parallel_config = None  # diffusers' `set_attention_backend` sets what it finds here

    def __init__(self) -> None:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        self._dispatch = dispatch_attention_fn

    def __call__(
        self,
        attn: Any,
        hidden_states: Float[Tensor, "B image D"],
        encoder_hidden_states: Float[Tensor, "B text D"] | None = None,
        **_: Any,
    ) -> Float[Tensor, "B image D"] | tuple[Float[Tensor, "B image D"], Float[Tensor, "B text D"]]:
        """Attend.

        Args:
            attn: the block's attention module, with its projections and norms.
            encoder_hidden_states: text tokens; without them the image attends to itself.

        Returns:
            The image's new tokens; with text both streams', where the last block's text tokens mean nothing.
        """
        own = [project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)]
        streams = [_normed(own, attn.norm_q, attn.norm_k)]
        if encoder_hidden_states is not None:
            projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            added = [project(encoder_hidden_states).unflatten(-1, (attn.heads, -1)) for project in projections]
            streams.append(_normed(added, attn.norm_added_q, attn.norm_added_k))
        query, key, value = (
            torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] for parts in zip(*streams, strict=True)
        )
        attended = self._dispatch(query, key, value, backend=self._attention_backend).flatten(2)
        image = attended[:, : hidden_states.shape[1]]
        image = attn.to_out[1](attn.to_out[0](image))
        if encoder_hidden_states is None:
            return image
        text = attended[:, hidden_states.shape[1] :]
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def _normed(tensors: list[Tensor], norm_query: nn.Module | None, norm_key: nn.Module | None) -> list[Tensor]:
    query, key, value = tensors
    return [norm_query(query) if norm_query else query, norm_key(key) if norm_key else key, value]

"""Attention kernels that diffusers' dispatcher lacks: fast ones whose backward adds in one order.

They have never run on a GPU. Their formulas are tested on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from protocol.errors import ModelError, one_line

REPEATS = 8
"""Backwards that must give the same bits before a kernel is taken."""
APART = 0.03
"""Largest relative difference of a gradient from torch's, for two roundings to bfloat16."""
SHAPES = ((2, 1229, 24, 64), (2, 1152, 24, 128))
"""Rows, tokens, heads and width of the queries of these backwards: SD3.5's and FLUX.1's at 512 x 512."""


def flash3(
    query: Float[Tensor, "B queries heads D"],
    key: Float[Tensor, "B keys heads D"],
    value: Float[Tensor, "B keys heads D"],
    scale: float | None = None,
) -> Float[Tensor, "B queries heads D"]:
    """Attend with FlashAttention-3, for Hopper GPUs."""
    from flash_attn_interface import flash_attn_func  # pyrefly: ignore[missing-import]

    made = flash_attn_func(query, key, value, softmax_scale=scale, deterministic=True)
    return made[0] if isinstance(made, tuple) else made  # builds before mid-2025 return their log-sums too


def cudnn(
    query: Float[Tensor, "B queries heads D"],
    key: Float[Tensor, "B keys heads D"],
    value: Float[Tensor, "B keys heads D"],
    scale: float | None = None,
) -> Float[Tensor, "B queries heads D"]:
    """Attend with torch's cuDNN; the backward is FlashAttention's, since torch calls cuDNN's without a fixed order."""
    attended = CudnnThenFlash.apply(*(each.transpose(1, 2) for each in (query, key, value)), scale)
    return attended.transpose(1, 2)


class CudnnThenFlash(torch.autograd.Function):
    """cuDNN's softmax(scale Q K^T) V. FlashAttention's backward reads the result and the log-sums of its rows.

    With deterministic algorithms torch lets that backward add in one order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "B heads queries D"],
        key: Float[Tensor, "B heads keys D"],
        value: Float[Tensor, "B heads keys D"],
        scale: float | None,
    ) -> Float[Tensor, "B heads queries D"]:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        attended, sums, *_, seed, offset, _ = attend(query, key, value, None, compute_log_sumexp=True, scale=scale)
        ctx.save_for_backward(query, key, value, attended, sums, seed, offset)
        ctx.scale = scale
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, "B heads queries D"]) -> tuple[Tensor | None, ...]:
        query, key, value, attended, sums, seed, offset = ctx.saved_tensors
        slopes = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradients[0],
            query,
            key,
            value,
            attended,
            sums.view(query.shape[:3]),  # torch 2.9 and newer has a dimension of 1 behind them
            None,  # all rows of a batch have one length
            None,
            query.shape[2],
            key.shape[2],
            0.0,  # no dropout, so the random state that follows is not read
            False,  # noqa: FBT003 not causal
            seed,
            offset,
            scale=ctx.scale,
        )
        return *slopes, None


KERNELS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "flash3": (flash3, "_native_flash"),
    "cudnn": (cudnn, "_native_cudnn"),
}
"""By value of `model.attention` the kernel, and the dispatcher's name for a back end that is never chosen otherwise."""


def choose_attention(transformer: Any, name: str, *, device: str) -> None:
    """Let all attention of a transformer take a kernel, of `KERNELS` or of diffusers' dispatcher.

    Without a GPU, `KERNELS` are torch's own choice.

    Raises:
        ModelError: see `require_gradients`.
    """
    if name not in KERNELS:
        transformer.set_attention_backend(name)
    elif device != "cuda":
        transformer.set_attention_backend("native")
    else:
        if torch.are_deterministic_algorithms_enabled():  # not where images are only made
            require_gradients(name, device=device)
        take_attention(transformer, name)


def take_attention(transformer: Any, name: str) -> None:
    """Let all attention of a transformer take one of `KERNELS`; where there is a mask it is torch's choice."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    (attend, slot), native = KERNELS[name], _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]

    def dispatched(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,  # noqa: FBT001, FBT002 the dispatcher's signature
        scale: float | None = None,
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            return native(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
        return attend(query, key, value, scale)

    _AttentionBackendRegistry.register(AttentionBackendName(slot))(dispatched)
    transformer.set_attention_backend(slot)


def require_gradients(name: str, *, device: str) -> None:
    """Check that a kernel's gradients are torch's up to rounding, and the same bits every time.

    Some builds of FlashAttention-3 ignore what asks for equal bits.

    Raises:
        ModelError: they are not, or the kernel does not run.
    """
    (attend, _), generator = KERNELS[name], torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    with torch.inference_mode(mode=False), torch.enable_grad():
        for shape in SHAPES:
            inputs, slopes = [draw(shape).requires_grad_() for _ in range(3)], draw(shape)
            plain = scaled_dot_product_attention(*(each.transpose(1, 2) for each in inputs)).transpose(1, 2)
            expected = torch.autograd.grad(plain, inputs, slopes)
            try:
                first, *others = (torch.autograd.grad(attend(*inputs), inputs, slopes) for _ in range(REPEATS))
            except (ImportError, RuntimeError) as error:
                raise ModelError(f"model.attention={name} needs a kernel that runs, got {one_line(error)}") from error
            apart = max(float((one - two).norm() / two.norm()) for one, two in zip(first, expected, strict=True))
            is_same = all(all(map(torch.equal, first, other)) for other in others)
            if apart > APART or not is_same:
                found = f"a difference of {apart:.2g}" if is_same else "others from one call to the next"
                raise ModelError(
                    f"model.attention={name} needs a kernel with torch's gradients and the same bits every time, got"
                    f" {found}: install another build, or set model.attention=native"
                )

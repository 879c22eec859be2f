"""torch.compile for the blocks of a transformer, which rollout and learner run alike, and for a VAE's decoder."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from torch import Tensor, nn

from protocol.errors import ModelError

SAME_BITS: dict[str, dict[str, Any]] = {"inductor": {"deterministic": True}}
"""By backend, options with which it compiles to the same code in every process; `inductor` would choose by timing."""
MOST_GRAPHS = 256
"""Of one kind of block: the first block has its own, the model without its adapter too, and each shape of its input."""


def require_backend(backend: str, device: str, *, key: str = "model.compile") -> None:
    """Check that this machine can compile.

    Args:
        device: `cpu` or `cuda`; on the CPU `inductor` needs a C++ compiler, on a GPU Triton needs one for C.
        key: the config's key that names the backend.

    Raises:
        ModelError: torch has no such backend, is too old, or finds no compiler.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = sorted(torch.compiler.list_backends())  # without backends for debugging
        raise ModelError(f"{key} must be one of torch's backends {usual}, got {backend!r}")
    if unknown := sorted(SAME_BITS.get(backend, {}).keys() - set(torch._inductor.list_options())):
        raise ModelError(f"{key}={backend} needs torch 2.10 or newer, got {torch.__version__}: no {unknown[0]} option")
    variable, *programs = ("CC", "gcc", "clang") if device == "cuda" else ("CXX", "g++", "clang++")
    wanted = [os.environ[variable]] if os.environ.get(variable) else programs
    if backend == "inductor" and not any(map(shutil.which, wanted)):
        raise ModelError(
            f"{key}=inductor needs a compiler, got none of {wanted}: install {programs[0]}, or set {variable}"
            " to its path"
        )


def compile_decoder(decoder: nn.Module, backend: str, *, device: str) -> None:
    """Compile a VAE's decoder at its first call; each shape of its input has a graph, and a copy is not compiled.

    Raises:
        ModelError: see `require_backend`.
    """
    require_backend(backend, device, key="model.vae_compile")
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    decoder.compile(backend=backend, options=SAME_BITS.get(backend), dynamic=False, fullgraph=True)


class CompiledBlocks:
    """Compiles the blocks of a transformer at their first call; blocks of one kind share their graphs.

    torch compiles one graph for calls with a gradient and another for calls without, and the two may round differently,
    by up to 0.008 in a velocity of a tiny SD3.5 in bfloat16. So a call without a gradient runs the graph of a call with
    one. After each block it drops what the graph saved for the backward, so it needs the memory of one block more.

    When a second shape comes, torch would compile a graph for all shapes, and after a few graphs it would run blocks
    uncompiled. The bits of a batch would then depend on the batches before it. So each shape has its own graph, and a
    block that cannot be compiled raises an error.

    Args:
        transformer: its `forward` and its blocks' are replaced. diffusers lists the kinds of its blocks.
        device: where it computes, `cpu` or `cuda`.

    Raises:
        ModelError: see `require_backend`; or diffusers lists no kinds of blocks for this transformer.
    """

    def __init__(self, transformer: nn.Module, backend: str, *, device: str) -> None:
        require_backend(backend, device)
        options = SAME_BITS.get(backend)
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
        self._has_gradient = True
        kinds: Any = transformer._no_split_modules or ()
        blocks = [part for part in transformer.modules() if type(part).__name__ in kinds]
        if not blocks:
            raise ModelError(
                f"model.compile must be null for {type(transformer).__name__}: it has no blocks to compile"
            )
        for block in blocks:
            compiled = torch.compile(block.forward, backend=backend, options=options, dynamic=False, fullgraph=True)
            block.forward = partial(self._block, compiled)
        transformer.forward = partial(self._whole, transformer.forward)

    def _whole(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._has_gradient = False
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                result = forward(*_mapped(_plain, args), **{name: _mapped(_plain, kwargs[name]) for name in kwargs})
        finally:
            self._has_gradient = True
        return _mapped(Tensor.detach, result)

    def _block(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            raise ModelError(
                f"model.compile must need at most {MOST_GRAPHS} graphs for one kind of block, got more: it takes one"
                " for each shape of a batch and, with some models, each length of a prompt; set model.compile=null"
            ) from None
        return result if self._has_gradient else _mapped(_cut, result)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that was made in inference mode as one that was not, in the same memory: a graph saves these."""
    if not tensor.is_inference():
        return tensor
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _cut(tensor: Tensor) -> Tensor:
    """Return the tensor without its history; the next block shall see what it would see in a call with a gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Change the tensors of a value; lists and tuples may hold them."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(change, each) for each in value) if type(value) in (list, tuple) else value

"""What the GPU itself reaches: copies, products, and attention by kernel, each with random numbers."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.speed.slot.part import Figures, Where, tried
from benchmarks.speed.slot.timing import seconds_of
from flow.adapter.lora import Joined
from flow.attention import KERNELS as OURS

SHAPES = {
    "SD3.5, 16 rows": (16, 24, 1229, 64),
    "FLUX.1, 3 rows": (3, 24, 1152, 128),
    "Qwen-Image, 4 rows, masked": (4, 24, 1088, 128),
}
"""Rows, heads, tokens and width of a head, at 512 x 512."""
TEXT = 64
"""Tokens of a prompt in the masked shape, the last of the row; the mask hides more of them row by row."""
REPEATS = 50

Works = tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]]]
"""A forward, and a forward with the gradients of queries, keys and values."""


def ceilings(where: Where) -> Iterator[Figures]:
    """Measure the copy of a large tensor, and a product of two random matrices in bfloat16."""
    side, numbers = (64, 1 << 10) if where.is_tiny else (8192, 1 << 31)
    source = torch.randn(numbers, device=where.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    yield {"copy, GB/s read and written": 4e-9 * numbers / seconds_of(lambda: target.copy_(source), rounds=10)}
    left, right = (torch.randn(side, side, device=where.device, dtype=torch.bfloat16) for _ in range(2))
    yield {"product, TFLOP/s": 2e-12 * side**3 / seconds_of(lambda: left @ right, rounds=10)}


def attention(where: Where) -> Iterator[Figures]:
    """Measure forward and backward by kernel and shape, and count the repeats that give other bits."""
    for kernel, (make, is_strict) in KERNELS.items():
        torch.use_deterministic_algorithms(mode=is_strict)
        for name, shape in SHAPES.items():
            sizes = (2, 2, 96, 16) if where.is_tiny else shape
            is_masked = name.endswith("masked")
            yield tried(f"{kernel}, {name}", partial(_attended, make, sizes, is_masked=is_masked, device=where.device))


def norms(where: Where) -> Iterator[Figures]:
    """Measure RMSNorm of short rows, as queries and keys have, by torch and with `model.norms=triton`."""
    for width in (64, 128):
        for kernel in ("torch", "triton") if where.device == "cuda" else ("torch",):
            yield tried(f"{kernel}, rows of {width}", partial(_normed, kernel, width, where))


def _normed(kernel: str, width: int, where: Where) -> Figures:
    rows = 64 if where.is_tiny else 16 * 24 * 1229
    x, slopes = (torch.randn(rows, width, device=where.device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(width, device=where.device, dtype=torch.bfloat16)
    torchs = partial(rms_norm, x.requires_grad_(), (width,), weight, 1e-6)
    norm: Callable[[], Tensor] = torchs
    if kernel == "triton":
        from flow.triton_norm import TritonNorm

        norm = partial(TritonNorm.apply, x, weight, 1e-6)
    return {
        "forward ms": 1e3 * seconds_of(norm, rounds=20),
        "both ms": 1e3 * seconds_of(lambda: norm().backward(slopes), rounds=20),
        "largest difference from torch": (norm() - torchs()).abs().max().item(),
    }


def projections(where: Where) -> Iterator[Figures]:
    """Measure queries, keys and values of one x, each with a LoRA of rank 32, in SD3.5's shape.

    `joined` is `model.lora.qkv=joined`. In `one product` the W are joined too; its parts then become contiguous, as
    norms need them. Counted is what all operations read and write.
    """
    for name, make in PROJECTIONS.items():
        forward, both = make(*_drawn(where.device, is_tiny=where.is_tiny))
        yield {f"{name}, forward ms": 1e3 * seconds_of(forward, rounds=10)}
        yield {f"{name}, both ms": 1e3 * seconds_of(both, rounds=10)}
        forward, both = make(*_drawn("meta", is_tiny=where.is_tiny))
        for work, of in ((forward, "forward"), (both, "both")):
            with _Traffic() as traffic:
                work()
            yield {f"{name}, {of} GB": 1e-9 * traffic.bytes}


def _drawn(device: str, *, is_tiny: bool) -> tuple[Tensor, ...]:
    """Return x, W of all three, their A, their B, and the gradients of the results."""
    width, rank, rows = (64, 4, 32) if is_tiny else (1536, 32, 16 * 1024)
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, weight = draw(rows, width).requires_grad_(), draw(3 * width, width) / width**0.5
    low, high = draw(3 * rank, width).requires_grad_(), draw(3, width, rank).requires_grad_()
    return x, weight, low, high, draw(3, rows, width)


def _projected(
    project: Callable[..., Sequence[Tensor]], x: Tensor, weight: Tensor, low: Tensor, high: Tensor, slopes: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    project = partial(project, x, weight, low, high.unbind())
    return torch.no_grad()(project), lambda: torch.autograd.backward(project(), slopes.unbind())


def _separately(x: Tensor, weight: Tensor, low: Tensor, highs: Sequence[Tensor]) -> list[Tensor]:
    add = torch.Tensor.addmm if torch.is_grad_enabled() else torch.Tensor.addmm_  # as `flow.adapter.lora.Branch`
    each = zip(weight.chunk(3), low.chunk(3), highs, strict=True)
    return [add(linear(x, part), linear(x, own), high.t()) for part, own, high in each]


def _joined(x: Tensor, weight: Tensor, low: Tensor, highs: Sequence[Tensor]) -> Sequence[Tensor]:
    parts = [each for part, high in zip(weight.chunk(3), highs, strict=True) for each in (part, None, high)]
    return Joined.apply(x, low, 1.0, *parts)


def _in_one_product(x: Tensor, weight: Tensor, low: Tensor, highs: Sequence[Tensor]) -> list[Tensor]:
    each = zip(linear(x, weight).chunk(3, 1), linear(x, low).chunk(3, 1), highs, strict=True)
    return [base.addmm(inner, high.t()) for base, inner, high in each]


PROJECTIONS = {
    "separate": partial(_projected, _separately),
    "joined": partial(_projected, _joined),
    "one product": partial(_projected, _in_one_product),
}
"""By name how a forward and a forward with a backward are made."""


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(each.nbytes for each in tree_leaves((args, result)) if isinstance(each, Tensor))
        return result


def _attended(make: Callable[..., Works], sizes: tuple[int, int, int, int], *, is_masked: bool, device: str) -> Figures:
    rows, heads, tokens, width = sizes
    drawn = (torch.randn(rows, tokens, heads, width, device=device, dtype=torch.bfloat16) for _ in range(4))
    query, key, value, gradient = (each.transpose(1, 2) for each in drawn)
    inputs = [each.requires_grad_() for each in (query, key, value)]
    mask = None
    if is_masked:
        hidden = TEXT // 2 * torch.arange(rows, device=device) // rows
        mask = (torch.arange(tokens, device=device) < tokens - hidden[:, None])[:, None, None]
    forward, both = make(*inputs, mask, gradient)
    first, *gradients = both()
    others = sum(not all(map(torch.equal, (first, *gradients), both())) for _ in range(REPEATS))
    slow, quick = seconds_of(both, rounds=10), seconds_of(forward, rounds=10)
    operations = 4 * rows * heads * tokens**2 * width  # of a forward; its backward has 2.5 times as many
    return {
        "forward ms": 1e3 * quick,
        "forward TFLOP/s": operations / quick / 1e12,
        "both ms": 1e3 * slow,
        "both TFLOP/s": 3.5 * operations / slow / 1e12,
        f"other bits in {REPEATS} repeats": others,
    }


def _torchs(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gradient: Tensor
) -> Works:
    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return _differentiated(attend, query, key, value, gradient)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gradient: Tensor) -> Works:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kernel: Any = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    blocks: Any = None
    if mask is not None:
        shown = mask[:, 0, 0]
        rows, _, tokens, _ = query.shape
        device = str(query.device)
        shows = lambda row, _head, _at, other: shown[row, other]  # noqa: E731
        blocks = create_block_mask(shows, rows, None, tokens, tokens, device)
    return _differentiated(lambda: kernel(query, key, value, block_mask=blocks), query, key, value, gradient)


def _differentiated(attend: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> Works:
    def both() -> tuple[Tensor, ...]:
        attended = attend()
        return (attended, *torch.autograd.grad(attended, (query, key, value), gradient))

    return torch.no_grad()(attend), both


def _cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gradient: Tensor) -> Works:
    """Build cuDNN's own graphs, whose backward has a deterministic order, with the package nvidia-cudnn-frontend."""
    import cudnn  # pyrefly: ignore[missing-import]

    if mask is not None:
        raise NotImplementedError("a mask")
    rows, heads, tokens, width = query.shape
    query, key, value = (each.detach() for each in (query, key, value))
    attended, slopes = torch.empty_like(query), [torch.empty_like(each) for each in (query, key, value)]
    sums = torch.empty(rows, heads, tokens, 1, device=query.device, dtype=torch.float32)
    scale = 1 / math.sqrt(width)

    def graph() -> Any:
        half, whole = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
        return cudnn.pygraph(io_data_type=half, intermediate_data_type=whole, compute_data_type=whole)

    def built(graph: Any, tensors: dict[Any, Tensor]) -> Callable[[], None]:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        space = torch.empty(graph.get_workspace_size(), device=query.device, dtype=torch.uint8)
        return lambda: graph.execute(tensors, space)

    def made(output: Any, tensor: Tensor) -> Any:
        return output.set_output(True).set_dim(tensor.size()).set_stride(tensor.stride())

    ahead = graph()
    read = {ahead.tensor_like(each): each for each in (query, key, value)}
    out, stats = ahead.sdpa(**dict(zip("qkv", read, strict=True)), is_inference=False, attn_scale=scale)
    made(stats, sums).set_data_type(cudnn.data_type.FLOAT)
    made(out, attended)
    forward = built(ahead, {**read, out: attended, stats: sums})

    back = graph()
    names = {"q": query, "k": key, "v": value, "o": attended, "dO": gradient, "stats": sums}
    handles = {name: back.tensor_like(each) for name, each in names.items()}
    outputs = back.sdpa_backward(**handles, attn_scale=scale, use_deterministic_algorithm=True)
    written = {made(output, slope): slope for output, slope in zip(outputs, slopes, strict=True)}
    backward = built(back, {**{handles[name]: each for name, each in names.items()}, **written})

    def attend() -> Tensor:
        forward()
        return attended

    def both() -> tuple[Tensor, ...]:
        forward()
        backward()
        return (attended.clone(), *(slope.clone() for slope in slopes))

    return attend, both


def _ours(name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gradient: Tensor) -> Works:
    """Attend as with `model.attention=NAME`."""
    if mask is not None:
        raise NotImplementedError("a mask")
    attend, _ = OURS[name]

    def attended() -> Tensor:
        return attend(*(each.transpose(1, 2) for each in (query, key, value))).transpose(1, 2)

    return _differentiated(attended, query, key, value, gradient)


KERNELS: dict[str, tuple[Callable[..., Works], bool]] = {
    "flash, deterministic": (partial(_torchs, SDPBackend.FLASH_ATTENTION), True),
    "cuDNN of torch": (partial(_torchs, SDPBackend.CUDNN_ATTENTION), False),
    "cuDNN, deterministic": (_cudnn, False),
    "cuDNN, then flash, deterministic": (partial(_ours, "cudnn"), True),
    "FlashAttention-3, deterministic": (partial(_ours, "flash3"), True),
    "efficient, deterministic": (partial(_torchs, SDPBackend.EFFICIENT_ATTENTION), True),
    "flex": (_flex, False),
}
"""By name how its works are made, and whether torch is to refuse what may give other bits every time."""

"""RMSNorm of short rows, such as the 64 or 128 numbers of a head's query or key, as one Triton kernel.

torch's kernel gives each row a program of its own; for such rows it takes eight times what reading and writing them
takes. Here a program has several rows. Each is summed alone and in a fixed order, so its bits do not depend on the
batch. The weight is frozen: there is no gradient for it, and no sum over rows.

It has run in Triton's interpreter on a CPU only, never on a GPU.
"""

from typing import Any

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from jaxtyping import Float
from torch import Tensor

ROWS = 16
"""Rows of a program."""


@triton.jit
def _normalise(x, weight, y, rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """y = s x w with s = 1 / sqrt(mean(x^2) + eps), in float32, rounded once."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = row[:, None] * WIDTH + column[None, :], (row < rows)[:, None]
    held = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(held * held, axis=1) / WIDTH + eps)
    weights = tl.load(weight + column).to(tl.float32)
    tl.store(y + at, (held * scale[:, None] * weights[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _slope(x, weight, slopes, out, rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """dx = s (g w - s^2 x mean(x g w)) for the slopes g of y."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = row[:, None] * WIDTH + column[None, :], (row < rows)[:, None]
    held = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(held * held, axis=1) / WIDTH + eps)
    wide = tl.load(slopes + at, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.load(weight + column).to(tl.float32)[None, :]
    mean = tl.sum(held * wide, axis=1) / WIDTH
    found = scale[:, None] * (wide - held * (scale * scale * mean)[:, None])
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


class TritonNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, a power of two; the weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "... D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "... D"]:
        x = x.contiguous()
        y, width = torch.empty_like(x), x.shape[-1]
        with torch.cuda.device_of(x):  # triton runs on the current GPU; a model may be on several
            _normalise[_programs(x)](x, weight, y, x.numel() // width, eps, WIDTH=width, ROWS=ROWS)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Float[Tensor, "... D"]) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        out, width = torch.empty_like(x), x.shape[-1]
        slope = slopes[0].contiguous()
        with torch.cuda.device_of(x):
            _slope[_programs(x)](x, weight, slope, out, x.numel() // width, ctx.eps, WIDTH=width, ROWS=ROWS)
        return out, None, None


def _programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel() // x.shape[-1], ROWS),)

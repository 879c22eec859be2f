"""NormalFloat: linear layers with 4 bits a weight, after QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3).

Every 64 weights that follow each other in memory share a float32 scale, their largest absolute value. A weight is kept
as the number of the nearest of 16 values, quantiles of a normal distribution; without QLoRA's second quantisation, of
the scales. bitsandbytes keeps the same bits, but its `Linear4bit` is not used: on a CPU with AVX-512 BF16 a forward
without a gradient takes another kernel (0.50.2: off by 0.007 in float32), which rounds a single row otherwise than the
learner's forward; and diffusers reads a model with it on a GPU only.

This module imports torchao, which most installations do not have.
"""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor

BLOCK = 64
"""Weights that share a scale."""
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What a weight divided by its scale is rounded to: the paper's appendix E."""


class Nf4Tensor(TorchAOBaseTensor):
    """The weight of a frozen linear layer in 4 bits; it looks like the tensor of `shape` and `dtype` that it restores.

        layer.weight = nn.Parameter(Nf4Tensor.of(layer.weight), requires_grad=False)

    Args:
        qdata: two numbers of values in each byte, the first in the high bits; zeros fill the last block.
        pairs: the two values of each byte. It is part of the tensor to be on its device.
    """

    tensor_data_names: ClassVar = ["qdata", "scale", "pairs"]
    tensor_attribute_names: ClassVar = ["shape", "dtype"]

    def __new__(
        cls,
        qdata: UInt8[Tensor, "blocks half"],
        scale: Float[Tensor, "blocks 1"],
        pairs: Float[Tensor, "256 2"],
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> "Nf4Tensor":
        """Make a tensor without memory of its own."""
        del scale, pairs
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device, requires_grad=False)

    def __init__(self, qdata: Tensor, scale: Tensor, pairs: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        del shape, dtype  # `__new__` has set them
        self.qdata, self.scale, self.pairs = qdata, scale, pairs

    @classmethod
    def of(cls, weight: Float[Tensor, "..."]) -> "Nf4Tensor":
        """Round a weight; a block of zeros stays one."""
        values = torch.tensor(VALUES, device=weight.device)
        flat = weight.detach().float().flatten()
        blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True)
        shares = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)
        number = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
        return cls(
            number[:, ::2] << 4 | number[:, 1::2],
            scale,
            torch.cartesian_prod(values, values),
            weight.shape,
            weight.dtype,
        )

    def dequantize(self) -> Float[Tensor, "..."]:
        """Return the weight, each value times its scale in float32 and then rounded to `dtype`."""
        values = embedding(self.qdata.int(), self.pairs).flatten(1)
        whole = torch.mul(values, self.scale, out=torch.empty_like(values, dtype=self.dtype))
        return whole.flatten()[: self.numel()].view(self.shape)


@Nf4Tensor.implements_torch_function(linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Float[Tensor, "... outputs"]:
    del func, types
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
    return _Linear.apply(named["input"], named["weight"], named.get("bias"))


class _Linear(torch.autograd.Function):
    """A frozen linear layer. Its backward restores the weight once more, so no copy is kept since the forward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Nf4Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(inputs, weight.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight.dequantize(), None, None


class Nf4Config(AOBaseConfig):
    """Asks torchao, and diffusers through it, for linear layers in NormalFloat."""


@register_quantize_module_handler(Nf4Config)
def _quantized(layer: nn.Linear, config: Nf4Config) -> nn.Linear:
    del config
    layer.weight = nn.Parameter(Nf4Tensor.of(layer.weight), requires_grad=False)
    return layer

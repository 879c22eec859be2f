"""Counts memory and operations of a computation without doing it.

Under torch's FakeTensorMode operations compute only shapes, so a transformer of any size runs forward and backward in
seconds on any machine; `CostMeter` adds up the living tensors at each moment, and the operations by formula.
"""

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

BLOCK = 16
"""Channels per block of oneDNN's layout with AVX-512."""


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


FORMULAS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operations by operator: torch's formulas, and our own for the CPU's fused attention, which torch does not count."""


def stored(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that take memory: the parts of a quantised tensor, and every other tensor itself."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from stored(getattr(tensor, name) for name in names)
        else:
            yield tensor


class CostMeter(TorchDispatchMode):
    """Counts floating-point operations, and the bytes of the tensors that operations return, while these are alive.

    torch's own FlopCounterMode keeps tensors alive, so it cannot be used while memory is counted.

        with FakeTensorMode(), CostMeter(apart=transformer.parameters()) as memory:
            transformer(...).sum().backward()
        print(memory.peak)

    Args:
        apart: tensors from before, which do not count.
        is_cpu: also count oneDNN's copies during a convolution on a CPU: input and output in its layout, and then the
            output in both layouts.
    """

    def __init__(self, *, apart: Iterable[torch.Tensor] = (), is_cpu: bool = False) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.flops = 0
        self._is_cpu = is_cpu
        self._known = {tensor.untyped_storage()._cdata for tensor in stored(apart)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls: a layer asks for the device of its tensor
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if formula := FORMULAS.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        if self._is_cpu and func is torch.ops.aten.convolution.default:
            own = result.untyped_storage().nbytes()
            self.peak = max(self.peak, self.current - own + _blocked(result) + max(_blocked(args[0]), own))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.current -= size


def _blocked(images: torch.Tensor) -> int:
    """Return the bytes of images [B, C, ...] in blocks of channels."""
    count, channels, *sides = images.shape
    return count * -(-channels // BLOCK) * BLOCK * math.prod(sides) * images.element_size()

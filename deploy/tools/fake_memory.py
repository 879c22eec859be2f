"""What a computation costs, found out without doing it: memory and operations of a fake run are counted.

Under torch's FakeTensorMode operations compute shapes only, so a transformer of any size runs forward and backward in
seconds on any machine; `CostMeter` adds up what is alive at each moment, and the operations by torch's formulas.
"""

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry


class CostMeter(TorchDispatchMode):
    """Counts bytes of the tensors that operations inside return, while they are alive, and floating-point operations.

    torch's own FlopCounterMode keeps tensors alive, so it cannot count beside memory.

        with FakeTensorMode(), CostMeter(apart=transformer.parameters()) as memory:
            transformer(...).sum().backward()
        print(memory.peak)

    Args:
        apart: tensors that were there before and do not count.
    """

    def __init__(self, *, apart: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.flops = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in apart}

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls: a layer asks where its tensor lies
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
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

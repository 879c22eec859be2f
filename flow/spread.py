"""A transformer that is larger than a GPU: its blocks lie on several, one after the other.

Each block computes with the kernels and shapes of one GPU, and copies are exact, so results have the same bits as on
one GPU. The first GPU goes on with the next batch while the others compute, until something waits for a result.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from protocol.errors import ModelError


def spread(transformer: nn.Module, devices: Sequence[torch.device], block_lists: Sequence[str]) -> None:
    """Move a transformer to its devices; each part then brings its inputs to its own, and the result is on the last.

    Args:
        block_lists: see `devices_of_parts`.
    """
    if len(devices) == 1:
        transformer.to(devices[0])
        return
    transformer._apply(lambda tensor: tensor.to(devices[0]), recurse=False)
    inputs = _Inputs()
    transformer.register_forward_pre_hook(inputs.begin)
    transformer.register_forward_hook(inputs.end, always_call=True)
    for part, device in devices_of_parts(transformer, devices, block_lists):
        part.to(device).register_forward_pre_hook(partial(inputs.bring, device), with_kwargs=True)


def devices_of_parts(
    transformer: nn.Module, devices: Sequence[torch.device], block_lists: Sequence[str]
) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield each part of a transformer with its device.

    The blocks go to the devices in their order, about equal bytes to each. Other parts go to the first device, or to
    the last one if they are registered behind the blocks.

    Args:
        block_lists: names of the transformer's lists of blocks, in the order in which they run.
    """
    blocks = [block for name in block_lists for block in transformer.get_submodule(name).children()]
    sizes = [sum(each.numel() * each.itemsize for each in block.parameters()) for block in blocks]
    starts = [0, *accumulate(sizes)]
    for block, start in zip(blocks, starts, strict=False):
        yield block, devices[start * len(devices) // starts[-1]]
    home = devices[0]
    for name, child in transformer.named_children():
        if name in block_lists:
            home = devices[-1]
            continue
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        yield from ((part, home) for part in (child.children() if is_list else (child,)))


class _Inputs:
    """Brings inputs to the device of a part. What many blocks read, such as rotations, is copied once in a forward.

    A copy waits until its target has computed what it was given before, so a copy for each block would hold up the
    first device.
    """

    def __init__(self) -> None:
        self._is_running = False
        """Whether it is a forward of the transformer, and not of a block that is recomputed for a backward."""
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        """Input and copy, by the input's id."""
        self._readers: dict[int, tuple[Tensor, torch.device]] = {}
        """Inputs with a gradient and the device that reads them, by id."""

    def begin(self, *_: Any) -> None:
        self.end()
        self._is_running = True

    def end(self, *_: Any) -> None:
        self._is_running = False
        self._copies.clear()
        self._readers.clear()

    def bring(self, device: torch.device, part: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002
        return tree_map_only(Tensor, partial(self._brought, device), (args, kwargs))

    def _brought(self, device: torch.device, tensor: Tensor) -> Tensor:
        if not self._is_running:
            return tensor.to(device)
        if tensor.requires_grad and self._readers.setdefault(id(tensor), (tensor, device))[1] != device:
            raise ModelError(
                "model.lora.targets must leave out what all blocks read, such as embeddings of the time, where a model"
                " is on several GPUs (cluster.*.gpus): gradients of several GPUs would be added in any order"
            )
        key = id(tensor), device
        if key not in self._copies:
            copy = tensor.to(device)
            if copy is tensor:
                return tensor
            self._copies[key] = tensor, copy
        return self._copies[key][1]

"""Frozen weights in host memory, of which all processes of a node hold one copy, while their models rest.

The copy is a memory file of Linux (`memfd_create`). It lies in no folder, so it needs neither a disk nor /dev/shm: a
process finds it among the open files of the others, and the kernel frees it with its last holder, however that ends. A
whole copy is sealed against changes, and a process takes it only after comparing every bit with its own weights.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import iglob
from io import BufferedIOBase

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protocol.errors import one_line

log = logging.getLogger(__name__)
ALIGNED = 64
"""Bytes to which the start of a tensor is aligned, as by torch's own allocator."""


def frozen_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that no gradient changes; of a quantised one its parts."""
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [part for tensor in held if not tensor.requires_grad for part in _parts(tensor)]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def host_copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors with the same bits and strides in host memory, which other processes of the node hold too.

    If the system refuses it, they are this process's own.
    """
    try:
        if sys.platform == "linux":
            return _shared(tensors)
    except OSError as error:
        log.warning("resting weights are not shared with other processes of this node: %s", one_line(error))
    return [tensor.detach().cpu() for tensor in tensors]


def _shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    layout = [(str(tensor.dtype), tuple(tensor.shape), tensor.stride()) for tensor in tensors]
    name = f"flowcredit-{hashlib.sha256(repr(layout).encode()).hexdigest()[:32]}"
    others: set[int] = set()
    """Copies of another model with these shapes, by inode."""
    while True:
        for inode, file in _whole_copies(name, others):
            held = _mapped(file, tensors)
            if all(torch.equal(_bytes(one).cpu(), _bytes(other)) for one, other in zip(tensors, held, strict=True)):
                return held
            others.add(inode)
        with _alone_on_the_node():
            if not any(_whole_copies(name, others)):
                return _made(name, tensors)


def _whole_copies(name: str, others: set[int]) -> Iterator[tuple[int, BufferedIOBase]]:
    """Yield the copies that processes of this node hold, by inode, without `others`."""
    for link in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if os.readlink(link) != f"/memfd:{name} (deleted)":
                continue
            with open(link, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode not in others and fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                    yield inode, file


def _made(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    with open(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b") as file:
        for tensor in tensors:
            held = _bytes(tensor).cpu().numpy()
            file.write(held.data)
            file.write(bytes(-held.size % ALIGNED))
        file.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return _mapped(file, tensors)


def _mapped(file: BufferedIOBase, tensors: Sequence[Tensor]) -> list[Tensor]:
    """View a copy as tensors; they keep it open. What writes to them changes no copy but its own pages."""
    whole = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    start, views = 0, []
    for tensor in tensors:
        size = _bytes(tensor).numel()
        views.append(whole[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride()))
        start += size + -size % ALIGNED
    return views


def _bytes(tensor: Tensor) -> UInt8[Tensor, " bytes"]:
    """View a tensor's memory from its first to its last number, in the order in which it lies there."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,)).view(torch.uint8)


@contextmanager
def _alone_on_the_node() -> Iterator[None]:
    """Let one process after the other make a copy; the kernel ends the turn of one that dies."""
    folder = os.open("/proc", os.O_RDONLY)  # any file that all of them can open
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)

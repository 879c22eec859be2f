"""A full disk that needs no right to mount."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_limited(size: int) -> Iterator[None]:
    """Inside, this process can write no file beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""Small disks that can be filled, and made read-only; they need the right to mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoRightToMountError(Exception):
    """This process may not mount."""


@contextmanager
def small_disk(folder: Path, *, size: str = "2m") -> Iterator[Path]:
    """A tmpfs of a few MiB at `folder`, which is made.

    Raises:
        NoRightToMountError: with the system's reason.
    """
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise NoRightToMountError(mounted.stderr.strip())
    try:
        yield folder
    finally:
        _system("umount", "--lazy", folder)


def fill(disk: Path) -> Path:
    """Take every free byte; the file that holds them."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Inside, nothing can be opened for writing below `folder`; files that are open already stay so.

    A mount of its own over the folder, since a disk on which files are open for writing refuses to become read-only.
    """
    _system("mount", "--bind", folder, folder)
    try:
        _system("mount", "-o", "remount,bind,ro", folder)
        yield
    finally:
        _system("umount", "--lazy", folder)


def _system(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)

"""Appending to a file of lines so that a full disk leaves whole lines only."""

import os
from contextlib import suppress
from pathlib import Path


def append_whole(path: Path, text: str) -> None:
    """Add `text` at the end, on disk when this returns; on an error the file is as it was.

    Unbuffered: what a buffered file could not write it would write again when it is closed, in the wrong place.

    Raises:
        OSError: the disk does not take all of it.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), before)
            raise

"""Writing files so that a full disk or a crash never leaves half of one behind."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` by one with this content; readers see the old file or the new one.

    Raises:
        OSError: the disk does not take all of it; the old file stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def append_whole(path: Path, text: str) -> None:
    """Append `text`; it is on disk when this returns, and after an error the file is unchanged.

    The file is opened without a buffer: a buffered file would write again, when it is closed, what the disk refused.

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

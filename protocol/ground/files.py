"""The files of a run: named by iteration, and written whole, so that no full disk and no crash leaves half of one."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from protocol.errors import RunFolderError, reason_of

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""An adapter's tensors in a checkpoint or a folder, by diffusers' name."""
AVERAGE = "average"
"""The folder in a checkpoint with the running mean of the adapter, in a run with `learner.average`."""
MANIFEST = "manifest.json"
"""sha256 of a checkpoint's files; written last, so a checkpoint without it is not whole."""


def iteration_name(iteration: int, suffix: str = "") -> str:
    """Name what belongs to an iteration, such as `iteration_000040` or `iteration_000040.npz`."""
    return f"iteration_{iteration:06d}{suffix}"


def by_iteration(folder: Path, suffix: str = "") -> dict[int, Path]:
    """List the paths that `iteration_name` named, oldest first; a copy such as `iteration_000040_best` is left out.

    Raises:
        OSError: the folder cannot be listed, so it is not known to be empty; `Path.glob` would list nothing then.
    """
    named = re.compile(rf"iteration_(\d{{6,}}){re.escape(suffix)}")
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = ((named.fullmatch(path.name), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in found if match))


@contextmanager
def whole(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder; the file, folder or link that the block writes there replaces `path`.

    Readers see the old content or the whole new one. If the block raises, its file is removed.

    Args:
        path: replaced in one step. A folder only replaces an empty one.
        is_shared: other processes may write the same path now.

    Raises:
        OSError: `path` cannot be replaced.
    """
    partial = path.with_name(f".{uuid4().hex if is_shared else path.name}.partial")
    _remove(partial)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Turn an OSError of the block into a RunFolderError: `path` cannot be written; `option` sets another path."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {reason_of(error)}; fix that or set {option}") from error


def text_of(path: Path | str) -> str:
    """Return a path as text that a file can hold: what is not UTF-8 in it becomes an escape such as `\\xff`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def existing_of(path: Path) -> Path:
    """Return the path if there is something, else the nearest folder above it; a link that leads nowhere counts too."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))


def require_folder_of(path: Path, option: str) -> None:
    """Check early that the file `path` has a folder to write to (RunFolderError); `option` sets another path."""
    if not os.access(path.parent, os.W_OK):
        raise RunFolderError(f"{path} cannot be written: no folder {path.parent} to write to; make it or set {option}")


def sha256_of(path: Path) -> str:
    """Compute a file's sha256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def share(path: Path) -> None:
    """Give a file its folder's permissions to read and write; safetensors writes files for their owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write this content to the file at `path`; readers see the old content or the new.

    Raises:
        OSError: the disk does not take all of it; the old file stays.
    """
    with whole(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def append_whole(path: Path, text: str) -> None:
    """Append `text`; it is on disk when this returns, and after an error the file is unchanged.

    If the file ends inside a line, since the machine died while it was written, the text begins a line of its own.

    The file is opened without a buffer: a buffered file would write the refused bytes once more when it is closed.

    Raises:
        OSError: the disk does not take all of it.
    """
    data = text.encode()
    with path.open("ab+", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        if data and before and os.pread(file.fileno(), 1, before - 1) != b"\n":
            data = b"\n" + data
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), before)
            raise

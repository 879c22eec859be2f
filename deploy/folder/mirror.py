"""Copies a run's checkpoints to any store that fsspec knows: s3://, gs://, sftp://, file://, memory://.

A copy is complete only with its manifest, which is written last. A failed copy is a line in the log, not an exception
in the run; the next checkpoint is copied again. A run that starts in an empty folder begins with the newest whole copy.
It also fetches the copy with the best held-out score, and the copies at the peaks of scorers that `guards.hacking`
watches.
"""

import errno
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from deploy.folder.names import CHECKPOINTS, CONFIG, COPIED
from deploy.folder.read import best_of, evaluation_scores, parsed_config, peaks_of
from learner.checkpoint import MANIFEST, checkpoint_folders, read_checkpoint
from protocol.errors import CheckpointError, RunFolderError, one_line, reason_of
from protocol.ground.files import iteration_name, whole

log = logging.getLogger(__name__)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a disk that takes no more."""
CLOSE_S = 120.0
"""Seconds that the end of a run waits for the pending copies."""


class Mirror:
    """The store at `checkpoint.url`; a separate thread makes the copies."""

    def __init__(self, url: str) -> None:
        """Open the store.

        Raises:
            RunFolderError: fsspec cannot open the URL.
        """
        self._url = url
        self._waiting: Queue[tuple[Path, Sequence[Path]] | None] = Queue()
        self._thread = Thread(target=self._work, name="mirror", daemon=True)  # a copy that hangs keeps no process alive
        self._is_left = False
        try:
            self._store: fsspec.AbstractFileSystem
            self._store, root = url_to_fs(url)
        except Exception as error:  # each store raises its own exceptions
            reason = one_line(error)
            remedy = "install its library" if isinstance(error, ImportError) else "name another"
            raise RunFolderError(f"checkpoint.url {url} cannot be opened: {reason}; {remedy}") from error
        self._root = root.rstrip("/")

    def push(self, checkpoint: Path, *, beside: Sequence[Path]) -> None:
        """Begin to copy a checkpoint and the existing files of `beside`; remove copies whose checkpoint was removed."""
        if self._thread.ident is None:
            self._thread.start()
        self._waiting.put((checkpoint, beside))

    def config(self) -> str | None:
        """Read the copy of the run's `config.yaml`; None if there is none."""
        try:
            with self._store.open(f"{self._root}/{CONFIG}") as file:
                content: Any = file.read()
                return bytes(content).decode()
        except FileNotFoundError:
            return None
        except Exception as error:  # each store raises its own exceptions
            raise self._unreadable(error) from error

    def pull(self, run: Path) -> None:
        """Fill an empty run folder with the newest whole copy, and with the copies that pruning keeps.

        A store without copies fills nothing; damaged copies are reported and skipped.

        Raises:
            CheckpointError: there are copies, but none is whole.
            RunFolderError: the store does not answer, or the disk of the run folder is full.
        """
        try:
            copies = f"{self._root}/{CHECKPOINTS}"
            listed = [name for name in self._names() if self._store.exists(f"{copies}/{name}/{MANIFEST}")]
            if not listed:
                return
            taken = self._take_newest(listed, run / CHECKPOINTS)
            for name in COPIED:
                if self._store.exists(f"{self._root}/{name}"):
                    self._store.get_file(f"{self._root}/{name}", str(run / name))
            self._take_kept([name for name in listed if _age(name) <= _age(taken)], run)
        except (CheckpointError, RunFolderError):
            raise
        except Exception as error:  # each store raises its own exceptions
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise RunFolderError(
                    f"{run.parent} must have room for the copies of checkpoint.url {self._url}, got"
                    f" {reason_of(error)}: free some space there, or name another folder"
                ) from error
            raise self._unreadable(error) from error
        log.info("filled from %s: %s", self._url, taken)

    def _take_newest(self, names: Sequence[str], checkpoints: Path) -> str:
        """Fetch copies, newest first, until one is whole; return its name."""
        reasons = []
        for name in reversed(names):
            try:
                self._take(name, checkpoints)
            except CheckpointError as error:
                log.warning("checkpoint refused: %s", error)
                reasons.append(str(error))
            else:
                return name
        raise CheckpointError(f"no checkpoint at {self._url} is whole; the newest: {reasons[0]}")

    def _take_kept(self, names: Sequence[str], run: Path) -> None:
        """Fetch the copies with the best held-out score and at the peaks of watched scorers.

        The next push removes all copies that the folder lacks.
        """
        try:
            scores, text = evaluation_scores(run), self.config()
            listed = [iteration for iteration in scores if iteration_name(iteration) in names]
            kept = peaks_of(run, parsed_config(self._url, text), listed) if text else set()
        except RunFolderError as error:
            log.warning("checkpoint refused: %s", error)
            return
        best = best_of(scores, listed)
        for name in {iteration_name(each) for each in kept | ({best} if best is not None else set())} - {names[-1]}:
            try:
                self._take(name, run / CHECKPOINTS)
            except CheckpointError as error:
                log.warning("checkpoint refused: %s", error)

    def _take(self, name: str, checkpoints: Path) -> None:
        """Fetch a copy; raise CheckpointError if it is damaged."""
        copy = f"{self._root}/{CHECKPOINTS}/{name}"
        with whole(checkpoints / name) as partial:
            paths: Any = self._store.find(copy)
            for path in paths:
                file = partial / path.removeprefix(f"{copy}/")
                file.parent.mkdir(parents=True, exist_ok=True)
                self._store.get_file(path, str(file))
            read_checkpoint(partial)

    def close(self) -> None:
        """Wait for the pending copies, for at most `CLOSE_S` seconds."""
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._is_left = self._thread.is_alive()
        if self._is_left:
            log.warning("the copy to %s is not finished and was abandoned", self._url)

    def _work(self) -> None:
        while (copy := self._waiting.get()) and not self._is_left:
            try:
                self._push(*copy)
            except Exception as error:  # noqa: BLE001  each store raises its own exceptions
                log.warning("a checkpoint could not be copied to %s: %s", self._url, error)

    def _push(self, checkpoint: Path, beside: Sequence[Path]) -> None:
        folder = f"{self._root}/{CHECKPOINTS}/{checkpoint.name}"
        self._store.makedirs(folder, exist_ok=True)
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path != checkpoint / MANIFEST]
        for path in filter(Path.exists, beside):
            self._put(path, f"{self._root}/{path.name}")
        for path in (*files, checkpoint / MANIFEST):
            copy = f"{folder}/{path.relative_to(checkpoint).as_posix()}"
            self._store.makedirs(copy.rpartition("/")[0], exist_ok=True)
            self._put(path, copy)
        held = {path.name for path in checkpoint_folders(checkpoint.parent)}
        for name in self._names():
            if name not in held and _age(name) < _age(checkpoint.name):
                with suppress(FileNotFoundError):  # a copy that was never whole has none
                    self._store.rm_file(f"{self._root}/{CHECKPOINTS}/{name}/{MANIFEST}")
                self._store.rm(f"{self._root}/{CHECKPOINTS}/{name}", recursive=True)

    def _put(self, path: Path, copy: str) -> None:
        """Copy a file whole or not at all; on a disk, unlike in an object store, this needs a temporary name."""
        if not isinstance(self._store, LocalFileSystem):
            self._store.put_file(str(path), copy)
            return
        with whole(Path(copy)) as partial:
            shutil.copyfile(path, partial)

    def _names(self) -> list[str]:
        """Return the names of the copies, oldest first."""
        if not self._store.exists(f"{self._root}/{CHECKPOINTS}"):
            return []
        paths = self._store.ls(f"{self._root}/{CHECKPOINTS}", detail=False, refresh=True)
        return sorted((path.rstrip("/").rsplit("/", 1)[-1] for path in paths), key=_age)

    def _unreadable(self, error: Exception) -> RunFolderError:
        reason = one_line(error)
        return RunFolderError(f"checkpoint.url {self._url} cannot be read: {reason}")


def _age(name: str) -> tuple[int, str]:
    """Return a key that sorts `iteration_999999` before `iteration_1000000`."""
    return len(name), name

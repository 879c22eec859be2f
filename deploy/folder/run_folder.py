"""A run's folder: it holds all results of the run, and all that the run needs in order to continue.

`deploy.folder.names` lists its files, `deploy.folder.read` reads them. A full or read-only disk does not end a run:
metric lines stay in memory, and the checkpoint is tried again after each iteration.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from deploy.board.lease import BoardLease, lease_on_board
from deploy.folder.fingerprint import differences, input_digests, library_versions, read_digests, version_changes
from deploy.folder.lease import Lease
from deploy.folder.mirror import Mirror
from deploy.folder.names import (
    CHECKPOINTS,
    CONFIG,
    COPIED,
    EVENTS,
    FILLING,
    GALLERY,
    INPUTS,
    LEASE,
    LOG,
    METRICS,
    MLFLOW,
    ORIGIN,
    RECORDS,
    STATUS,
    TRAJECTORIES,
    WANDB,
)
from deploy.folder.read import (
    Fork,
    Origin,
    best_of,
    config_of,
    evaluation_scores,
    lines_of,
    origin_of,
    parsed_config,
    peaks_of,
    require_fork_of,
    require_same,
)
from deploy.presets import DEFAULT
from learner.checkpoint import BEST, LATEST, newest_checkpoint, put_back, read_facts, write_checkpoint
from protocol.config.run import RunConfig
from protocol.errors import LeaseLostError, RunFolderError, reason_of
from protocol.ground.files import append_whole, by_iteration, existing_of, iteration_name, write_whole, writing
from protocol.messages import LearnerState

log = logging.getLogger(__name__)
Say = Callable[[str], None]


class RunFolder:
    """The folder of one run; `open_run_folder` makes it, and only the process that holds it open writes."""

    def __init__(
        self, path: Path, config: RunConfig, fork: Fork | None = None, sources: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            fork: the run that this one begins from; None for a run of its own.
            sources: what set each key of the config, see `Origin`.
        """
        self.path = path
        self.fork = fork
        self._sources = dict(sources or {})
        self.config = config
        self.checkpoints = path / CHECKPOINTS
        self.gallery = path / GALLERY
        self.trajectories = path / TRAJECTORIES
        self._is_made = not path.exists()
        self._lease: Lease | None = None
        self.board_lease: BoardLease | None = None
        self._log: logging.Handler | None = None
        self._pending: list[str] = []
        self._mirror = Mirror(config.checkpoint.url) if config.checkpoint.url else None

    def open(self, say: Say, start: LearnerState | None = None) -> None:
        """Make missing folders, take the leases, write the config and begin the log.

        `config.yaml` is written last; a process that finds none starts over, so a fork never lacks its first
        checkpoint.

        Args:
            start: the state with which a new run begins; None for a run that begins with an adapter of its own.

        Raises:
            RunFolderError: the folder cannot be written, another process holds it, or prompts or model have changed.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lease = Lease.take(self.path, say=say)
            self.board_lease = lease_on_board(self.config, self.path, self._lease, say)
            self.checkpoints.mkdir(exist_ok=True)
            put_back(self.checkpoints)
            self.gallery.mkdir(exist_ok=True)
            self.trajectories.mkdir(exist_ok=True)
            self._fill_from_mirror()
            is_begun = any((self.path / name).exists() for name in (CONFIG, FILLING))
            if not is_begun or read_digests(self.path / INPUTS) is None:
                write_whole(self.path / INPUTS, json.dumps(input_digests(self.config), indent=1))
            else:
                _require_same_inputs(self.path, self.config)
            self._write_origin(origin_of(self.path) if is_begun else None)
            first = None
            if start and not by_iteration(self.checkpoints):
                (self.path / FILLING).touch()
                first = self._write(start)
            write_whole(self.path / CONFIG, self.config.to_yaml())
            (self.path / FILLING).unlink(missing_ok=True)
            if first:
                self._push(first)
            self._log = _log_to(self.path / LOG)

    def _write_origin(self, held: Origin | None) -> None:
        """Write how the run began; in one that is resumed, only what set the values that differ now."""
        if held is None:
            origin = Origin(versions=library_versions(), fork=self.fork, sources=self._sources)
        else:
            is_filled = not (self.path / CONFIG).exists()  # from a copy; its config comes last
            now = self.config.flat_fields()
            before = now if is_filled else config_of(self.path).flat_fields()
            changed = {key: self._sources.get(key, DEFAULT) for key in now if now[key] != before.get(key)}
            origin = held.model_copy(update={"sources": held.sources | changed})
        if origin != held:
            write_whole(self.path / ORIGIN, origin.model_dump_json(indent=1))

    def close(self) -> None:
        """End the log and release the leases."""
        if self._mirror:
            self._mirror.close()
        if self._log:
            logging.getLogger().removeHandler(self._log)
            self._log.close()
        if self.board_lease:
            self.board_lease.release()
        if self._lease:
            self._lease.release()

    def abandon(self) -> None:
        """Close a folder that could not be opened; remove what came from a mirror, and all if this process made it."""
        with suppress(OSError):
            if self._lease and not (self.path / CONFIG).exists():
                self._undo_filling()
        if self._is_made and not (self.path / CONFIG).exists():
            with suppress(OSError):
                self._remove_beginnings()
        self.close()

    def _remove_beginnings(self) -> None:
        """Remove folders only if they are empty: another process may have begun to use this folder too."""
        if self._lease:
            for name in (INPUTS, ORIGIN):
                (self.path / name).unlink(missing_ok=True)
            self._lease.clear()
        for folder in (self.checkpoints, self.gallery, self.trajectories, self.path / LEASE, self.path):
            if folder.exists():
                folder.rmdir()

    def require_writer(self) -> None:
        """Check that this process still holds the leases of the folder and of the board.

        Raises:
            LeaseLostError: another process has taken over.
        """
        for lease in (self._lease, self.board_lease):
            if lease:
                lease.require()

    def is_writer(self) -> bool:
        try:
            self.require_writer()
        except LeaseLostError:
            return False
        return True

    def discard_if_unused(self, *, is_forked: bool = False) -> None:
        """Remove a folder without any result, so that a run with a corrected config can take its name."""
        learned = {path.name for path in self.checkpoints.iterdir()} - (
            {iteration_name(0), LATEST, BEST} if is_forked else set()
        )
        if not self.is_writer() or self.lines() or learned or any(self.gallery.iterdir()):
            return
        with suppress(OSError):
            for name in (CONFIG, INPUTS, ORIGIN, METRICS, EVENTS, LOG, STATUS, WANDB, MLFLOW):
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.checkpoints, self.gallery, self.trajectories):
                shutil.rmtree(folder)
            for name in RECORDS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            if self._lease:
                self._lease.clear()
                self._lease.release()
                self._lease = None
            if self._is_made:
                self.path.rmdir()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a disk error inside the block into a `RunFolderError`.

        Raises:
            LeaseLostError: another process has taken over.
        """
        self.require_writer()
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RunFolderError(
                f"run folder {self.path} cannot be written: {reason_of(error)}; fix that or set --run"
            ) from error

    def newest(self) -> tuple[LearnerState, Path] | None:
        """Read the newest whole checkpoint; None for a new run."""
        return newest_checkpoint(self.checkpoints)

    def save(self, state: LearnerState) -> Path:
        """Write all pending lines, then a checkpoint, and return its folder."""
        with self.writing():
            self._flush()
            path = self._write(state)
        self._push(path)
        return path

    def _write(self, state: LearnerState) -> Path:
        settings = self.config.checkpoint
        held = {*by_iteration(self.checkpoints), state.iteration}
        return write_checkpoint(
            self.checkpoints,
            state,
            self.config.model.lora,
            keep=settings.keep,
            keep_hours=settings.keep_hours,
            best=best_of(self.evaluation_scores(), held),
            peaks=peaks_of(self.path, self.config, held),
            facts={"versions": library_versions(), "config": self.config.model_dump(mode="json")},
        )

    def _push(self, checkpoint: Path) -> None:
        if self._mirror:
            self._mirror.push(checkpoint, beside=[self.path / name for name in (CONFIG, *COPIED)])

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line of metrics and write it to disk; numbers that are not finite become null.

        Raises:
            RunFolderError: the line could not be written; the next call tries it again.
        """
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        self._pending.append(json.dumps(finite) + "\n")
        with self.writing():
            self._flush()

    def _flush(self) -> None:
        """Write all pending lines, or none of them."""
        append_whole(self.path / METRICS, "".join(self._pending))
        self._pending.clear()

    def lines(self) -> list[dict[str, Any]]:
        return lines_of(self.path)

    def evaluation_scores(self) -> dict[int, float]:
        return evaluation_scores(self.path)

    def rewind(self, iteration: int) -> None:
        """Remove the lines of metrics after `iteration`: the run repeats these iterations from the checkpoint."""
        self._pending.clear()
        path = self.path / METRICS
        kept = list(takewhile(lambda line: line["iteration"] <= iteration, self.lines()))
        with self.writing():
            if path.exists():
                with path.open("rb") as file:
                    size = sum(len(file.readline()) for _ in kept)
                os.truncate(path, size)

    def version_changes(self, checkpoint: Path) -> list[str]:
        """List what differs from the code and the libraries that wrote this checkpoint."""
        return version_changes(read_facts(checkpoint).get("versions", {}), library_versions())

    def _fill_from_mirror(self) -> None:
        if (self.path / CONFIG).exists():
            return
        self._undo_filling()
        text = self._mirror.config() if self._mirror else None
        if self._mirror and text is not None:
            url = self.config.checkpoint.url
            require_same(url, parsed_config(url, text), self.config, remedy="set another checkpoint.url")
            (self.path / FILLING).touch()
            self._mirror.pull(self.path)
            if self.fork and by_iteration(self.checkpoints):
                require_fork_of(self.path, Path(self.fork.run))

    def _undo_filling(self) -> None:
        """Remove the first checkpoints and what came with them if the folder's config was not reached."""
        if not (self.path / FILLING).exists():
            return
        for path in self.checkpoints.iterdir():
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        for name in (*COPIED, FILLING):
            (self.path / name).unlink(missing_ok=True)


def require_same_run(path: Path, config: RunConfig) -> None:
    """Check that the run in a folder can continue with this config (RunFolderError: config or inputs differ)."""
    _require_same_config(path, config)
    _require_same_inputs(path, config)


def _require_same_config(path: Path, config: RunConfig) -> None:
    remedy = (
        "set --run to a new folder, with --fork to begin with this run's adapter, or leave preset and overrides out to"
        " resume it with this run's own config"
    )
    require_same(path, config_of(path), config, remedy=remedy)


def _require_same_inputs(path: Path, config: RunConfig) -> None:
    held = read_digests(path / INPUTS)
    if held is not None and (changed := differences(held, input_digests(config))):
        raise RunFolderError(
            f"run folder {path} was started with other contents: {', '.join(changed)};"
            " restore them, or start a new run from its adapter with --fork"
        )


def open_run_folder(
    path: Path,
    config: RunConfig,
    *,
    fork: Fork | None = None,
    start: LearnerState | None = None,
    sources: Mapping[str, str] | None = None,
    say: Say = log.warning,
) -> RunFolder:
    """Make a new run folder, or open the folder of a run with an equal config to continue it; the caller closes it.

    Args:
        fork: the adapter of another run with which a new run begins.
        sources: what set each key of the config, see `Origin`.

    Raises:
        RunFolderError: the folder cannot be written, is in use, holds something else, or belongs to another config
            (the keys are listed).
    """
    folder = RunFolder(path, config, fork, sources)
    with folder.writing():
        require_own(path)
        is_run = (path / CONFIG).exists()
    if is_run:
        _require_same_config(path, config)
    try:
        folder.open(say, start)
    except BaseException:
        folder.abandon()
        raise
    return folder


def require_usable(path: Path) -> None:
    """Check that a run could begin or continue in a folder, which is not made.

    Raises:
        RunFolderError: something else is there or above it, or this user may not write there.
    """
    found = existing_of(path)
    with writing(path, "--run"):
        if not found.is_dir():
            raise RunFolderError(
                f"--run must be a folder or a new name, got {path}, and {found} is no folder: change it"
            )
        if not os.access(found, os.W_OK):
            raise RunFolderError(f"--run must be a folder that can be written, got {path}: change it")
        require_own(path)


def require_own(path: Path) -> None:
    """Check that a folder is new, empty or a run's own (RunFolderError; OSError: it cannot be read)."""
    is_begun = (path / CONFIG).exists() or (path / FILLING).exists()
    if not is_begun and path.exists() and not all(map(_is_beginning, path.iterdir())):
        raise RunFolderError(f"run folder {path} must be new, empty or a run's own, got one with other files")
    for each in (path / name for name in (CHECKPOINTS, GALLERY, TRAJECTORIES, LEASE)):
        if os.path.lexists(each) and not each.is_dir():
            raise RunFolderError(f"{each} must be a folder, got a file: remove it, or set --run to another folder")


def _is_beginning(path: Path) -> bool:
    """Return whether a run that is killed before it writes its config can leave this file or folder."""
    if path.name in (CHECKPOINTS, GALLERY, TRAJECTORIES):
        return path.is_dir() and not any(path.iterdir())
    return path.name in (LEASE, INPUTS, ORIGIN) or path.name.endswith(".partial")


def _log_to(path: Path) -> logging.Handler:
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


class _LogFile(logging.FileHandler):
    """A log file that drops lines that a full disk refuses; a condition reports the disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        return

"""A run's folder: everything that a run leaves behind, and what it goes on from.

config.yaml         the whole config
metrics.jsonl       one line an iteration, and one an evaluation
checkpoints/        see `learner.checkpoint`
samples/            pictures of the evaluations
run.log             what happened, with times
"""

import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from learner.checkpoint import newest_checkpoint, write_checkpoint
from protocol.config import RunConfig
from protocol.config_file import parse_config
from protocol.errors import ConfigError, RunFolderError
from protocol.messages import LearnerState

CONFIG, METRICS, LOG = "config.yaml", "metrics.jsonl", "run.log"


class RunFolder:
    """One run's folder; made by `open_run_folder`, written only by the process that holds it open."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self._is_made = not path.exists()
        self._lock = -1
        self._log: logging.Handler | None = None

    def open(self) -> None:
        """Make what is not there yet, keep other processes out, write the config and begin the log.

        Raises:
            RunFolderError: cannot be written, or another process holds it open.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            self.checkpoints.mkdir(exist_ok=True)
            self.samples.mkdir(exist_ok=True)
            partial = self.path / f".{CONFIG}.partial"
            partial.write_text(self.config.to_yaml(), encoding="utf-8")
            os.replace(partial, self.path / CONFIG)
            self._log = _log_to(self.path / LOG)

    def close(self) -> None:
        """End the log and let others in."""
        if self._log:
            logging.getLogger().removeHandler(self._log)
            self._log.close()
        if self._lock >= 0:
            os.close(self._lock)

    def discard_if_unused(self) -> None:
        """Remove a folder in which nothing was drawn or learned, so that a mended config can take its name."""
        if self.lines() or any(self.checkpoints.iterdir()) or any(self.samples.iterdir()):
            return
        with suppress(OSError):
            for name in (CONFIG, METRICS, LOG):
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.checkpoints, self.samples):
                folder.rmdir()
            if self._is_made:
                self.path.rmdir()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, a disk that is full or gone becomes a `RunFolderError`."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise RunFolderError(
                f"run folder {self.path} cannot be written: {reason}; mend that or set --run"
            ) from error

    def newest(self) -> tuple[LearnerState, Path] | None:
        """The newest whole checkpoint; None for a new run."""
        return newest_checkpoint(self.checkpoints)

    def save(self, state: LearnerState) -> Path:
        """Write a checkpoint."""
        settings = self.config.checkpoint
        with self.writing():
            return write_checkpoint(self.checkpoints, state, self.config.model.lora, keep=settings.keep)

    def append(self, line: Mapping[str, Any]) -> None:
        """One line of metrics, on disk when this returns; a number that is not finite stands as null."""
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        with self.writing(), (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics that are whole; a cut-off last one does not count.

        Raises:
            RunFolderError: the file is damaged.
        """
        try:
            text = (self.path / METRICS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except UnicodeDecodeError as error:
            raise RunFolderError(
                f"run folder {self.path} holds a damaged {METRICS}: {error}; mend or remove it"
            ) from None
        whole = text[: text.rfind("\n") + 1]
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise RunFolderError(
                f"run folder {self.path} holds a damaged {METRICS}: {error}; mend or remove it"
            ) from None

    def evaluation_scores(self) -> dict[int, float]:
        """Held-out score by iteration."""
        return {line["iteration"]: line["evaluation/score"] for line in self.lines() if "evaluation/score" in line}

    def rewind(self, iteration: int) -> None:
        """Drop lines of metrics after `iteration`: they are drawn again from the checkpoint."""
        kept = [line for line in self.lines() if line["iteration"] <= iteration]
        partial = self.path / f".{METRICS}.partial"
        with self.writing():
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(partial, self.path / METRICS)


def open_run_folder(path: Path, config: RunConfig) -> RunFolder:
    """Make a new run folder, or open one of an equal config to go on with it; whoever opens it closes it.

    Raises:
        RunFolderError: cannot be written, is in use, holds something else, or belongs to another config (the keys are
            listed).
    """
    folder = RunFolder(path, config)
    with folder.writing():
        is_run = (path / CONFIG).exists()
        if not is_run and path.exists() and any(path.iterdir()):
            raise RunFolderError(f"run folder {path} must be new, empty or a run's own, got one with other files")
    if is_run:
        require_same(path, config, remedy="set --run to a new folder")
    try:
        folder.open()
    except RunFolderError:
        folder.close()
        raise
    return folder


def require_same(path: Path, config: RunConfig, *, section: str = "", remedy: str) -> None:
    """Compare a run folder's config with this one in every key that starts with `section` and may change a result.

    Raises:
        RunFolderError: no readable config there, or some keys differ (they are listed).
    """
    try:
        held = parse_config(yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))).outcome_fields()
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise RunFolderError(f"run folder {path} holds no readable {CONFIG}: {reason}; {remedy}") from None
    wanted = config.outcome_fields()
    differing = [
        f"{key} (there {held.get(key)!r}, now {wanted.get(key)!r})"
        for key in sorted(held.keys() | wanted.keys())
        if key.startswith(section) and held.get(key) != wanted.get(key)
    ]
    if differing:
        raise RunFolderError(f"run folder {path} belongs to another config: {', '.join(differing)}; {remedy}")


def _locked(path: Path) -> int:
    """A descriptor that keeps other processes out while it is open; where the disk has no locks, one that does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunFolderError(f"run folder {path} is in use by another process: end it, or set --run") from None
    except OSError:
        logging.getLogger(__name__).warning("run folder %s cannot be locked against a second run", path)
    return descriptor


def _log_to(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler

"""A run's folder: everything that a run leaves behind, and what it goes on from.

config.yaml         the whole config
metrics.jsonl       one line an iteration, and one an evaluation
checkpoints/        see `learner.checkpoint`
samples/            pictures of the evaluations
run.log             what happened, with times
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from learner.checkpoint import newest_checkpoint, write_checkpoint
from protocol.config import RunConfig, parse_config
from protocol.errors import RunFolderError
from protocol.messages import LearnerState

CONFIG, METRICS, LOG = "config.yaml", "metrics.jsonl", "run.log"


class RunFolder:
    """One run's folder; made by `open_run_folder`, written by the process that runs the loop."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"

    def newest(self) -> tuple[LearnerState, Path] | None:
        """The newest whole checkpoint; None for a new run."""
        return newest_checkpoint(self.checkpoints)

    def save(self, state: LearnerState) -> Path:
        """Write a checkpoint."""
        settings = self.config.checkpoint
        return write_checkpoint(self.checkpoints, state, self.config.model.lora, keep=settings.keep)

    def append(self, line: Mapping[str, Any]) -> None:
        """One line of metrics, on disk when this returns."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics that are whole."""
        try:
            text = (self.path / METRICS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]

    def evaluation_scores(self) -> dict[int, float]:
        """Held-out score by iteration."""
        return {line["iteration"]: line["evaluation/score"] for line in self.lines() if "evaluation/score" in line}

    def rewind(self, iteration: int) -> None:
        """Drop lines of metrics after `iteration`: they are drawn again from the checkpoint."""
        kept = [line for line in self.lines() if line["iteration"] <= iteration]
        partial = self.path / f".{METRICS}.partial"
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self.path / METRICS)


def open_run_folder(path: Path, config: RunConfig) -> RunFolder:
    """Make a new run folder, or open one of an equal config to go on with it.

    Raises:
        RunFolderError: cannot be written, holds something else, or belongs to another config (the keys are listed).
    """
    folder = RunFolder(path, config)
    try:
        if (path / CONFIG).exists():
            _require_same(path, config)
        elif path.exists() and any(path.iterdir()):
            raise RunFolderError(f"run folder {path} must be new, empty or a run's own, got one with other files")
        path.mkdir(parents=True, exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        folder.samples.mkdir(exist_ok=True)
        partial = path / f".{CONFIG}.partial"
        partial.write_text(config.to_yaml(), encoding="utf-8")
        os.replace(partial, path / CONFIG)
        _log_to(path / LOG)
    except OSError as error:
        raise RunFolderError(f"run folder {path} cannot be written: {error.strerror or error}; set --run") from None
    return folder


def _require_same(path: Path, config: RunConfig) -> None:
    try:
        held = parse_config(yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))).outcome_fields()
    except (yaml.YAMLError, AttributeError) as error:
        raise RunFolderError(f"run folder {path} holds an unreadable {CONFIG}: {error}") from None
    wanted = config.outcome_fields()
    differing = [
        f"{key} (there {held.get(key)!r}, now {wanted.get(key)!r})"
        for key in sorted(held.keys() | wanted.keys())
        if held.get(key) != wanted.get(key)
    ]
    if differing:
        raise RunFolderError(
            f"run folder {path} belongs to another config: {', '.join(differing)}; set --run to a new folder"
        )


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)

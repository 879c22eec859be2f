"""Reading a run folder: its config, metric lines, checkpoints and last status.

`deploy.folder.metric_file` reads long metric files in pieces. Only `deploy.folder.run_folder` makes and fills a folder.
"""

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import Field

from deploy.folder.names import CHECKPOINTS, CONFIG, METRICS, ORIGIN, STATUS
from flowcredit.packages import VERSION
from protocol.commands import Command
from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from protocol.errors import CheckpointError, ConfigError, RunFolderError, one_line
from protocol.ground.files import by_iteration, iteration_name, text_of
from protocol.status import Document, Event, RunStatus

if TYPE_CHECKING:
    from protocol.messages import Adapter, LearnerState

Model = TypeVar("Model", bound=Document)
DIGITS = 18
"""Most digits of a whole number in `metrics.jsonl`; what has more is read as a float."""


class StatusFile(Document):
    """The content of `status.json`: services show it without a board, and a restarted run takes it over."""

    status: RunStatus
    events: list[Event] = Field(default_factory=list)
    commands: list[Command] = Field(default_factory=list)


class Fork(Document):
    """The adapter of another run with which a run began."""

    run: str
    """Absolute path of the other run's folder."""
    iteration: int
    digest: str


class Origin(Document):
    """The content of `origin.json`: how a run began, and what set its config."""

    versions: dict[str, str]
    """Versions of ours, of Python and of libraries."""
    fork: Fork | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    """What set each key of the config, see `deploy.presets.sources`; a key that is left out has its default."""


def origin_of(run: Path) -> Origin | None:
    """Read `origin.json`; None if it is missing or not readable."""
    return _document(run / ORIGIN, Origin)


def require_run(run: Path) -> None:
    """Check that a folder holds a run (RunFolderError: it holds none)."""
    if not (run / CONFIG).is_file():
        raise RunFolderError(f"run folder {run} must hold {CONFIG}, got none: give the folder that `train` made")


def config_of(run: Path) -> RunConfig:
    """Read the config of a run.

    Raises:
        RunFolderError: this is not a run folder, or its config cannot be read.
    """
    require_run(run)
    try:
        text = (run / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable_config(run, error) from None
    return parsed_config(run, text)


def source_of(preset: str | Path | None, run: Path | None, other: str) -> str | Path:
    """Return the preset, or the config file of a run for which none is named.

    Args:
        other: how the run could have been named, for the error.

    Returns:
        A preset's name, or the path of a YAML file.

    Raises:
        ConfigError: neither is given.
        RunFolderError: `run` is not a run folder, or its config cannot be read.
    """
    if preset is not None:
        return preset
    if run is None:
        raise ConfigError(f"a preset must be named, {other}: `flowcredit presets` lists them")
    config_of(run)  # its error names the remedy for a key of another version
    return run / CONFIG


def parsed_config(where: object, text: str) -> RunConfig:
    """Parse the text of a `config.yaml`; `where` names its folder in the error (RunFolderError)."""
    try:
        return parse_config(yaml.safe_load(text))
    except (TypeError, ValueError, RecursionError, yaml.YAMLError, ConfigError) as error:
        raise _unreadable_config(where, error) from None


def require_same(where: object, held: RunConfig, config: RunConfig, *, section: str = "", remedy: str) -> None:
    """Compare two configs in every key that starts with `section` and may change a result.

    Args:
        held: the config that was found there.
        section: only keys that start with it are compared; all by default.

    Raises:
        RunFolderError: some keys differ; they are listed.
    """
    there, wanted = held.outcome_fields(), config.outcome_fields()
    differing = [
        f"{key} (there {there.get(key)!r}, now {wanted.get(key)!r})"
        for key in sorted(there.keys() | wanted.keys())
        if key.startswith(section) and there.get(key) != wanted.get(key)
    ]
    if differing:
        raise RunFolderError(f"run folder {where} belongs to another config: {', '.join(differing)}; {remedy}")


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Read all complete lines of `metrics.jsonl`, oldest first; a last line without a line end does not count.

    Raises:
        RunFolderError: the file is damaged.
    """
    return list(each_line_of(run))


def each_line_of(run: Path) -> Iterator[dict[str, Any]]:
    """Read as `lines_of` does, but hold one line at a time: a long run has many."""
    try:
        with (run / METRICS).open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line = line_of_text(text)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {error}") from None
                yield line
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise RunFolderError(f"run folder {run} holds a damaged {METRICS}: {error}; repair or remove it") from None


def line_of_text(text: bytes) -> dict[str, Any]:
    """Parse one line of `metrics.jsonl` (ValueError, RecursionError: it is damaged).

    The lines share the strings of their keys, because a report holds all of them.
    """
    line = json.loads(
        text,
        object_pairs_hook=lambda pairs: {sys.intern(key): value for key, value in pairs},
        parse_int=lambda digits: int(digits) if len(digits) <= DIGITS else float(digits),
    )
    if not isinstance(line, dict) or not isinstance(line.get("iteration"), int):
        raise ValueError(f"a line must be an object with an iteration, got {text[:60]!r}")
    for name, value in line.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {str(value)[:60]!r}")
    return line


def evaluation_scores(run: Path) -> dict[int, float]:
    """Read the held-out score of each evaluated iteration (RunFolderError: the metrics are damaged)."""
    return {line["iteration"]: line["evaluation/score"] for line in each_line_of(run) if "evaluation/score" in line}


def evaluation_means(run: Path) -> dict[int, dict[str, float | None]]:
    """Read each scorer's held-out mean by iteration and name (RunFolderError: the metrics are damaged)."""
    start = "evaluation/reward/"
    return {
        line["iteration"]: {key.removeprefix(start): line[key] for key in line if key.startswith(start)}
        for line in each_line_of(run)
        if "evaluation/score" in line
    }


def peaks_of(run: Path, config: RunConfig, held: Collection[int]) -> set[int]:
    """Find the iterations of `held` at which scorers that `guards.hacking` watches were highest.

    Raises:
        RunFolderError: the metrics are damaged.
    """
    if not config.watched_rewards:
        return set()
    means = evaluation_means(run)
    peaks = [
        best_of({iteration: each.get(name) for iteration, each in means.items()}, held)
        for name in config.watched_rewards
    ]
    return {peak for peak in peaks if peak is not None}


def best_of(scores: Mapping[int, float | None], held: Collection[int]) -> int | None:
    """Return the iteration of `held` with the highest score, the earliest of equals; None if none has a score."""
    found = {iteration: score for iteration, score in scores.items() if iteration in held and score is not None}
    return max(found, key=lambda iteration: (found[iteration], -iteration), default=None)


def best_checkpoint(run: Path) -> int:
    """Return the iteration of the checkpoint with the highest held-out score.

    Raises:
        RunFolderError: no checkpoint has an evaluation, or the metrics are damaged.
    """
    held = list(reversed(by_iteration(run / CHECKPOINTS)))
    best = best_of(evaluation_scores(run), held)
    if best is None:
        raise RunFolderError(
            f"run folder {run} must hold a checkpoint with a held-out score, got checkpoints of iterations {held}"
            " without any: leave --best out"
        )
    return best


def status_of(run: Path) -> StatusFile | None:
    """Read `status.json`; None if it is missing or not readable."""
    return _document(run / STATUS, StatusFile)


def _document(path: Path, model: type[Model]) -> Model | None:
    try:
        return model.read(path.read_bytes())
    except (OSError, ValueError):
        return None


def checkpoint_of(run: Path, iteration: int | None = None) -> "tuple[LearnerState, Path]":
    """Read a run's checkpoint of this iteration, or its newest whole one; return its state and its folder.

    Raises:
        RunFolderError: the run has no checkpoint, or not this one.
        CheckpointError: the checkpoint is damaged.
    """
    from learner.checkpoint import newest_checkpoint, read_checkpoint

    root = run / CHECKPOINTS
    if iteration is not None:
        folder = root / iteration_name(iteration)
        if not folder.is_dir():
            held = [each.name for each in by_iteration(root).values()]
            raise RunFolderError(f"run folder {run} must hold the checkpoint {folder.name}, got {held}")
        return read_checkpoint(folder), folder
    found = newest_checkpoint(root)
    if found is None:
        raise RunFolderError(f"run folder {run} must hold a checkpoint, got none")
    return found


def average_of(state: "LearnerState", run: Path) -> "Adapter":
    """Return the running mean of the adapter that a checkpoint holds.

    Raises:
        RunFolderError: the run keeps no running mean.
    """
    if state.average is None:
        raise RunFolderError(
            f"run folder {run} keeps no running mean: set learner.average.decay, or leave --average out"
        )
    return state.average


def adapter_to_fork(source: Path, config: RunConfig) -> "tuple[Adapter, Fork]":
    """Read the newest adapter of the run `source` as version 0 of a new run with this config, and name its origin.

    Raises:
        RunFolderError: `source` has no whole checkpoint, or its adapter was trained with another `model` section.
    """
    remedy = "a fork keeps the model and its adapter's shape"
    require_same(source, config_of(source), config, section="model.", remedy=remedy)
    try:
        state, _ = checkpoint_of(source)
    except CheckpointError as error:
        raise RunFolderError(f"run folder {source} cannot be forked: {error}") from None
    fork = Fork(run=text_of(source.resolve()), iteration=state.iteration, digest=state.adapter.digest)
    return replace(state.adapter, version=0), fork


def require_fork_of(run: Path, source: Path) -> Fork:
    """Check that the run in `run` began as a fork of `source`; return its origin.

    Raises:
        RunFolderError: it is not a fork, or one of another run.
    """
    origin = origin_of(run)
    if origin is None or origin.fork is None or origin.fork.run != text_of(source.resolve()):
        began = f"it is a fork of {origin.fork.run}" if origin and origin.fork else "it is not a fork"
        raise RunFolderError(
            f"--fork {source} must name the run that {run} began with, but {run} exists and {began}: set --run to a new"
            " folder, or leave --fork out to resume it"
        )
    return origin.fork


def _unreadable_config(where: object, error: Exception) -> RunFolderError:
    reason = one_line(error)
    if "unknown key" in reason:
        origin = origin_of(where) if isinstance(where, Path) else None
        by = f"flowcredit {origin.versions.get('flowcredit')}" if origin else "another version of flowcredit"
        return RunFolderError(
            f"run folder {where} was begun by {by}, this is {VERSION}: {reason}; remove the key from"
            f" {where}/{CONFIG}, or use that version"
        )
    return RunFolderError(f"run folder {where} holds no readable {CONFIG}: {reason}; repair it or name another folder")

"""Reads run folders for a report: their configs, numbers, held-out scores and recorded trajectories.

Runs whose configs differ only in the seed form one group.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deploy.folder.fingerprint import code_name
from deploy.folder.heldout import HeldoutScores, read_heldout
from deploy.folder.metric_file import each_of
from deploy.folder.names import CHECKPOINTS, METRICS, TRAJECTORIES
from deploy.folder.paired import Difference, paired_difference, why_unpaired
from deploy.folder.read import config_of, origin_of, status_of
from deploy.monitor.trajectories import read_records
from deploy.report.lines import ITERATION, Lines
from learner.checkpoint import read_facts
from protocol.config.run import RunConfig
from protocol.errors import RunFolderError
from protocol.ground.files import by_iteration, text_of
from protocol.status import TrajectoryRecord

REWARD, HELDOUT, SECONDS, SPENT = "reward/mean", "evaluation/score", "seconds/iteration", "seconds"


@dataclass(frozen=True)
class Run:
    """The content of one run folder."""

    name: str
    path: Path
    config: RunConfig
    phase: str
    """Phase in its last status; `unknown` without a status."""
    iterations: Lines
    """Metrics of each iteration, with `seconds`: the training seconds up to its end."""
    evaluations: Lines
    """Metrics of each evaluation, with the same `seconds`."""
    damaged: int
    """Number of lines of metrics that cannot be read."""

    @cached_property
    def heldout(self) -> Sequence[HeldoutScores]:
        """Read the held-out scores by prompt, oldest first."""
        return read_heldout(self.path)

    @cached_property
    def records(self) -> Sequence[TrajectoryRecord]:
        """Read the recorded trajectories, oldest first."""
        return read_records(self.path / TRAJECTORIES)

    @cached_property
    def code(self) -> str:
        """Name the code that the run began with and, if it was resumed with other code, the newest."""
        origin = origin_of(self.path)
        held = [origin.versions] if origin else []
        for folder in reversed(by_iteration(self.path / CHECKPOINTS).values()):
            with suppress(OSError, ValueError):
                held.append(read_facts(folder).get("versions", {}))
                break
        return ", later ".join(dict.fromkeys(filter(None, map(code_name, held))))

    @property
    def seconds(self) -> float:
        """Return the training seconds, without evaluations."""
        return self.iterations[-1][SPENT] if self.iterations else 0.0

    def values(self, name: str, *, of: str = "iterations") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a metric as columns.

        Args:
            of: `iterations` or `evaluations`.

        Returns:
            Iterations, training seconds up to their end and values, each [L], for the L lines in which the metric is a
            number.
        """
        lines: Lines = getattr(self, of)
        value, iteration, seconds = lines.columns(name, ITERATION, SPENT)
        return iteration, seconds, value


@dataclass(frozen=True)
class SeedGroup:
    """Runs whose configs differ only in the seed."""

    name: str
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """Return the group's name, with the number of runs if there are several."""
        return f"{self.name} ({len(self.runs)} seeds)" if len(self.runs) > 1 else self.name

    def values(self, name: str, *, of: str = "iterations") -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return a metric of each run that has it.

        Args:
            of: `iterations` or `evaluations`.
        """
        columns = (run.values(name, of=of) for run in self.runs)
        return [each for each in columns if len(each[0])]

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over all iterations of all runs; None if no iteration has it."""
        found = [values for _, _, values in self.values(name)]
        return float(np.concatenate(found).mean()) if found else None

    def first_and_last(self, name: str, *, of: str = "iterations") -> tuple[float, float] | None:
        """Return the mean over runs of a metric's first and of its last value; None if no run has it."""
        found = [(values[0], values[-1]) for _, _, values in self.values(name, of=of)]
        return (float(np.mean([a for a, _ in found])), float(np.mean([b for _, b in found]))) if found else None

    def names(self, prefix: str, *, of: str = "iterations") -> list[str]:
        """Return the names of metrics that begin with `prefix`, in the order of their first lines."""
        names = (name for run in self.runs for name in getattr(run, of).names())
        return [name for name in dict.fromkeys(names) if name.startswith(prefix)]


def change_of(group: SeedGroup, tag: str | None = None) -> tuple[Difference | None, str]:
    """Compare a group's newest evaluations with its first ones, prompt by prompt; the images of its runs are pooled.

    Returns:
        The difference for one kind of prompts, or for all; None, and the reason, if there is none.
    """
    ends = [(run.heldout[0], run.heldout[-1]) for run in group.runs if len(run.heldout) > 1]
    if not ends:
        return None, "no two evaluations with scores by prompt"
    first = ends[0][0]
    for held in (each for pair in ends for each in pair):
        if reason := why_unpaired(first, held):
            return None, reason
    found = paired_difference([a for a, _ in ends], [b for _, b in ends], tag=tag)
    return found, "" if found else "a kind of prompts without a score"


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run folder; damaged lines of metrics are left out and counted.

    Raises:
        RunFolderError: this is not a run folder, or this version cannot read it.
    """
    config = config_of(path)
    spent, damaged, iterations, evaluations = 0.0, 0, Lines(), Lines()
    for line in each_of(path / METRICS):
        if line is None:
            damaged += 1
            continue
        if REWARD in line:
            spent += line.get(SECONDS) or 0.0
            iterations.append({**line, SPENT: spent})
        if HELDOUT in line:
            evaluations.append({**line, SPENT: spent})
    status = status_of(path)
    return Run(
        name=name or text_of(path.resolve().name),
        path=path,
        config=config,
        phase=status.status.phase if status else "unknown",
        iterations=iterations,
        evaluations=evaluations,
        damaged=damaged,
    )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read each of these run folders once; runs with equal names are named by their paths.

    Raises:
        RunFolderError: one of them is not a run folder, or none of them has a line of metrics.
    """
    folders = list({path.resolve(): path for path in paths}.values())
    names = [path.resolve().name for path in folders]
    runs = [
        read_run(path, text_of(path if names.count(name) > 1 else name))
        for path, name in zip(folders, names, strict=True)
    ]
    if not any(run.iterations or run.evaluations for run in runs):
        shown = ", ".join(str(run.path) for run in runs)
        raise RunFolderError(f"a run must have a line of {METRICS} to be shown, got none in {shown}: train it first")
    return runs


def groups_of(runs: Sequence[Run]) -> list[SeedGroup]:
    """SeedGroup runs that differ only in the seed; config keys that cannot change a result are ignored."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        fields = run.config.outcome_fields()
        del fields["seed"]
        found.setdefault(repr(sorted(fields.items())), []).append(run)
    return [group_of(group) for group in found.values()]


def group_of(runs: Sequence[Run]) -> SeedGroup:
    return SeedGroup(name=_common_name(runs), runs=runs)


def code_of(group: SeedGroup) -> str:
    """Name the code of a group's runs, as they recorded it; empty if they did not."""
    return ", ".join(dict.fromkeys(run.code for run in group.runs))


def rough_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def config_differences(groups: Sequence[SeedGroup]) -> list[tuple[str, list[Any]]]:
    """List the keys except the seed in which the configs of groups differ, even if they cannot change a result.

    Returns:
        Each key with its value in the first run of each group; None if that config lacks the key.
    """
    flat = [group.runs[0].config.flat_fields() for group in groups]
    keys = dict.fromkeys(key for each in flat for key in each if key != "seed")
    rows = [(key, [each.get(key) for each in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _common_name(runs: Sequence[Run]) -> str:
    """Name a group by the common part of its runs' names before a final number, or else by its first run."""
    stems = {run.name.rstrip("_-. 0123456789") for run in runs}
    return stems.pop() or runs[0].name if len(runs) > 1 and len(stems) == 1 else runs[0].name

"""The guard against reward hacking: the trained reward rises on held-out images while a scorer that never trains falls.

Every evaluation makes its images from the same noise, so two of them are compared image by image.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protocol.config.run import RunConfig
from protocol.errors import GuardError
from protocol.ground.files import AVERAGE
from protocol.sink import StatusSink

CONDITION = "Guard/hacking"
SURE = 2.0
"""Standard errors of the mean difference above which a scorer rose or fell."""
DIGITS = 6
"""Digits after the point of a reading in the run folder. Each comparison rounds to them: after a resume, an image whose
reading has not changed must not differ from itself."""

Readings = Mapping[str, np.ndarray]
"""Each scorer's readings of the held-out images, [P, images per prompt], NaN where there is none."""
Find = Callable[[int], Path | None]
"""Returns the folder of an iteration's checkpoint; None if there is none."""


class Measured(NamedTuple):
    """What the guard compares of one evaluation."""

    iteration: int
    readings: Readings
    """Empty if unavailable: a run restored from `checkpoint.url` has no gallery."""
    means: Mapping[str, float]
    """Each scorer's mean as the metrics hold it, so that after a resume the same evaluation is the peak; NaN if there
    is none."""


@dataclass
class Peak:
    """The evaluation at which a watched scorer was highest, and for how many evaluations the rule has been broken."""

    iteration: int
    mean: float
    watched: np.ndarray
    trained: np.ndarray
    broken: int = 0


class HackingGuard:
    """Compares every evaluation with the one at which a watched scorer was highest.

    The rule is broken while that scorer is lower and the trained reward higher than at that evaluation, both by more
    than `SURE` standard errors. `RunConfig.watched_rewards` are watched.
    """

    def __init__(self, config: RunConfig, sink: StatusSink, *, find: Find, earlier: Sequence[Measured] = ()) -> None:
        """
        Args:
            config: its `guards.hacking` decides what happens.
            find: finds the checkpoint of an earlier evaluation, to name it.
            earlier: the evaluations before a resume, oldest first.
        """
        self._mode, self._patience = config.guards.hacking, config.guards.hacking_evaluations
        self._weights, self._watched = config.evaluated_weights, config.watched_rewards
        self._is_average = config.evaluation.adapter == "average"
        self._sink, self._find = sink, find
        self._means: dict[int, Mapping[str, float]] = {}
        self._peaks: dict[str, Peak] = {}
        for measured in earlier:
            self._compare(measured)
        self._was_broken = any(self._over_patience())

    @property
    def peaks(self) -> frozenset[int]:
        """Iterations at which a watched scorer was highest so far; their checkpoints are kept."""
        return frozenset(peak.iteration for peak in self._peaks.values())

    def check(self, measured: Measured) -> None:
        """Check the next evaluation.

        Raises:
            GuardError: the rule is broken in `guards.hacking_evaluations` evaluations in a row, and the mode is `stop`.
        """
        self._compare(measured)
        hacked = self._over_patience()
        if not hacked:
            if self._was_broken:
                message = "no watched scorer falls while the trained reward rises any more"
                self._sink.condition(CONDITION, holds=True, reason="Kept", message=message)
            self._was_broken = False
            return
        self._was_broken = True
        name, peak = next(iter(hacked.items()))
        message = (
            f"guard hacking: scorer {name!r}, which never trains, must not fall while the trained reward rises, got"
            f" {measured.means[name]:.4f} at iteration {measured.iteration} after {peak.mean:.4f} at iteration"
            f" {peak.iteration} (in {peak.broken} evaluations in a row); {self._better(name, measured, peak)}; for"
            " the next run raise learner.kl.weight, or mix several rewards"
        )
        self._sink.condition(CONDITION, holds=False, reason="Broken", message=message)
        if self._mode == "stop":
            raise GuardError(message)

    def _better(self, name: str, measured: Measured, peak: Peak) -> str:
        """Name the best checkpoint on disk; after a resume it may be of an evaluation without readings."""
        means = {iteration: means.get(name, math.nan) for iteration, means in self._means.items()}
        higher = [iteration for iteration, mean in means.items() if mean > measured.means[name]]
        for iteration in sorted(higher, key=lambda each: (-means[each], each)):
            if folder := self._find(iteration):
                return self._use_of(iteration, folder)
        return f"the adapter of iteration {peak.iteration} was better, but its checkpoint is not on disk"

    def _use_of(self, iteration: int, folder: Path) -> str:
        words = f"--iteration {iteration}"
        if self._is_average:
            folder = folder / AVERAGE
            commands = f"`flowcredit generate` and `export` take it with {words} --average, `eval` with {words}"
        else:
            commands = f"`flowcredit generate`, `eval` and `export` take it with {words}"
        return (
            f"the better checkpoint is kept: {folder}; {commands}, and a new run starts from it with"
            f" model.lora.start={folder}"
        )

    def _over_patience(self) -> dict[str, Peak]:
        return {name: peak for name, peak in self._peaks.items() if peak.broken >= self._patience}

    def _compare(self, measured: Measured) -> None:
        self._means[measured.iteration] = measured.means
        readings = {name: np.round(np.asarray(table, float), DIGITS) for name, table in measured.readings.items()}
        if not all(name in readings for name in self._weights):
            return
        trained = sum((weight * readings[name] for name, weight in self._weights.items()), np.zeros(1))
        for name in self._watched:
            if name not in readings or not np.isfinite(readings[name]).any():
                continue
            own, mean = readings[name], measured.means[name]
            peak = self._peaks.get(name)
            if peak is None or mean > peak.mean or peak.watched.shape != own.shape:
                self._peaks[name] = Peak(iteration=measured.iteration, mean=mean, watched=own, trained=trained)
            elif rose(peak.watched, own) <= -SURE and rose(peak.trained, trained) >= SURE:
                peak.broken += 1
            else:
                peak.broken = 0


def rose(before: np.ndarray, after: np.ndarray) -> float:
    """Return the mean difference of the same images' readings, in standard errors.

    Images without a reading are left out. 0 where fewer than two images have both readings; plus or minus infinity
    where all differences are the same.
    """
    differences = (after - before)[np.isfinite(after) & np.isfinite(before)]
    if len(differences) < 2:
        return 0.0
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0

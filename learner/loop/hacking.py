"""The guard against reward hacking: the trained reward rises on held-out images while a scorer that never trains falls.

Every evaluation makes its images from the same noise, so two of them are compared image by image.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from learner.loop.evaluate import mean_of
from protocol.config.run import RunConfig
from protocol.errors import GuardError
from protocol.sink import StatusSink

CONDITION = "Guard/hacking"
SURE = 2.0
"""Standard errors of the mean difference above which a scorer rose or fell."""

Readings = Mapping[str, np.ndarray]
"""Each scorer's readings of the held-out images, [P, images per prompt], NaN where there is none."""


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
    than `SURE` standard errors. Scorers with `use: evaluate` are watched.
    """

    def __init__(self, config: RunConfig, sink: StatusSink, *, earlier: Sequence[tuple[int, Readings]] = ()) -> None:
        """
        Args:
            config: its `guards.hacking` decides what happens.
            sink: receives the condition.
            earlier: readings of the evaluations before a resume, oldest first.
        """
        self._mode, self._patience = config.guards.hacking, config.guards.hacking_evaluations
        self._weights = config.evaluated_weights
        self._watched = [name for name, reward in config.rewards.items() if reward.use == "evaluate"]
        self._sink = sink
        self._peaks: dict[str, Peak] = {}
        for iteration, readings in earlier:
            self._compare(iteration, readings)
        self._was_broken = any(self._over_patience())

    def check(self, iteration: int, readings: Readings) -> None:
        """Check the next evaluation.

        Raises:
            GuardError: the rule is broken in `guards.hacking_evaluations` evaluations in a row, and the mode is `stop`.
        """
        if self._mode == "off":
            return
        self._compare(iteration, readings)
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
            f" {mean_of(self._newest[name]):.4f} at iteration {iteration} after {peak.mean:.4f} at iteration"
            f" {peak.iteration} (in {peak.broken} evaluations in a row); the adapter of iteration {peak.iteration} is"
            " the better one: raise learner.kl.weight, or mix several rewards"
        )
        self._sink.condition(CONDITION, holds=False, reason="Broken", message=message)
        if self._mode == "stop":
            raise GuardError(message)

    def _over_patience(self) -> dict[str, Peak]:
        return {name: peak for name, peak in self._peaks.items() if peak.broken >= self._patience}

    def _compare(self, iteration: int, readings: Readings) -> None:
        self._newest = readings
        if not all(name in readings for name in self._weights):
            return
        trained = sum((weight * readings[name] for name, weight in self._weights.items()), np.zeros(1))
        for name in self._watched:
            if name not in readings or not np.isfinite(readings[name]).any():
                continue
            own, mean = readings[name], mean_of(readings[name])
            peak = self._peaks.get(name)
            if peak is None or mean > peak.mean or peak.watched.shape != own.shape:
                self._peaks[name] = Peak(iteration=iteration, mean=mean, watched=own, trained=trained)
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

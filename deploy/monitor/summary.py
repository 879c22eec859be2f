"""Summaries of a run's metric lines for its status: reward and trend, pace, stages, bottleneck."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from statistics import linear_regression, median

from protocol.status import Bottleneck, MetricLine, Rewards

TREND = 20
"""Number of newest iterations from which the trend is computed."""
STEP_REWARD = re.compile(r"step_reward/step_(\d+)_abs_mean")
STAGE = "seconds/"
WHOLE = ("iteration", "evaluation")
"""Seconds that are no stage of an iteration."""
ROUNDING = 1e-12
"""A number up to this size may be the rounding of a difference, and is shown as 0."""
Values = Mapping[str, float | None]


def is_iteration(line: MetricLine) -> bool:
    """Return whether a line belongs to an iteration; all others belong to evaluations."""
    return "reward/mean" in line.values


def is_evaluation(line: MetricLine) -> bool:
    return "evaluation/score" in line.values


def line_of(seq: int, values: Mapping[str, object]) -> MetricLine:
    """Turn a line of `metrics.jsonl` into a metric line; numbers that are not finite become None.

    The lines share the strings of their keys, because thousands of lines may be in memory at the same time.
    """
    numbers = {
        sys.intern(key): _finite(value) for key, value in values.items() if isinstance(value, int | float | None)
    }
    return MetricLine(seq=seq, values=numbers)


def rewards_of(lines: Sequence[MetricLine]) -> Rewards:
    """Summarise the training reward and the held-out score."""
    iterations: list[Values] = [line.values for line in lines if is_iteration(line)]
    evaluations: list[Values] = [line.values for line in lines if is_evaluation(line)] or [{}]
    newest = iterations[-1] if iterations else {}
    trend, error = _trend([values["reward/mean"] for values in iterations[-TREND:]])
    low, high = (evaluations[-1].get(f"heldout_change/{end}") for end in ("low", "high"))
    skipped = {"reward/mean", "reward/group_std", "reward/missing"}
    return Rewards(
        now=newest.get("reward/mean"),
        trend=trend,
        trend_error=error,
        components={
            k.removeprefix("reward/"): v for k, v in newest.items() if k.startswith("reward/") and k not in skipped
        },
        heldout=evaluations[-1].get("evaluation/score"),
        heldout_first=evaluations[0].get("evaluation/score") if len(evaluations) > 1 else None,
        heldout_iteration=_whole(evaluations[-1].get("iteration")),
        heldout_change=None if low is None or high is None else (low, high),
    )


def metrics_of(lines: Sequence[MetricLine]) -> dict[str, float | None]:
    """Return the numbers of the newest iteration and of the newest evaluation."""
    kinds = (is_evaluation, is_iteration)
    newest = [next((line.values for line in reversed(lines) if kind(line)), {}) for kind in kinds]
    return {name: value for values in newest for name, value in values.items() if name != "iteration"}


def step_rewards_of(values: Values) -> dict[str, float | None]:
    """Return the mean absolute step reward by denoising step."""
    return {found[1]: value for key, value in values.items() if (found := STEP_REWARD.fullmatch(key))}


def stages_of(values: Values) -> dict[str, float]:
    """Return an iteration's seconds of wall time by stage, without their sum."""
    named = {key.removeprefix(STAGE): value for key, value in values.items() if key.startswith(STAGE)}
    return {name: value for name, value in named.items() if value is not None and name not in WHOLE}


def number(value: float | None, form: str = ".3f") -> str:
    """Write a number for people.

    Returns:
        Such as `0.125`; `none` if it is missing or not finite; `2.3e-04` if it is not 0 but would be shown as 0.
    """
    if value is None or not math.isfinite(value):
        return "none"
    text = f"{value:{form}}"
    is_small = abs(value) > ROUNDING and float(text) == 0
    return f"{value:{'+' if form.startswith('+') else ''}.1e}" if is_small else text


def change_words(low: float, high: float) -> str:
    """Write the interval of a change, or that it may be chance."""
    interval = f"{number(low, '+.3f')} to {number(high, '+.3f')}"
    return f"95 %: {interval}" if low > 0 or high < 0 else f"within chance, 95 %: {interval}"


def duration(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds; one below 0, from a clock that was set back, is 0."""
    return str(timedelta(seconds=max(0, round(seconds))))


def eta_s(finished_at: Sequence[float], *, left: int) -> float | None:
    """Estimate the seconds to the end: the median time of an iteration, times the number of iterations `left`."""
    gaps = [later - earlier for earlier, later in pairwise(finished_at)]
    if left == 0:
        return 0.0
    return median(gaps) * left if gaps else None


def bottleneck_of(stages: Mapping[str, float], busy: Mapping[str, float]) -> Bottleneck | None:
    """Find the slowest part of an iteration.

    It is the longest stage; for the stage that generates and scores images, it is the pool whose actors worked for the
    largest share of the time.

    Args:
        stages: seconds of wall time by stage.
        busy: share of the iteration, 0 to 1, in which each pool's actors worked.

    Returns:
        The slowest part with its share of the iteration; None if no stage took time.
    """
    total = sum(stages.values())
    if not total:
        return None
    stage = max(stages, key=lambda name: stages[name])
    share, text = stages[stage] / total, f"takes {stages[stage]:.1f} s of {total:.1f} s an iteration"
    if stage != "rollout_and_reward":
        side = "learner" if stage == "update" else stage
        remedy = ": rollout and reward actors wait for it" if stage == "update" else ""
        return Bottleneck(side=side, share=share, message=f"{stage} {text}{remedy}")
    pool = max((name for name in busy if name != "learner"), key=lambda name: busy[name], default="rollout")
    return Bottleneck(side=pool, share=share, message=f"generating and scoring {text}; busiest: {pool}")


def _trend(rewards: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the least-squares slope over 10 iterations, and its standard error."""
    points = [(index, value) for index, value in enumerate(rewards) if value is not None]
    if len(points) < 10:
        return None, None
    x, y = zip(*points, strict=True)
    slope, intercept = linear_regression(x, y)
    rest = sum((value - intercept - slope * index) ** 2 for index, value in points)
    middle = sum(x) / len(x)
    spread = sum((index - middle) ** 2 for index in x)
    return 10 * slope, 10 * math.sqrt(rest / (len(points) - 2) / spread)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

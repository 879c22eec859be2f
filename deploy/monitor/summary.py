"""From a run's metric lines to what one glance should tell: reward and trend, pace, stages, the slow side."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from protocol.status import Bottleneck, Diagnostics, MetricLine, Rewards

TREND = 20
"""Newest iterations that the trend is taken from."""
GAIN = re.compile(r"gain/step_(\d+)_abs_mean")
STAGE = "seconds/"
Values = Mapping[str, float | None]


def is_iteration(line: MetricLine) -> bool:
    """Whether the line tells of an iteration; others tell of an evaluation."""
    return "reward/mean" in line.values


def line_of(seq: int, values: Mapping[str, object]) -> MetricLine:
    """A line of `metrics.jsonl` with null for what is no finite number."""
    numbers = {key: _finite(value) for key, value in values.items() if isinstance(value, int | float | None)}
    return MetricLine(seq=seq, values=numbers)


def rewards_of(lines: Sequence[MetricLine]) -> Rewards:
    """The training reward and the held-out score."""
    steps = [line.values for line in lines if is_iteration(line)]
    evaluations = [line.values for line in lines if "evaluation/score" in line.values]
    newest: Values = steps[-1] if steps else {}
    skipped = {"reward/mean", "reward/group_std", "reward/missing"}
    return Rewards(
        now=newest.get("reward/mean"),
        trend=_trend([values["reward/mean"] for values in steps[-TREND:]]),
        components={
            k.removeprefix("reward/"): v for k, v in newest.items() if k.startswith("reward/") and k not in skipped
        },
        heldout=evaluations[-1]["evaluation/score"] if evaluations else None,
        heldout_first=evaluations[0]["evaluation/score"] if evaluations else None,
        heldout_iteration=_whole(evaluations[-1].get("iteration")) if evaluations else None,
    )


def diagnostics_of(values: Values, *, staleness: int | None) -> Diagnostics:
    """How an update went."""
    names = ("ratio_mean", "first_ratio_deviation", "clip_fraction", "approx_kl", "grad_norm", "loss")
    return Diagnostics(
        **{name: values.get(f"train/{name}") for name in names},
        zero_variance=values.get("group/zero_variance"),
        missing_scores=values.get("reward/missing"),
        staleness=staleness,
    )


def gains_of(values: Values) -> dict[str, float | None]:
    """Mean absolute gain by denoising step."""
    return {found[1]: value for key, value in values.items() if (found := GAIN.fullmatch(key))}


def stages_of(values: Values) -> dict[str, float]:
    """Wall seconds by stage, without their sum."""
    named = {key.removeprefix(STAGE): value for key, value in values.items() if key.startswith(STAGE)}
    return {stage: value for stage, value in named.items() if value is not None and stage != "iteration"}


def eta_s(finished_at: Sequence[float], *, left: int) -> float | None:
    """Seconds to the end: the median time from one iteration's end to the next, times what is left."""
    gaps = [later - earlier for earlier, later in pairwise(finished_at)]
    if left == 0:
        return 0.0
    return median(gaps) * left if gaps else None


def bottleneck_of(stages: Mapping[str, float], busy: Mapping[str, float]) -> Bottleneck | None:
    """Which side an iteration waits for most.

    The longest stage names the side; inside the stage in which images are drawn and scored it is the pool whose
    actors worked the largest share of the time.

    Args:
        busy: share of the iteration in which each pool's actors worked.
    """
    total = sum(stages.values())
    if not total:
        return None
    stage = max(stages, key=lambda name: stages[name])
    share, text = stages[stage] / total, f"takes {stages[stage]:.1f} s of {total:.1f} s an iteration"
    if stage != "rollout_and_reward":
        side = "learner" if stage == "update" else stage
        remedy = ": rollout and reward actors wait meanwhile" if stage == "update" else ""
        return Bottleneck(side=side, share=share, message=f"{stage} {text}{remedy}")
    pool = max(busy, key=lambda name: busy[name], default="rollout")
    return Bottleneck(side=pool, share=share, message=f"drawing and scoring {text}; busiest: {pool}")


def _trend(rewards: Sequence[float | None]) -> float | None:
    points = [(place, value) for place, value in enumerate(rewards) if value is not None]
    if len(points) < 3:
        return None
    x0, y0 = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - x0) ** 2 for x, _ in points)
    return 10 * sum((x - x0) * (y - y0) for x, y in points) / spread


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

"""Which side of the loop waits, and what to change: the counted forwards of an iteration, by actor.

| the two sides                                                                | an iteration, at best   |
|------------------------------------------------------------------------------|-------------------------|
| take turns: `group.max_lag=0`, and credit needs the scores of all groups     | rollout + update        |
| work at the same time: a lag, or `credit.scale=prompt` with raw values       | the longer of the two   |

A forward is one row through the transformer once. Rewards, decoding and publication are not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.tools.estimate import Evaluations
from protocol.config.run import RunConfig

ENOUGH = 0.1
"""A change is proposed if it saves more than this share of an iteration."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Forwards of an iteration, for the busiest actor of each side."""

    rollout: float
    """Of one rollout actor."""
    update: float
    """Of one learner worker."""
    overlaps: bool
    """Whether the two sides work at the same time."""
    actors: int
    workers: int

    @property
    def iteration(self) -> float:
        """Forwards that pass one after another in an iteration."""
        return max(self.rollout, self.update) if self.overlaps else self.rollout + self.update

    def waits(self) -> dict[str, float]:
        """Return the share of an iteration in which each side waits for the other."""
        return {
            "rollout actors": 1 - self.rollout / self.iteration,
            "learner workers": 1 - self.update / self.iteration,
        }


def balance_of(
    config: RunConfig, counts: Evaluations, *, actors: int = 0, workers: int = 0, overlaps: bool = False
) -> Balance:
    """Share the counted forwards among the actors; whole shards go to whole actors.

    Args:
        config: of the run.
        counts: of one iteration.
        actors: rollout actors instead of the config's.
        workers: learner workers instead of the config's.
        overlaps: the sides work at the same time even if the config lets them take turns.

    Returns:
        Forwards of the busiest actor of each side.
    """
    actors, workers = actors or config.cluster.rollout_actors, workers or config.cluster.learner.workers
    shards = config.group.per_iteration * config.group.size // config.group.shard
    updates = config.learner.updates_per_iteration
    step = shards // updates
    own = sum(1 for shard in range(step) if shard % config.learner.lanes % workers == 0)
    return Balance(
        rollout=-(-shards // actors) * counts.rollout / shards,
        update=counts.learner * own / step,
        overlaps=overlaps or bool(config.group.max_lag) or config.credits_groups_alone,
        actors=actors,
        workers=workers,
    )


def best_split(config: RunConfig, counts: Evaluations) -> Balance:
    """Find the numbers of rollout actors and learner workers that make the shortest iteration if both work at once.

    Args:
        config: of the run; the sum of its rollout actors and learner workers is kept.
        counts: of one iteration.

    Returns:
        The shortest iteration; the fewest workers among equals.
    """
    total = config.cluster.rollout_actors + config.cluster.learner.workers
    lanes = config.learner.lanes
    sizes = [workers for workers in range(1, total) if lanes % workers == 0]
    splits = [balance_of(config, counts, actors=total - workers, workers=workers, overlaps=True) for workers in sizes]
    return min(splits, key=lambda split: split.iteration)


def advice(config: RunConfig, counts: Evaluations, *, tflops: float | None = None) -> Iterator[str]:
    """Say which side waits, and what to change.

    Args:
        config: of the run.
        counts: of one iteration.
        tflops: 10^12 operations a second that one GPU really does; then seconds and GPU-hours are said too.

    Returns:
        Lines for a person.
    """
    now = balance_of(config, counts)
    yield (
        f"in an iteration one of {now.actors} rollout actors makes {now.rollout:.0f} forwards, one of {now.workers}"
        f" learner workers as much as {now.update:.0f}"
    )
    waits = now.waits()
    parts = " and ".join(f"{side} {share:.0%}" for side, share in waits.items())
    how = "work at the same time" if now.overlaps else "take turns"
    yield f"the sides {how} and wait for each other: {parts} of the time"
    yield from _changes(config, counts, now)
    if tflops:
        each_s = counts.forward_flops / (tflops * 1e12)
        seconds = now.iteration * each_s
        gpus = now.actors * (config.cluster.rollout.gpus or 1) + now.workers * (config.cluster.learner.gpus or 1)
        yield (
            f"at {tflops:g} TFLOP/s a forward takes {each_s:.3g} s: an iteration takes {seconds:.0f} s or more and"
            f" {seconds * gpus / 3600:.2f} GPU-hours of rollout and learner"
        )


def _changes(config: RunConfig, counts: Evaluations, now: Balance) -> Iterator[str]:
    held = balance_of(config, counts, overlaps=True)
    saved = 1 - held.iteration / now.iteration
    if saved > ENOUGH:
        yield f"group.max_lag=1 would let them work at the same time: an iteration would take {saved:.0%} less"
    best = best_split(config, counts)
    saved = 1 - best.iteration / held.iteration
    if saved > ENOUGH:
        yield (
            f"working at the same time, cluster.rollout_actors={best.actors} and cluster.learner.workers={best.workers}"
            f" would make it {saved:.0%} shorter with as many actors"
        )
    elif held.update > held.rollout:
        yield "more rollout actors would not help: the learner is the slower side"
    elif held.rollout > held.update:
        yield "more learner workers would not help: the rollout actors are the slower side"

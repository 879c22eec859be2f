"""Shows which side of the loop waits, and what to change: the forwards of an iteration, by actor.

| rollout and update                                                           | shortest iteration      |
|------------------------------------------------------------------------------|-------------------------|
| take turns: `group.max_lag=0`, and credit needs the scores of all groups     | rollout + update        |
| take turns on the same GPUs: `cluster.layout=colocated`                      | rollout + update        |
| work at the same time: a lag, or `credit.scale=prompt` with raw values       | the longer of the two   |

With `colocated` no GPU waits: n GPUs work for the rollouts, then all n for the update.

A forward is one pass of one row through the transformer. Rewards and publication are not counted; decoding is counted
only in the seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deploy.tools.estimate import Evaluations
from protocol.config.run import RunConfig

ENOUGH = 0.1
"""A change is proposed if it saves more than this share of an iteration."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Forwards of an iteration, for the busiest actor of each side."""

    rollout: float
    """Forwards of one rollout actor."""
    update: float
    """Work of one learner worker, as a number of forwards."""
    overlaps: bool
    """Whether the two sides work at the same time."""
    actors: int
    workers: int

    @property
    def iteration(self) -> float:
        """Return the number of forwards that an iteration makes one after another."""
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
    """Divide the counted forwards among the actors; a shard is never split.

    Args:
        config: config of the run.
        counts: counts of one iteration.
        actors: number of rollout actors; 0 takes that of the config.
        workers: number of learner workers; 0 takes that of the config.
        overlaps: whether the sides work at the same time even if the config lets them take turns.

    Returns:
        Forwards of the busiest actor of each side.
    """
    actors, workers = actors or config.cluster.rollout_actors, workers or config.cluster.learner.workers
    shards = config.group.shards
    step = shards // config.learner.updates_per_iteration
    own = sum(1 for shard in range(step) if shard % config.learner.lanes % workers == 0)
    return Balance(
        rollout=-(-shards // actors) * counts.rollout / shards,
        update=counts.learner * own / step,
        overlaps=overlaps or config.overlaps,
        actors=actors,
        workers=workers,
    )


def gpus_of(config: RunConfig) -> int:
    """Count one GPU for each rollout actor and learner worker, or for each colocated bundle; on a CPU do the same."""
    cluster = config.cluster
    return cluster.rollout_actors + (0 if cluster.is_colocated else cluster.learner.workers)


def best_split(config: RunConfig, counts: Evaluations) -> Balance | None:
    """Find the numbers of rollout actors and learner workers with the shortest iteration if both work at once.

    Args:
        config: config of the run; the number of its GPUs (`gpus_of`) is kept.
        counts: counts of one iteration.

    Returns:
        The balance with the shortest iteration, and the fewest workers among equals; None for a single GPU.
    """
    total = gpus_of(config)
    lanes = config.learner.lanes
    sizes = [workers for workers in range(1, total) if lanes % workers == 0]
    splits = [balance_of(config, counts, actors=total - workers, workers=workers, overlaps=True) for workers in sizes]
    return min(splits, key=lambda split: split.iteration, default=None)


def best_bundles(config: RunConfig, counts: Evaluations) -> Balance:
    """Compute the balance of `cluster.layout: colocated` with as many bundles as the config's GPUs and lanes allow.

    Args:
        config: config of the run.
        counts: counts of one iteration.

    Returns:
        The balance; its sides take turns.
    """
    bundles = max(size for size in range(1, gpus_of(config) + 1) if config.learner.lanes % size == 0)
    return replace(balance_of(config, counts, actors=bundles, workers=bundles), overlaps=False)


def advice(config: RunConfig, counts: Evaluations, *, tflops: float | None = None) -> Iterator[str]:
    """Describe which side waits, and what to change.

    Args:
        config: config of the run.
        counts: counts of one iteration.
        tflops: measured rate of one GPU, also for the VAE, in 10^12 operations per second; adds seconds and GPU-hours.

    Yields:
        Lines of text.
    """
    now = balance_of(config, counts)
    yield (
        f"in an iteration each of {now.actors} rollout actors makes {now.rollout:.0f} forwards, and each of"
        f" {now.workers} learner workers works as long as {now.update:.0f} forwards take"
    )
    waits = now.waits()
    parts = ", ".join(f"the {side} wait {share:.0%} of the time" for side, share in waits.items())
    how = "work at the same time" if now.overlaps else "take turns"
    if config.cluster.is_colocated:
        yield f"each rollout actor takes turns with its learner worker on one GPU: {parts}"
        yield from _separation(config, counts, now)
    else:
        yield f"rollout actors and learner workers {how}: {parts}"
        yield from _changes(config, counts, now)
    if tflops:
        each_s, decoding_s = (flops / (tflops * 1e12) for flops in (counts.forward_flops, counts.decoding_flops))
        sides = now.rollout * each_s + decoding_s / now.actors, now.update * each_s
        seconds = max(sides) if now.overlaps else sum(sides)
        rollout, learner = (role.gpus or 1 for role in (config.cluster.rollout, config.cluster.learner))
        gpus = now.actors if config.cluster.is_colocated else now.actors * rollout + now.workers * learner
        hours = seconds * gpus / 3600
        yield (
            f"at {tflops:.3g} TFLOP/s a forward takes {each_s:.3g} s, and an iteration takes {seconds:.3g} s or more,"
            f" {decoding_s / now.actors:.3g} s of it to decode images"
        )
        yield (
            f"rollout and learner together take {hours:.2g} GPU-hours an iteration, and"
            f" {config.iterations * hours:.3g} GPU-hours for all {config.iterations} iterations"
        )


def _changes(config: RunConfig, counts: Evaluations, now: Balance) -> Iterator[str]:
    held = balance_of(config, counts, overlaps=True)
    saved = 1 - held.iteration / now.iteration
    if saved > ENOUGH:
        yield f"faster: with group.max_lag=1 they work at the same time, and an iteration is {saved:.0%} shorter"
    bundles = best_bundles(config, counts)
    saved = 1 - bundles.iteration / now.iteration
    if saved > ENOUGH:
        yield (
            f"faster: with cluster.layout=colocated, cluster.rollout_actors={bundles.actors} and"
            f" cluster.learner.workers={bundles.workers} ({bundles.actors} bundles of both on one GPU) an iteration is"
            f" {saved:.0%} shorter, without a lag"
        )
    best = best_split(config, counts)
    if best and (saved := 1 - best.iteration / held.iteration) > ENOUGH:
        yield (
            f"faster: if they work at the same time, cluster.rollout_actors={best.actors} and"
            f" cluster.learner.workers={best.workers} make an iteration {saved:.0%} shorter with as many actors"
        )
    elif held.update > held.rollout:
        yield "more rollout actors would not help: the learner is the slower side"
    elif held.rollout > held.update:
        yield "more learner workers would not help: the rollout actors are the slower side"


def _separation(config: RunConfig, counts: Evaluations, now: Balance) -> Iterator[str]:
    best = best_split(config, counts)
    if best and (saved := 1 - best.iteration / now.iteration) > ENOUGH:
        yield (
            f"faster: with cluster.layout=separate, group.max_lag=1, cluster.rollout_actors={best.actors} and"
            f" cluster.learner.workers={best.workers} an iteration is {saved:.0%} shorter"
        )

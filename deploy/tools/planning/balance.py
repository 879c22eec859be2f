"""Which side of the loop waits: the forwards of an iteration, by actor.

| rollout and update                                                           | shortest iteration      |
|------------------------------------------------------------------------------|-------------------------|
| take turns: `group.max_lag=0`, and credit needs the scores of all groups     | rollout + update        |
| take turns on the same GPUs: `cluster.layout=colocated`                      | rollout + update        |
| work at the same time: a lag, or `credit.scale=prompt` with raw values       | the longer of the two   |

A forward is one pass of one row through the transformer. `deploy.tools.planning.plan` adds decoding, scoring and the
rest.
"""

from dataclasses import dataclass

from deploy.tools.estimate import IterationCounts
from protocol.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Forwards of an iteration, for the busiest actor of each side."""

    rollout: float
    """Forwards of one rollout actor."""
    update: float
    """Work of one learner worker, as a number of forwards."""
    overlaps: bool
    """Whether the two sides work at the same time."""

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


def balance_of(config: RunConfig, counts: IterationCounts) -> Balance:
    """Divide the counted forwards of one iteration among the actors; a shard is never split."""
    workers, shards = config.cluster.learner.workers, config.group.shards
    step = shards // config.learner.updates_per_iteration
    own = sum(1 for shard in range(step) if shard % config.learner.lanes % workers == 0)
    return Balance(
        rollout=-(-shards // config.cluster.rollout_actors) * counts.rollout / shards,
        update=counts.learner * own / step,
        overlaps=config.overlaps,
    )


def balance_line(config: RunConfig, counts: IterationCounts) -> str:
    """Describe which side waits for the other."""
    now = balance_of(config, counts)
    parts = ", ".join(f"the {side} wait {share:.0%} of the time" for side, share in now.waits().items())
    return (
        f"in an iteration a rollout actor makes {now.rollout:,.0f} forwards, and a learner worker works as long as"
        f" {now.update:,.0f} forwards take; they {'work at the same time' if now.overlaps else 'take turns'}: {parts}"
    )

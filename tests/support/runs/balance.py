"""Counts of an iteration and configs of both sides' sizes, for worked numbers."""

from collections.abc import Callable

from deploy.tools.estimate import IterationCounts
from protocol.config.run import RunConfig

COUNTS = IterationCounts(
    trajectories=96,
    rollout=1200,
    images=0,
    pairs=0,
    learner=2400,
    gradient_rows=24,
    forward_flops=2e12,
    gradient_flops=4e12,
)


def config_of(
    tiny_config: Callable[..., RunConfig],
    *,
    actors: int,
    workers: int,
    lag: int = 0,
    scale: str = "iteration",
    layout: str = "separate",
) -> RunConfig:
    return tiny_config(
        group={"size": 8, "shard": 8, "per_iteration": 12, "max_lag": lag},
        learner={"updates_per_iteration": 1},
        credit={"rule": "gains", "values": "raw", "scale": scale},
        cluster={"rollout_actors": actors, "learner": {"workers": workers}, "layout": layout},
    )

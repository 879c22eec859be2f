"""Which steps of a trajectory are stochastic and trained: all that can be, or those inside a window.

Outside the window a step runs as ODE. A window depends on the run's seed, the iteration and the shard's place in its
group only, so every process draws the same one.
"""

from collections.abc import Iterator, Sequence

from flow.maths.noise import generator
from protocol.config.sampling import WindowConfig
from protocol.errors import ConfigError


def window_steps(
    window: WindowConfig, *, candidates: Sequence[int], total: int, seed: int, iteration: int, shard: int
) -> tuple[int, ...]:
    """The stochastic steps of one shard.

    `all`: every candidate (Flow-GRPO). `fixed`: `size` steps from `first`. `random`: `size` steps from a place drawn
    once for each iteration (Flow-GRPO-Fast). `sliding`: `size` steps, one further every `every` iterations, back to the
    first place after the last (MixGRPO, arXiv 2507.21802). `branch`: one step for each shard, the next one in the next
    iteration, so that with shared noise its members branch from one trunk (TempFlow-GRPO, arXiv 2508.04324).

    Args:
        candidates: steps that can be stochastic, ascending: enough std, not the last.
        total: T.
        shard: the shard's place in its group, counted from 0.
    """
    if window.rule == "all":
        return tuple(candidates)
    if window.rule == "branch":
        return (candidates[(shard + iteration) % len(candidates)],)
    return _inside(window, candidates, _start(window, total=total, seed=seed, iteration=iteration))


def require_trainable(window: WindowConfig, *, candidates: Sequence[int], total: int) -> None:
    """Refuse a window that may hold no stochastic step.

    Raises:
        ConfigError: such a place of the window, with the steps that can be stochastic.
    """
    for start in _starts(window, total):
        if not _inside(window, candidates, start):
            raise ConfigError(
                f"sampling.window must always hold a stochastic step, one of {list(candidates)},"
                f" got steps {start} to {start + window.size - 1}: move it or enlarge size"
            )


def _inside(window: WindowConfig, candidates: Sequence[int], start: int) -> tuple[int, ...]:
    return tuple(k for k in candidates if start <= k < start + window.size)


def _starts(window: WindowConfig, total: int) -> Iterator[int]:
    if window.rule == "fixed":
        yield window.first
    elif window.rule in ("random", "sliding"):
        low, high = window.bounds(total)
        yield from range(low, high - window.size + 1)


def _start(window: WindowConfig, *, total: int, seed: int, iteration: int) -> int:
    starts = list(_starts(window, total))
    if window.rule == "random":
        return starts[int(generator("window", seed, iteration).integers(len(starts)))]
    return starts[(iteration // window.every) % len(starts)]

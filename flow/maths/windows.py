"""Windows: which eligible steps of a trajectory are stochastic and trained.

Steps outside the window are plain ODE steps. A window depends only on the run's seed, the iteration, the group's index
in it and the shard's index in its group, so every process finds the same one.
"""

from collections.abc import Iterator, Sequence

from flow.maths.noise import generator
from protocol.config.sampling import WindowConfig
from protocol.errors import ConfigError


def window_steps(
    window: WindowConfig,
    *,
    candidates: Sequence[int],
    total: int,
    seed: int,
    iteration: int,
    group: int = 0,
    shard: int = 0,
) -> tuple[int, ...]:
    """Return the stochastic steps of one shard.

    - `all`: every candidate (Flow-GRPO).
    - `fixed`: `size` steps from `first`.
    - `random`: `size` steps from a random start, one start for each iteration (Flow-GRPO-Fast).
    - `sliding`: `size` steps; the start moves one step further after `every` iterations, and from the last start back
      to the first (MixGRPO, arXiv 2507.21802). With `shrinks`, windows at the end are shorter (its released code).
    - `spread`: `size` neighbouring eligible steps of `within` for each group; the start moves by one step from group to
      group, and from iteration to iteration (ours). So every optimizer step trains all of them, each on some groups.
    - `branch`: one step of `within` for each shard, and the next step in the next iteration. With shared noise the
      members of the shard branch from one trunk (TempFlow-GRPO, arXiv 2508.04324).

    Args:
        window: the rule and its numbers.
        candidates: eligible steps in ascending order: their std is large enough, and the last step is not among them.
        total: T.
        seed: the run's seed.
        iteration: the iteration, from 0.
        group: the group's index in its iteration, from 0.
        shard: the shard's index in its group, from 0.

    Returns:
        Steps k in ascending order.
    """
    if window.rule == "all":
        return tuple(candidates)
    if window.rule == "branch":
        own = _within(window, candidates, total=total)
        return (own[(shard + iteration) % len(own)],)
    if window.rule == "spread":
        own = _within(window, candidates, total=total)
        at = (group + iteration) % window_period(window, candidates=candidates, total=total)
        return tuple(own[at : at + window.size])
    start = _start(window, total=total, seed=seed, iteration=iteration)
    return _inside(window, candidates, start, total=total)


def window_lengths(window: WindowConfig, *, candidates: Sequence[int], total: int) -> set[int]:
    """Return the numbers of stochastic steps that the windows of a run's shards can have.

    Args:
        window: the rule and its numbers.
        candidates: eligible steps in ascending order.
        total: T.

    Returns:
        Numbers of at least 1 for a window that `require_trainable` accepts.
    """
    if window.rule == "all":
        return {len(candidates)}
    if window.rule in ("branch", "spread"):
        return {1 if window.rule == "branch" else window.size}
    return {len(_inside(window, candidates, start, total=total)) for start in _starts(window, total)}


def window_period(window: WindowConfig, *, candidates: Sequence[int], total: int) -> int:
    """Count the groups of an iteration after which `spread` windows repeat; 1 for the other rules.

    Args:
        window: the rule and its numbers.
        candidates: eligible steps in ascending order.
        total: T.

    Returns:
        Different windows, at least 1.
    """
    return len(_within(window, candidates, total=total)) - window.size + 1 if window.rule == "spread" else 1


def require_trainable(window: WindowConfig, *, candidates: Sequence[int], total: int) -> None:
    """Refuse a window that may hold no stochastic step.

    Args:
        window: the rule and its numbers.
        candidates: eligible steps in ascending order.
        total: T.

    Raises:
        ConfigError: some start of the window leaves it without an eligible step.
    """
    needed = {"branch": 1, "spread": window.size}.get(window.rule, 0)
    if len(own := _within(window, candidates, total=total)) < needed:
        raise ConfigError(
            f"sampling.window.within must hold {needed} of the stochastic steps {list(candidates)}, got {own}: widen"
            " it, or lower size"
        )
    for start in _starts(window, total):
        if not _inside(window, candidates, start, total=total):
            raise ConfigError(
                f"sampling.window must always hold a stochastic step, one of {list(candidates)},"
                f" got steps {start} to {_end(window, start, total) - 1}: move it or enlarge size"
            )


def _within(window: WindowConfig, candidates: Sequence[int], *, total: int) -> list[int]:
    low, high = window.bounds(total)
    return [k for k in candidates if low <= k < high]


def _inside(window: WindowConfig, candidates: Sequence[int], start: int, *, total: int) -> tuple[int, ...]:
    return tuple(k for k in candidates if start <= k < _end(window, start, total))


def _end(window: WindowConfig, start: int, total: int) -> int:
    return min(start + window.size, window.bounds(total)[1]) if window.is_shrinking else start + window.size


def _starts(window: WindowConfig, total: int) -> Iterator[int]:
    """Yield every first step that the window can have."""
    if window.rule == "fixed":
        yield window.first
    elif window.rule in ("random", "sliding"):
        low, high = window.bounds(total)
        yield from range(low, high if window.is_shrinking else high - window.size + 1)


def _start(window: WindowConfig, *, total: int, seed: int, iteration: int) -> int:
    starts = list(_starts(window, total))
    if window.rule == "random":
        return starts[int(generator("window", seed, iteration).integers(len(starts)))]
    return starts[(iteration // window.every) % len(starts)]

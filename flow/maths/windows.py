"""Windows: which eligible steps of a trajectory are stochastic and trained, and at which of them branches split.

Steps outside the window are plain ODE steps. A window depends only on the run's seed, the iteration, the group's index
in it and the shard's index in its group, so every process finds the same window.

In all functions `candidates` are the eligible steps k, ascending: their std is large enough, and the last step is not
among them. `total` is T.
"""

import math
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
        iteration: counted from 0.
        group: the group's index in its iteration, from 0.
        shard: the shard's index in its group, from 0.

    Returns:
        Steps k in ascending order.
    """
    if window.rule == "all":
        return tuple(candidates)
    if window.rule == "branch":
        inside = _within(window, candidates, total=total)
        return (inside[(shard + iteration) % len(inside)],)
    if window.rule == "spread":
        inside = _within(window, candidates, total=total)
        at = (group + iteration) % window_period(window, candidates=candidates, total=total)
        return tuple(inside[at : at + window.size])
    start = _start(window, total=total, seed=seed, iteration=iteration)
    return _inside(window, candidates, start, total=total)


def window_lengths(window: WindowConfig, *, candidates: Sequence[int], total: int) -> set[int]:
    """Return the numbers of stochastic steps that the windows of a run's shards can have.

    They are at least 1 for a window that `require_trainable` accepts.
    """
    if window.rule == "all":
        return {len(candidates)}
    if window.rule in ("branch", "spread"):
        return {1 if window.rule == "branch" else window.size}
    return {len(_inside(window, candidates, start, total=total)) for start in _starts(window, total)}


def window_union(window: WindowConfig, *, candidates: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the steps k, ascending, that are stochastic in some shard of a run that is long enough."""
    if window.rule == "all":
        return tuple(candidates)
    if window.rule in ("branch", "spread"):
        return tuple(_within(window, candidates, total=total))
    return tuple(
        sorted({k for start in _starts(window, total) for k in _inside(window, candidates, start, total=total)})
    )


def window_period(window: WindowConfig, *, candidates: Sequence[int], total: int) -> int:
    """Count the groups of an iteration after which `spread` windows repeat; 1 for the other rules."""
    return len(_within(window, candidates, total=total)) - window.size + 1 if window.rule == "spread" else 1


def require_trainable(window: WindowConfig, *, candidates: Sequence[int], total: int) -> None:
    """Refuse a window that may hold no stochastic step.

    Raises:
        ConfigError: some start of the window leaves it without an eligible step.
    """
    needed = {"branch": 1, "spread": window.size}.get(window.rule, 0)
    if len(inside := _within(window, candidates, total=total)) < needed:
        raise ConfigError(
            f"sampling.window.within must hold {needed} of the stochastic steps {list(candidates)}, got {inside}: widen"
            " it, or lower size"
        )
    for start in _starts(window, total):
        if not _inside(window, candidates, start, total=total):
            raise ConfigError(
                f"sampling.window must always hold a stochastic step, one of {list(candidates)},"
                f" got steps {start} to {_end(window, start, total) - 1}: move it or enlarge size"
            )


def splits_of(shares: Sequence[float], explored: Sequence[int]) -> tuple[int, ...]:
    """Return the stochastic steps at which each branch splits into two.

    Args:
        shares: `sampling.splits`, shares of the shard's stochastic steps in [0, 1), ascending.
        explored: S stochastic steps of the shard, ascending.

    Returns:
        Steps k: share s names the stochastic step with ceil(s S) others before it.

    Raises:
        ConfigError: the shares do not name different steps.
    """
    # The small number keeps a share such as 0.3 of ten steps, 3.0000000000000004 in floats, at three.
    indices = [math.ceil(share * len(explored) - 1e-9) for share in shares]
    if len(set(indices)) < len(indices) or (indices and max(indices) >= len(explored)):
        raise ConfigError(
            f"sampling.splits must name different ones of the {len(explored)} stochastic steps {list(explored)}, got"
            f" {list(shares)}, the steps with {indices} others before them: take other shares, more sampling.steps or a"
            " larger window, or lower sampling.std_min"
        )
    return tuple(explored[index] for index in indices)


def strides_of(shares: Sequence[float], explored: Sequence[int]) -> dict[int, int]:
    """Map a shard's stochastic steps to the number of consecutive members that share each; empty without splits.

    That number is 2 to the number of splits after the step. Arguments and errors as in `splits_of`.
    """
    splits = splits_of(shares, explored)
    return {k: 2 ** sum(split > k for split in splits) for k in explored} if splits else {}


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

"""Trees: members of a shard that share states and noise until they split (BranchGRPO, arXiv 2509.06040)."""

import math
from collections.abc import Sequence

from protocol.errors import ConfigError


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
    if len(set(indices)) < len(indices) or max(indices, default=0) >= len(explored) > 0:
        raise ConfigError(
            f"sampling.splits must name different ones of the {len(explored)} stochastic steps {list(explored)}, got"
            f" {list(shares)}, the steps with {indices} others before them: take other shares, more sampling.steps or a"
            " larger window, or lower sampling.std_min"
        )
    return tuple(explored[index] for index in indices)


def strides_of(shares: Sequence[float], explored: Sequence[int]) -> dict[int, int]:
    """Return, by stochastic step, how many neighbouring members share the step's state and noise.

    Args:
        shares: as in `splits_of`.
        explored: as in `splits_of`.

    Returns:
        2 to the number of splits after the step; empty without splits.

    Raises:
        ConfigError: as in `splits_of`.
    """
    splits = splits_of(shares, explored)
    return {k: 2 ** sum(split > k for split in splits) for k in explored} if splits else {}

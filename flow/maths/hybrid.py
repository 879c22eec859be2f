"""Hybrid generation: the trained adapter takes the first steps, the base model the others, with the same guidance,
schedule and noise.

MixGRPO (arXiv 2507.21802) generates in this way against reward hacking, and calls the trained model's share p_mix. Its
released script sets the number of steps itself, 30 of 50.
"""

import math
from fractions import Fraction

from protocol.errors import ConfigError


def first_steps(share: float, steps: int) -> int:
    """Return how many of `steps` the adapter takes, from the first: the nearest whole number, but at least 1.

    A half goes to the adapter: a share of 0.5 of 5 steps is 3 of them. A share of 1 is all steps.

    Raises:
        ConfigError: the share is outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(
            f"the adapter's share of the steps must be above 0 and at most 1, got {share:g}: give 1 for the adapter in"
            " all steps, or less, such as 0.6"
        )
    exact = Fraction(str(share)) * steps  # as floats, 0.7 * 45 is less than 31.5
    return max(1, math.floor(exact + Fraction(1, 2)))

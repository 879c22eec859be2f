"""Step weights: factors of each step's advantages."""

import math
from collections.abc import Collection, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from protocol.config.credit import StepWeightConfig
from protocol.errors import ConfigError


def step_weights(
    config: StepWeightConfig, *, total: int, stds: Mapping[int, float], trained: Collection[int] | None = None
) -> Float[Tensor, " T"]:
    """Compute one weight for each step of the schedule, by the config's rule.

    Args:
        total: T, the length of the whole schedule, even if only a window of it is trained.
        stds: std s_k of every step that can be stochastic, by step k.
        trained: the steps among them that the windows of a run hold; None for all.

    Returns:
        float32 weights.

    Raises:
        ConfigError: all steps that the run trains have weight 0, or the powers of `noise` cannot be computed.
    """
    if config.rule == "piecewise":
        weights = piecewise(total, early=config.early, middle=config.middle, late=config.late)
    elif config.rule == "noise":
        weights = by_noise(total, stds, power=config.noise_power, constant=config.noise_constant)
    elif config.rule == "table":
        weights = torch.tensor(config.table, dtype=torch.float64)
    else:
        weights = torch.ones(total, dtype=torch.float64)
    steps = list(stds if trained is None else trained)
    if steps and not any(weights[k] > 0 for k in steps):
        raise ConfigError(
            f"credit.step_weights must be above 0 for a step that is trained, one of {steps}, got {weights.tolist()}:"
            " nothing would train; raise one"
        )
    return weights.float()


def piecewise(total: int, *, early: float, middle: float, late: float) -> Float[Tensor, " T"]:
    """`early` where k < T/4, `late` where k > 3T/4, `middle` between, k counted from 0.

    A recipe of practitioners, not from a paper (1.8, 1.0, 1.3). With T = 4 the weights are 1.8 1 1 1: none is late.

    Args:
        total: T.
        early: weight of the first quarter.
        middle: weight between.
        late: weight of the last quarter.

    Returns:
        float64 weights.
    """
    return torch.tensor(
        [early if 4 * k < total else late if 4 * k > 3 * total else middle for k in range(total)], dtype=torch.float64
    )


def by_noise(
    total: int, stds: Mapping[int, float], *, power: float = 1.0, constant: float | None = None
) -> Float[Tensor, " T"]:
    """w_k = s_k^p / mean(s^p) over the steps that can be stochastic; TempFlow-GRPO (arXiv 2508.04324, eq. 8) has p = 1.

    s_k is the std of the whole step, g sqrt(h) for Flow-SDE. Other steps are never trained and get weight 0. With p = 2
    (ours) a step has the gradient of -|x' - mean|^2 / 2, whatever its std.

    Args:
        total: T.
        stds: s_k by step k.
        power: p.
        constant: if given, w_k = constant * s_k^p instead; 2.25 in TempFlow-GRPO's released code.

    Returns:
        float64 weights.

    Raises:
        ConfigError: the powers are too small or too large for float64.
    """
    try:
        powers = {k: std**power for k, std in stds.items()}
    except OverflowError:
        powers = {}
    if stds and not 0 < sum(powers.values()) < math.inf:
        raise ConfigError(
            f"credit.step_weights.noise_power must give numbers that a float holds, got {power:g} for the stds"
            f" {[round(std, 4) for std in stds.values()]}: lower it"
        )
    weights = torch.zeros(total, dtype=torch.float64)
    for k, value in powers.items():
        weights[k] = value
    return weights * (len(powers) / sum(powers.values()) if constant is None else constant)

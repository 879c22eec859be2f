"""Credit rules: from the rewards of a group's images to one step reward for every stochastic step.

Every rule has the signature `rule(rewards [N, P], valid [N, P], steps=S) -> (values [N, S], valid [N, S])`; a step
reward is valid only when every reward it is made of is. Worked numbers stand in `docs/method/` and the tests.
TP-GRPO's rule looks at all groups of an iteration and stands in `learner/credit/turning_point.py`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

StepRewards = tuple[Float[Tensor, "N S"], Bool[Tensor, "N S"]]
CreditRule = Callable[..., StepRewards]


def uniform(rewards: Float[Tensor, "N P"], valid: Bool[Tensor, "N P"], *, steps: int) -> StepRewards:
    """Flow-GRPO (arXiv 2505.05470): every step earns the final image's reward, r_S.

    Args:
        rewards: P is 1 (final images only) or S + 1; the last column counts.
        steps: S.
    """
    return rewards[:, -1:].repeat(1, steps), valid[:, -1:].repeat(1, steps)


def gains(rewards: Float[Tensor, "N P"], valid: Bool[Tensor, "N P"], *, steps: int) -> StepRewards:
    """Stepwise-Flow-GRPO (arXiv 2603.28718): each step earns what it changed, g_k = r_{k+1} - r_k.

    The gains of a trajectory sum to its final reward minus its first point's. A missing reward voids both gains
    that touch it.

    Args:
        rewards: P = S + 1, reward of the clean-image estimate at every point; the last is the final image's.
        steps: S.

    Raises:
        ValueError: P is not S + 1.
    """
    if rewards.shape[1] != steps + 1:
        raise ValueError(f"gains need rewards at {steps + 1} points, got {rewards.shape[1]}")
    return rewards[:, 1:] - rewards[:, :-1], valid[:, 1:] & valid[:, :-1]


def gae(rewards: Float[Tensor, "N P"], valid: Bool[Tensor, "N P"], *, steps: int, decay: float) -> StepRewards:
    """Generalised advantage estimation (arXiv 1506.02438) with the points' rewards as values: sum_l decay^l g_{k+l}.

    With V(x_k) = r_k and no discount the temporal difference is the gain itself. decay 0 gives `gains`; decay 1 all
    that follows, r_S - r_k, which needs these two rewards only. Between them every reward from k on is needed. How
    Stepwise-Flow-GRPO's variant sets it is not public.

    Args:
        decay: lambda in [0, 1].
    """
    own, own_valid = gains(rewards, valid, steps=steps)
    if decay == 0:
        return own, own_valid
    if decay == 1:
        return rewards[:, -1:] - rewards[:, :-1], valid[:, -1:] & valid[:, :-1]
    values, values_valid = own.clone(), own_valid.clone()
    for k in range(steps - 2, -1, -1):
        values[:, k] += decay * values[:, k + 1]
        values_valid[:, k] &= values_valid[:, k + 1]
    return torch.where(values_valid, values, torch.nan), values_valid

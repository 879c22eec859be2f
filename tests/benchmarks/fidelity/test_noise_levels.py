"""The Gaussian world of the noise levels: its gradient is the slope of the mean reward, and the exact gains add up."""

import pytest
import torch

from benchmarks.fidelity import noise_levels
from benchmarks.fidelity.noise_levels import (
    REWARDS,
    RULES,
    WINDOW,
    advantages,
    estimates,
    known_gradient,
    rollout,
    signal,
)
from learner.credit.rules import gains


def test_the_known_gradient_is_the_slope_of_the_ode_s_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of .1 at the second level moves the image of the ODE; its reward moves by the gradient times .1."""
    start, weights = torch.ones(1, 64), REWARDS["both"]
    before = noise_levels.finished(start, 0) @ weights
    plain = noise_levels.velocity
    monkeypatch.setattr(
        noise_levels,
        "velocity",
        lambda x, sigma: plain(x, sigma) + 0.1 * weights * torch.isclose(sigma, torch.tensor(5 / 6)),
    )
    after = noise_levels.finished(start, 0) @ weights
    assert (after - before).item() == pytest.approx(0.1 * (known_gradient(weights)[1] @ weights).item(), rel=1e-3)


def test_the_finished_image_s_advantage_has_more_signal_than_exact_gains() -> None:
    """The image's advantage with the gains' slopes has their mean and less noise."""
    torch.manual_seed(0)
    points, weights = rollout(200, {}), REWARDS["coarse"]
    scores = (points @ weights).movedim(0, -1)
    earned = gains(scores.flatten(0, 1)).view(200, -1, WINDOW)
    assert torch.allclose(earned.sum(-1), scores[..., -1] - scores[..., 0], atol=1e-5)
    found = {rule: estimates(points[-1], advantages(scores[..., -1], earned, rule)) for rule in RULES}
    means = {rule: own.mean(0) for rule, own in found.items()}
    assert (means["weighted"] - means["step"]).norm() < 0.15 * means["step"].norm()
    signals = {rule: signal(own, known_gradient(weights)).mean().item() for rule, own in found.items()}
    assert signals["image"] > 0.58
    assert 0.4 < signals["above"] < signals["step"] < 0.53 < signals["weighted"]

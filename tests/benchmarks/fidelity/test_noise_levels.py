"""The Gaussian world of the noise levels: its gradient is the slope of the mean reward, and the exact gains add up."""

import pytest
import torch

from benchmarks.fidelity import noise_levels
from benchmarks.fidelity.noise_levels import REWARDS, STEPS, WINDOW, advantages, estimates, known_gradient, rollout
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
    torch.manual_seed(0)
    points, weights = rollout(200, {}), REWARDS["coarse"]
    scores = (points @ weights).movedim(0, -1)
    earned = gains(scores.flatten(0, 1)).view(200, -1, WINDOW)
    assert torch.allclose(earned.sum(-1), scores[..., -1] - scores[..., 0], atol=1e-5)
    known = known_gradient(weights).flatten()
    signals = {}
    for rule in noise_levels.RULES:
        levels = advantages(scores[..., -1], earned, rule)
        assert levels.shape == (STEPS, 200, 24)
        own = estimates(points[-1], levels).flatten(1)
        signals[rule] = ((own @ known).mean() / known.norm() / own.square().sum(1).mean().sqrt()).item()
    assert signals["image"] > 0.58
    assert 0.4 < signals["above"] < signals["step"] < 0.53

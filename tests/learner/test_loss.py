"""The clipped surrogate by hand: both signs of the advantage, both sides of the clip."""

import math

import pytest
import torch

from learner.loss import clipped_surrogate

CLIP = 0.1


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.05, 2.0, -2.1, -2.1),
        (1.5, 2.0, -2.2, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.8, 0.0),
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_are_those_worked_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    """d loss / d log_prob is -A rho where the surrogate is not clipped, else 0."""
    log_prob = torch.tensor([math.log(ratio) - 0.4], requires_grad=True)
    value, rho = clipped_surrogate(
        log_prob=log_prob, old_log_prob=torch.tensor([-0.4]), advantages=torch.tensor([advantage]), clip_range=CLIP
    )
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert rho.item() == pytest.approx(ratio, abs=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(slope, abs=1e-6)


def test_equal_log_probs_have_a_ratio_of_exactly_one_and_an_unclipped_gradient() -> None:
    log_prob = torch.tensor([0.420351, -0.529014], requires_grad=True)
    loss, ratio = clipped_surrogate(
        log_prob=log_prob, old_log_prob=log_prob.detach().clone(), advantages=torch.tensor([1.5, -0.5]), clip_range=1e-5
    )
    loss.sum().backward()
    assert ratio.tolist() == [1.0, 1.0]
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-1.5, 0.5])

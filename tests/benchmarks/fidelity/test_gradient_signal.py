"""The parts of a gradient: put together they are the rules of the learner, and folding keeps what is compared."""

from functools import partial

import pytest
import torch

from benchmarks.fidelity.gradient_signal import Folding, coefficients, rows_of, signal
from learner.credit.rules import gae


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_the_coefficients_are_those_of_the_learner_s_rule(decay: float) -> None:
    leads = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    table = coefficients(torch.ones(5), is_calibrated=False, decay=decay)
    assert torch.allclose(leads @ table.T, gae(leads, decay=decay), atol=1e-5)


def test_slopes_scale_the_points_and_not_the_finished_image() -> None:
    table = coefficients(torch.tensor([0.0, 0.5]), is_calibrated=True, decay=0.0)
    assert table.tolist() == [[0.0, 0.5, 0.0], [0.0, -0.5, 1.0]]


def test_folding_keeps_inner_products() -> None:
    one, other = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(1))
    other = 0.6 * one + 0.8 * other
    fold = Folding.of(100_000)
    size = one.norm() * other.norm()
    assert fold(one) @ fold(other) / size == pytest.approx(one @ other / size, abs=0.03)


def test_the_signal_is_one_for_one_direction_and_none_for_noise() -> None:
    direction = torch.ones(50, 8)
    assert signal(3 * direction, direction) == (pytest.approx(1), pytest.approx(0, abs=1e-6))
    noise = partial(torch.randn, 400, 1000, generator=torch.Generator().manual_seed(2))
    value, error = signal(noise(), noise())
    assert abs(value) < 4 * error < 0.001


def test_weights_help_the_rule_whose_signal_is_where_the_weights_are() -> None:
    random = torch.Generator().manual_seed(3)
    rewards = torch.randn(60, 24, 3, generator=random)
    parts = torch.randn(60, 2, 3, 500, generator=random) * torch.tensor([0.1, 1.0])[:, None, None]
    parts[:, 0] += 0.1
    found = {(row["rule"], row["power"]): row["signal"] for row in rows_of(rewards, parts, torch.tensor([3.0, 1.0]))}
    assert found["uniform", 2.0] > 1.5 * found["uniform", 0.0] > 0

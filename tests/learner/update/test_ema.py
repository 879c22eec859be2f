"""The adapter's running mean: its decay, its rhythm, and that it is a copy."""

import numpy as np
import pytest
import torch
from torch import nn

from learner.update.ema import AdapterAverage
from protocol.config.learning import AverageConfig


def made(decay: float = 0.9, every: int = 1) -> tuple[AdapterAverage, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(2))
    return AdapterAverage({"a": parameter}, AverageConfig(decay=decay, every=every)), parameter


def held(average: AdapterAverage) -> float:
    return float(average.export(version=0).arrays["a"][0])


def set_to(parameter: nn.Parameter, value: float) -> None:
    with torch.no_grad():
        parameter.fill_(value)


def test_the_decay_grows_with_the_steps_up_to_its_bound() -> None:
    """d = min((1 + n) / (10 + n), 0.9) at n = 0, 1, 2: 0.1, 2/11, 0.25."""
    average, parameter = made()
    set_to(parameter, 1.0)
    mean = 0.0
    for step, decay in enumerate((0.1, 2 / 11, 0.25)):
        average.update(step)
        mean = decay * mean + 1 - decay
        assert held(average) == pytest.approx(mean, abs=1e-6)
    set_to(parameter, 0.0)
    before = held(average)
    average.update(10_000)
    assert held(average) == pytest.approx(0.9 * before, abs=1e-6)


def test_it_is_updated_every_so_many_steps() -> None:
    average, parameter = made(every=8)
    set_to(parameter, 1.0)
    for step in range(7):
        average.update(step)
    assert held(average) == 0.0
    average.update(7)
    assert held(average) == pytest.approx(1 - 8 / 17, abs=1e-6)


def test_weights_and_exports_are_never_aliases_of_the_mean() -> None:
    average, parameter = made()
    set_to(parameter, 5.0)
    assert held(average) == 0.0
    exported = average.export(version=0)
    average.update(0)
    assert exported.arrays["a"].tolist() == [0.0, 0.0]
    assert parameter.tolist() == [5.0, 5.0]


def test_a_saved_mean_comes_back_and_is_then_its_own() -> None:
    average, parameter = made()
    set_to(parameter, 1.0)
    average.update(0)
    saved = average.export(version=3)
    other, _ = made()
    other.load(saved)
    assert other.export(version=3).digest == saved.digest
    set_to(parameter, 9.0)
    assert np.array_equal(other.export(version=3).arrays["a"], saved.arrays["a"])

"""The adapter's running mean: its decay, its rhythm, and that it is a copy."""

import pytest
import torch
from torch import nn

from learner.update.ema import AdapterAverage
from protocol.config.learning import AverageConfig


def made(decay: float = 0.9, every: int = 1, repeats: int = 1) -> tuple[AdapterAverage, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(2))
    config = AverageConfig(decay=decay, every=every, repeats=repeats)
    return AdapterAverage({"a": parameter}, config), parameter


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


@pytest.mark.parametrize(("repeats", "shares"), [(1, (0.470588, 0.64)), (2, (0.221453, 0.4096))])
def test_a_repeated_update_keeps_a_power_of_the_share(repeats: int, shares: tuple[float, float]) -> None:
    """The shares of the old mean after 7 and 15 optimizer steps, as docs/method/objectives.md states them."""
    average, parameter = made(every=8, repeats=repeats)
    set_to(parameter, 1.0)
    for steps in range(1, 8):
        average.update(steps)
    assert held(average) == pytest.approx(1 - shares[0], abs=1e-6)
    for steps in range(8, 16):
        average.update(steps)
    assert held(average) == pytest.approx(1 - shares[0] * shares[1], abs=1e-6)


@pytest.mark.parametrize(("repeats", "age"), [(1, 72.0), (2, 34.105), (4, 15.263)])
def test_the_mean_lags_behind_as_the_docs_state(repeats: int, age: float) -> None:
    """A parameter that grows by 1 with each step makes its lag readable: just after a move, and 7 steps later."""
    average, parameter = made(every=8, repeats=repeats)
    for steps in range(1, 8 * 500):
        set_to(parameter, float(steps))
        average.update(steps)
    assert steps % 8 == 7
    assert steps - held(average) == pytest.approx(age, abs=0.01)


def test_two_micro_batches_of_one_optimizer_step_move_the_mean_as_the_release_does() -> None:
    """Flow-GRPO's release calls its mean after each micro-batch with the number of finished optimizer steps.

    With two micro-batches to a step the calls are (0), 1, 1, 2, 2, ...: the first of a step's two ends the step before.
    """
    average, parameter = made(every=8, repeats=2)
    released, values = 0.0, [0.0, *(1.5**-k for k in range(40))]
    steps = 0
    for micro_batch in range(60):
        if micro_batch % 2:
            steps += 1
            set_to(parameter, values[steps])
            average.update(steps)
        if (steps + 1) % 8 == 0:
            released += (1 - min((1 + steps) / (10 + steps), 0.9)) * (values[steps] - released)
    assert released > 0
    assert held(average) == pytest.approx(released, abs=1e-6)


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
    saved = average.tensors
    other, _ = made()
    other.load(saved)
    assert torch.equal(other.tensors["a"], saved["a"]) and other.tensors["a"] is not saved["a"]
    set_to(parameter, 9.0)
    assert torch.equal(other.tensors["a"], saved["a"])

"""The measure of credit rules: 1 for the truth, the same at every size, and blind to the truth's own noise."""

import numpy as np
import pytest

from benchmarks.fidelity.credit import COMPLETIONS, Data, fidelity, rows_of

GROUPS, MEMBERS, POINTS = 40, 24, 6


def made(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of all points, a random walk about each group's own start, and a noisy look at them."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(GROUPS, MEMBERS, POINTS)).cumsum(axis=2)
    values[..., 0] = values[:, :1, 0]
    return values, values + noise * random.normal(size=values.shape)


def test_the_truth_has_fidelity_one_at_any_size_and_its_opposite_minus_one() -> None:
    values, _ = made(0, 0)
    steps = np.diff(values, axis=2)
    true = steps - steps.mean(1, keepdims=True)
    assert fidelity(true, (values, values)) == pytest.approx(1)
    assert fidelity(-7 * true, (values, values)) == pytest.approx(-1)


def test_noise_of_the_brute_force_values_lowers_no_rule() -> None:
    values, first = made(1, 0.5)
    second = values + 0.5 * np.random.default_rng(2).normal(size=values.shape)
    steps = np.diff(values, axis=2)
    true = steps - steps.mean(1, keepdims=True)
    assert fidelity(true, (first, second)) == pytest.approx(1, abs=0.02)


def test_calibrated_gains_of_noisy_guesses_are_truer_than_plain_ones_and_these_than_uniform_credit() -> None:
    values, guesses = made(3, 2.0)
    guesses[..., -1] = values[..., -1]
    data = {"made": Data(rewards=dict.fromkeys(COMPLETIONS, guesses), halves=(values, values))}
    found = {(row["rule"], row["completion"], row["normalise"]): row["made"] for row in rows_of(data)}
    assert ("uniform", "-", "joint") in found
    calibrated, plain = (found[rule, "euler 2", "joint, iteration's std"] for rule in ("calibrated gae 0.3", "gae 0.3"))
    assert calibrated > plain + 0.05
    assert ("calibrated gains", "euler 2", "centred") not in found, "the same as joint"

"""What one glance tells, from numbers worked by hand."""

import json
import math

import pytest

from deploy.monitor import summary as overview
from deploy.monitor.health import Pulse
from protocol.status import MetricLine, RunStatus, run_id_of


def steps(*rewards: float | None) -> list[MetricLine]:
    return [MetricLine(seq=n, values={"iteration": n, "reward/mean": r}) for n, r in enumerate(rewards, start=1)]


def test_trend_is_the_slope_of_the_newest_twenty_over_ten_iterations():
    rewards = overview.rewards_of(steps(*([9.0] * 5), *(0.02 * n for n in range(20))))
    assert rewards.trend == pytest.approx(0.2)
    assert rewards.now == pytest.approx(0.38)
    assert rewards.trend_error == pytest.approx(0.0, abs=1e-9)
    zigzag = overview.rewards_of(steps(*(0.02 * n + 0.1 * (-1) ** n for n in range(20))))
    assert zigzag.trend_error == pytest.approx(0.0406, abs=1e-3), "numpy.polyfit says so"
    assert overview.rewards_of(steps(*(0.1 * n for n in range(9)))).trend is None, "fewer than 10 iterations"
    assert overview.rewards_of(steps(*(0.1 * n for n in range(4)), None, *(0.1 * n for n in range(5, 11)))).trend == (
        pytest.approx(1.0)
    )


def test_held_out_scores_stand_apart_from_components():
    lines = [
        MetricLine(seq=1, values={"iteration": 0, "evaluation/score": 0.25}),
        MetricLine(seq=2, values={"iteration": 1, "reward/mean": 0.5, "reward/ocr": 0.75, "reward/missing": 0.0}),
        MetricLine(seq=3, values={"iteration": 1, "evaluation/score": 0.5}),
    ]
    rewards = overview.rewards_of(lines)
    assert (rewards.heldout_first, rewards.heldout, rewards.heldout_iteration) == (0.25, 0.5, 1)
    assert rewards.components == {"ocr": 0.75}


def test_numbers_that_are_not_finite_become_null_and_text_is_left_out():
    line = overview.line_of(3, {"iteration": 2, "a": math.nan, "b": math.inf, "c": None, "d": "word"})
    assert line == MetricLine(seq=3, values={"iteration": 2, "a": None, "b": None, "c": None})


def test_lines_share_the_names_of_their_numbers():
    lines = [overview.line_of(number, json.loads('{"step_reward/step_0": 0.5}')) for number in (1, 2)]
    (first,), (second,) = (line.values for line in lines)
    assert first is second


def test_the_slow_side_is_the_longest_stage_and_in_drawing_the_busiest_pool():
    slow = overview.bottleneck_of({"rollout_and_reward": 2.0, "update": 6.0}, {"rollout": 0.9})
    assert slow is not None
    assert (slow.side, slow.share) == ("learner", 0.75)
    slow = overview.bottleneck_of({"rollout_and_reward": 3.0, "update": 1.0}, {"rollout": 0.2, "reward/ocr": 0.7})
    assert slow is not None
    assert (slow.side, slow.share) == ("reward/ocr", 0.75)
    assert overview.bottleneck_of({}, {}) is None


def test_time_left_is_the_median_pace_so_that_one_pause_does_not_count():
    assert overview.eta_s([0.0, 2.0, 4.0, 104.0, 106.0], left=10) == 20.0
    assert overview.eta_s([0.0], left=10) is None
    assert overview.eta_s([0.0], left=0) == 0.0


def test_gains_and_stages_are_found_by_their_names():
    values = {
        "step_reward/step_0_abs_mean": 0.1,
        "step_reward/step_10_abs_mean": None,
        "seconds/update": 2.0,
        "seconds/iteration": 9.0,
        "seconds/evaluation": 5.0,
    }
    assert overview.step_rewards_of(values) == {"0": 0.1, "10": None}
    assert overview.stages_of(values) == {"update": 2.0}


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.125, ".3f", "0.125"),
        (2.3e-4, ".3f", "2.3e-04"),
        (-2.3e-4, "+.3f", "-2.3e-04"),
        (2.3e-4, "+.3f", "+2.3e-04"),
        (0.0, ".3f", "0.000"),
        (5.6e-17, "+.3f", "+0.000"),
        (0.0006, ".3f", "0.001"),
        (None, ".3f", "none"),
    ],
)
def test_a_small_number_is_not_shown_as_zero(value: float | None, form: str, text: str) -> None:
    assert overview.number(value, form) == text


@pytest.mark.parametrize(
    ("name", "run"),
    [("mine", "mine"), ("my run", "my-run"), (".hidden", "hidden"), ("äöü", "run"), ("a" * 200, "a" * 100)],
)
def test_folder_names_become_names_that_fit_an_address(name, run):
    assert run_id_of(name) == run


def test_a_run_that_has_not_ended_is_stale_after_five_heartbeats_and_at_least_five_seconds():
    facts = {"run": "a", "session": "s", "iteration": 1, "iterations": 2, "started": 0.0, "updated": 100.0}
    living = RunStatus(phase="running", heartbeat_s=2.0, **facts)
    seconds = [0.0]
    pulse = Pulse(clock=lambda: seconds[0])

    def is_stale(status: RunStatus) -> bool:
        return pulse.marked(status).stale_since is not None

    assert not is_stale(living)
    seconds[0] = 9.0
    assert not is_stale(living), "it was first looked at 9 s ago"
    seconds[0] = 11.0
    assert is_stale(living)
    assert pulse.marked(living) == pulse.marked(living), "a repeated look tells the same moment"
    assert not is_stale(living.model_copy(update={"updated": 101.0})), "it has changed since"
    seconds[0] = 1e9
    assert not is_stale(RunStatus(phase="finished", **facts))
    assert is_stale(living.model_copy(update={"silent_s": 10.1}))
    assert not is_stale(living.model_copy(update={"silent_s": 9.9})), "the board's own clock says so"


def test_the_interval_of_the_held_out_change_comes_from_the_newest_evaluation():
    lines = [
        overview.line_of(1, {"iteration": 0, "evaluation/score": 0.4}),
        overview.line_of(
            2, {"iteration": 8, "evaluation/score": 0.5, "heldout_change/low": 0.02, "heldout_change/high": 0.2}
        ),
    ]
    assert overview.rewards_of(lines).heldout_change == (0.02, 0.2)
    first = overview.rewards_of(lines[:1])
    assert first.heldout is not None
    assert (first.heldout_first, first.heldout_change) == (None, None), "one evaluation has no change"

"""How a run goes, in one sentence."""

from typing import Any

import pytest

from deploy.monitor.health import sentence_of
from protocol.status import Bottleneck, Condition, Event, PoolStatus, Rewards
from tests.support.runs.statuses import a_status

LEARNER = PoolStatus(name="learner", desired=1, ready=1, busy=1)
SLOW = {"bottleneck": Bottleneck(side="learner", share=0.6, message="m"), "pools": [LEARNER]}


def said(phase: str = "running", **facts: Any) -> str:
    return sentence_of(a_status("one", phase, **({"conditions": []} | facts)))


@pytest.mark.parametrize(
    ("trend", "error", "words"),
    [
        (0.05, 0.01, "Learning: reward +0.050 in 10 iterations"),
        (-0.05, 0.01, "Falling: reward −0.050 in 10 iterations"),
        (0.05, 0.03, "Flat: reward +0.050 in 10 iterations, within chance"),
        (None, None, "Too early to tell: a trend needs 10 iterations, 6 are done"),
    ],
)
def test_whether_it_learns_is_told_from_chance(trend, error, words):
    assert said(rewards=Rewards(now=0.5, trend=trend, trend_error=error)) == f"{words}."


def test_the_slow_side_is_named_and_what_needs_attention_is_counted():
    rewards = Rewards(now=0.5, trend=0.05, trend_error=0.01)
    begin = "Learning: reward +0.050 in 10 iterations; "
    assert said(rewards=rewards, **SLOW) == f"{begin}the learner is the bottleneck."
    growing = LEARNER.model_copy(update={"desired": 2})
    assert said(rewards=rewards, **SLOW | {"pools": [growing]}).endswith("the bottleneck (1 of 2 are ready).")
    slow = Bottleneck(side="reward/geneval", share=0.6, message="m")
    false = Condition(type="A", status="False", reason="R", message="m", since=1.0)
    facts = {"rewards": rewards, "bottleneck": slow, "conditions": [false]}
    assert said(**facts) == f"{begin}reward/geneval is the bottleneck; 1 condition needs attention."
    assert said(**facts | {"conditions": [false, false]}).endswith("; 2 conditions need attention.")


def test_a_role_without_room_is_named_with_what_helps():
    waits = PoolStatus(name="learner", desired=2, ready=0, busy=0, waiting=2)
    many, one = (PoolStatus(name="rollout", desired=3, ready=ready, busy=0) for ready in (2, 1))
    why = "learner has 0 of 2 actors; 2 wait for a node: one more needs 1 CPU"
    unmet = Condition(type="PoolSettled/learner", status="False", reason="Unschedulable", message=why, since=1.0)
    facts = SLOW | {"conditions": [unmet]}
    assert said(**facts | {"pools": [many, waits]}) == f"Blocked: {why}; rollout makes room within seconds if it can."
    assert said(**facts | {"pools": [one, waits]}) == f"Blocked: {why}; a further node helps."


def test_a_run_that_does_not_go_on_says_why():
    ended = Rewards(heldout_first=0.4, heldout=0.55)
    assert said("finished", rewards=ended) == "Finished after 6 iterations: held-out score 0.400 → 0.550 (+0.150)."
    assert said("stopped", iteration=1) == "Stopped after 1 iteration."
    failed = Event(time=1.0, kind="error", message="the run failed: the loss must be finite.")
    assert said("failed", errors=[failed]) == "Failed: the loss must be finite."
    assert said("failed") == "Failed: see the events."
    assert said("paused").startswith("Paused after iteration 6")
    assert said("starting").startswith("Starting: ")
    assert said("stopping").startswith("Stopping: ")
    assert said("running", stale_since=5.0).startswith("No heartbeat: ")


def test_a_change_has_its_interval_and_may_be_chance():
    ends = {"heldout_first": 0.4, "heldout": 0.55}
    clear = Rewards(**ends, heldout_change=(0.05, 0.25))
    assert said("finished", rewards=clear).endswith("(+0.150; 95 %: +0.050 to +0.250).")
    chance = Rewards(**ends, heldout_change=(-0.05, 0.35))
    assert said("finished", rewards=chance).endswith("(+0.150; within chance, 95 %: -0.050 to +0.350).")

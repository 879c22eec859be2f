"""One journal hands everything to every listener, whoever fails and from whatever thread it is told."""

import asyncio
import json
import logging
import threading
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from deploy.board.board import LINES_KEPT
from deploy.folder.names import EVENTS
from deploy.folder.run_folder import RunFolder, open_run_folder
from deploy.monitor import journal as journal_module
from deploy.monitor.credit_words import words_of
from deploy.monitor.journal import Listener, RunJournal
from deploy.monitor.progress import Progress
from deploy.monitor.reporter import Reporter
from deploy.monitor.trackers import Trackers
from deploy.presets import method_of
from deploy.run.local import LocalFleet
from flowcredit.packages import PACKAGES
from learner.loop.evaluate import Evaluation
from protocol.config.run import RunConfig
from protocol.status import ActorStatus, Condition, Usage
from tests.support.paths import ROOT
from tests.support.runs.ended import an_evaluation


class Broken:
    """A tracker that cannot begin."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        raise OSError("the service is gone")


class Deaf(Listener):
    """A listener that fails at everything."""

    def condition(self, now: Condition, before: Condition | None) -> None:
        raise ValueError("deaf")

    def event(self, message: str, kind: str) -> None:
        raise ValueError("deaf")


class Ear(Listener):
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Condition] = []
        self.events: list[str] = []

    def condition(self, now: Condition, before: Condition | None) -> None:
        self.heard.append(now)

    def event(self, message: str, kind: str) -> None:
        self.events.append(message)


@pytest.fixture
def run(tmp_path: Path, tiny_config) -> Iterator[RunFolder]:
    folder = open_run_folder(tmp_path / "run", tiny_config())
    yield folder
    folder.close()


def filed(run: RunFolder) -> list[dict]:
    path = run.path / EVENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_condition_keeps_its_time_until_its_status_changes(run, monkeypatch):
    ear, now = Ear(), [10.0]
    monkeypatch.setattr(journal_module.time, "time", lambda: now[0])
    journal = RunJournal(run, ear)
    journal.condition("Disk", True, "Fine", "room left")
    now[0] = 20.0
    journal.condition("Disk", True, "Fine", "less room left")
    journal.condition("Disk", False, "Full", "no room left")
    assert [(c.status, c.since, c.message) for c in ear.heard] == [
        ("True", 10.0, "room left"),
        ("True", 10.0, "less room left"),
        ("False", 20.0, "no room left"),
    ]


def test_a_listener_that_joins_later_hears_the_conditions_stated_before(run):
    journal, ear = RunJournal(run), Ear()
    journal.condition("Disk", False, "Full", "no room left")
    journal.condition("Board", None, "NotTried", "not tried yet")
    journal.condition("Disk", True, "Fine", "room left")
    journal.join(ear)
    assert [(c.type, c.status) for c in ear.heard] == [("Disk", "True"), ("Board", "Unknown")]


def test_a_listener_that_fails_is_logged_and_the_others_hear_everything(run, caplog):
    ear = Ear()
    journal = RunJournal(run, Deaf(), ear)
    journal.condition("Disk", False, "Full", "no room left")
    journal.event("a word")
    assert ([c.type for c in ear.heard], ear.events) == (["Disk"], ["a word"])
    assert "Deaf failed" in caplog.text
    assert [line["type"] for line in filed(run)] == ["Disk", "info"]


def test_only_news_is_written_and_shown(run):
    shown = StringIO()
    journal = RunJournal(run, Progress(Console(file=shown, width=200)))
    journal.condition("Disk", True, "Fine", "room left")
    for message in ("no room left", "still no room"):
        journal.condition("Disk", False, "Full", message)
    journal.condition("Disk", True, "Fine", "room again")
    assert [(line["holds"], line["message"]) for line in filed(run)] == [(False, "no room left"), (True, "room again")]
    assert shown.getvalue().splitlines() == ["no room left", "Disk: room again"]


def test_the_terminal_shows_step_rewards_kl_and_the_time_that_is_left():
    shown, now = StringIO(), iter((100.0, 110.0, 130.0))
    progress = Progress(Console(file=shown, width=400), clock=lambda: next(now))
    stages = {"seconds/rollout_and_reward": 6.0, "seconds/update": 3.5, "seconds/publish": 0.04}
    line = stages | {"reward/mean": 0.61, "reward/missing": 0.0, "train/approx_kl": 3.4e-7}
    with progress.bar(0, 10):
        progress.recorded(1, line | {"step_reward/step_0_abs_mean": 0.1, "step_reward/step_1_abs_mean": 0.3})
        progress.recorded(2, line | {"step_reward/step_0_abs_mean": None, "reward/missing": 2.0})
        progress.recorded(3, {key: value for key, value in line.items() if key != "train/approx_kl"})
    seconds = "(rollout+reward 6.0 s, update 3.5 s, publish 0.0 s)"
    assert shown.getvalue().splitlines() == [
        f"iteration 1/10: reward 0.610, |step reward| 0.200, KL 3.4e-07 {seconds}",
        f"iteration 2/10: reward 0.610, KL 3.4e-07 {seconds}, 2 scores missing, 0:01:20 left",
        f"iteration 3/10: reward 0.610 {seconds}, 0:01:45 left",
    ]


def test_with_uniform_credit_the_terminal_shows_no_step_reward():
    """Each step's reward is that of the image, which stands there already."""
    shown = StringIO()
    progress = Progress(Console(file=shown, width=400), clock=lambda: 0.0)
    line = {"seconds/rollout_and_reward": 6.0, "seconds/update": 3.5, "seconds/publish": 0.0, "reward/missing": 0.0}
    with progress.bar(0, 10, has_step_rewards=False):
        progress.recorded(1, line | {"reward/mean": 0.61, "step_reward/step_0_abs_mean": 0.61})
    assert shown.getvalue() == "iteration 1/10: reward 0.610 (rollout+reward 6.0 s, update 3.5 s, publish 0.0 s)\n"


async def test_a_failing_tracker_is_told_to_the_file_the_terminal_and_the_status(run, tiny_config):
    shown = StringIO()
    journal = RunJournal(run, Progress(Console(file=shown, width=400)))
    name = f"{__name__}:Broken"
    reporter = Reporter(run.config, name="run", lines=[], fleet=LocalFleet(run.config))
    journal.join(reporter)
    logging.getLogger().addHandler(reporter)
    trackers = Trackers(tiny_config(status={"trackers": [name]}), run.path, journal)
    await asyncio.to_thread(trackers.close)
    await asyncio.sleep(0)
    logging.getLogger().removeHandler(reporter)
    status = reporter.status()
    message = f"{name} is left out: the service is gone"
    assert [(c.type, c.reason, c.message) for c in status.conditions] == [(f"Tracker/{name}", "Failed", message)]
    assert [(line["type"], line["message"]) for line in filed(run)] == [(f"Tracker/{name}", message)]
    assert shown.getvalue().splitlines() == [message]
    assert [event.message for event in status.errors] == [f"Tracker/{name}: {message}"], "told once, not by the log too"


def test_many_threads_may_tell_at_once(run):
    ear = Ear()
    journal = RunJournal(run, ear)
    threads = [threading.Thread(target=lambda: [journal.event("x") for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ear.events) == len(filed(run)) == 80


def test_the_packages_whose_warnings_become_events_are_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {*PACKAGES, "flowcredit"} == set(project["tool"]["importlinter"]["root_packages"])


async def test_a_warning_is_settled_when_its_condition_holds_again(tiny_config):
    config = tiny_config()
    reporter = Reporter(config, name="mine", lines=[], fleet=LocalFleet(config))
    bad = Condition(type="BoardConnected", status="False", reason="Away", message="no answer", since=1.0)
    reporter.condition(bad, None)
    reporter.event("another matter: stays", "warning")
    before = [event.message for event in reporter.status().errors]
    reporter.condition(bad.model_copy(update={"status": "True"}), bad)
    assert before == ["BoardConnected: no answer", "another matter: stays"]
    assert [event.message for event in reporter.status().errors] == ["another matter: stays"]


async def test_the_first_held_out_score_stays_when_the_board_has_dropped_its_line(tiny_config):
    config = tiny_config()
    lines = [{"iteration": 0, "evaluation/score": 0.25}] + [
        {"iteration": n, "reward/mean": 0.5} for n in range(1, LINES_KEPT + 1)
    ]
    reporter = Reporter(
        config, name="mine", lines=[*lines, {"iteration": 9, "evaluation/score": 0.75}], fleet=LocalFleet(config)
    )
    rewards = reporter.status().rewards
    assert (rewards.heldout_first, rewards.heldout) == (0.25, 0.75)


async def test_an_evaluation_keeps_the_actors_busy_in_no_iteration(tiny_config):
    class Worked(LocalFleet):
        seconds = 0.0

        def busy_seconds(self) -> dict[str, float]:
            return dict.fromkeys(super().busy_seconds(), self.seconds)

    fleet, shares = Worked(tiny_config()), []
    reporter = Reporter(tiny_config(), name="mine", lines=[], fleet=fleet)
    for iteration in (1, 2):
        fleet.seconds += 5.0
        reporter.recorded(iteration, {"iteration": iteration, "reward/mean": 0.5, "seconds/iteration": 10.0})
        shares.append(next(pool.busy_share for pool in reporter.status().pools if pool.name == "rollout"))
        fleet.seconds += 100.0
        reporter.evaluated(iteration, Evaluation(score=0.5, by_tag={}, missing=0, images=1))
    assert shares == [0.5, 0.5]


async def test_an_evaluation_has_the_interval_of_its_change_and_the_status_the_method_and_its_words(run):
    shown = StringIO()
    journal = RunJournal(run, Progress(Console(file=shown, width=400)))
    reporter = Reporter(run.config, name="run", lines=[], fleet=LocalFleet(run.config))
    journal.join(reporter)
    scores = np.linspace(0.2, 0.6, 12).reshape(6, 2)
    await journal.evaluated(0, an_evaluation(scores))
    await journal.evaluated(8, an_evaluation(scores + 0.25))
    assert "since the first one 95 %: +0.250 to +0.250" in shown.getvalue().splitlines()[-1]
    status = reporter.status()
    assert status.rewards.heldout_change == pytest.approx((0.25, 0.25), abs=1e-5)
    assert run.lines()[-1]["heldout_change/low"] == pytest.approx(0.25, abs=1e-5)
    assert "heldout_change/low" not in run.lines()[0]
    assert status.credit == words_of(run.config.credit)
    assert status.method == method_of(run.config)


def test_a_line_holds_what_the_first_eight_actors_of_each_kind_use(run):
    used = Usage(memory_bytes=3 * 2**30, gpu_memory_bytes=12 * 2**30, gpu_share=0.875)
    actors = [ActorStatus(name=f"rollout-{k}", kind="rollout", state="busy", usage=used) for k in range(9)]
    actors += [ActorStatus(name="reward/red-0", kind="reward/red", state="idle", usage=Usage(memory_bytes=2**29))]
    journal = RunJournal(run)
    journal.actors = lambda: actors
    asyncio.run(journal.record(1, {"reward/mean": 0.5}))
    (line,) = run.lines()
    assert {name: value for name, value in line.items() if name.startswith("usage/")} == {
        **{f"usage/rollout-{k}/memory_gib": 3.0 for k in range(8)},
        **{f"usage/rollout-{k}/gpu_memory_gib": 12.0 for k in range(8)},
        **{f"usage/rollout-{k}/gpu_share": 0.875 for k in range(8)},
        "usage/reward/red-0/memory_gib": 0.5,
    }

"""A failed learner is replaced and the iterations since the checkpoint are repeated, bit for bit."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.folder.names import GALLERY, METRICS
from deploy.folder.read import lines_of
from deploy.folder.run_folder import open_run_folder
from deploy.monitor.journal import RunJournal
from deploy.monitor.progress import Progress
from deploy.run.local import LocalFleet
from deploy.run.supervise import supervise
from deploy.tools.verify import ledger_faults
from learner.checkpoint import newest_checkpoint, read_checkpoint
from learner.loop.hacking import HackingGuard, Measured
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError, PoolError
from protocol.ground.files import by_iteration, iteration_name
from protocol.messages import LearnerState
from protocol.ports import Ports
from tests.support.runs.watched import HELDOUT, TRAIN

Story = tuple[str, list[dict[str, Any]]]


class Mortal:
    """A learner port that is lost at certain calls; counted over the whole run."""

    def __init__(self, fleet: LocalFleet, deaths: dict[str, set[int]]) -> None:
        self._fleet, self.deaths = fleet, deaths
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fleet, name)

        async def call(*args: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.calls[name] in self.deaths.get(name, set()):
                await self._fleet.restart_learner()  # what it held is gone
                raise LearnerFailedError("the learner actor failed: killed")
            return await method(*args)

        return call


class MortalFleet:
    def __init__(self, fleet: LocalFleet, deaths: dict[str, set[int]]) -> None:
        self._fleet = fleet
        self.learner = Mortal(fleet, deaths)
        self.ports: Ports = replace(fleet.ports, learner=self.learner)
        self.restarts = 0

    async def restart_learner(self) -> None:
        self.restarts += 1
        if self.restarts in self.learner.deaths.get("restart", set()):
            raise LearnerFailedError("the learner actor failed: again")
        await self._fleet.restart_learner()


@pytest.fixture(scope="module")
def config(tiny_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("a red circle\na blue square\n")
    return tiny_config(
        iterations=5,
        checkpoint={"every": 2},
        group={"size": 2, "max_lag": 1},
        rewards={"redness": {"scorer": "tests.support.rewards.judges:Redness"}},
        data={"train": str(prompts), "heldout": str(prompts)},
        evaluation={"every": 2},
    )


def trained(
    config: RunConfig,
    path: Path,
    deaths: dict[str, set[int]] | None = None,
    resume_from: LearnerState | None = None,
) -> tuple[Path, MortalFleet]:
    async def scene() -> MortalFleet:
        run = open_run_folder(path, config)
        local = LocalFleet(config)
        fleet = MortalFleet(local, deaths or {})
        try:
            await local.start()
            await supervise(
                config,
                run=run,
                fleet=fleet,
                journal=RunJournal(run, Progress()),
                prompts=TRAIN,
                heldout=HELDOUT,
                stop=asyncio.Event(),
                resume_from=resume_from,
            )
        finally:
            local.stop()
            run.close()
        return fleet

    return path, asyncio.run(asyncio.wait_for(scene(), 120))


def story(path: Path) -> Story:
    """The last adapter's digest and all metrics without wall times."""
    found = newest_checkpoint(path / "checkpoints")
    assert found is not None
    lines = [{k: v for k, v in line.items() if "seconds" not in k} for line in lines_of(path)]
    return found[0].adapter.digest, lines


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The story of the run that nothing happens to."""
    return story(trained(config, tmp_path_factory.mktemp("undisturbed") / "run")[0])


@pytest.mark.parametrize(
    ("deaths", "restarts"),
    [
        ({"update": {1}}, 1),
        ({"update": {4, 6}, "adapter": {7}}, 3),
        ({"state": {3}}, 1),
        ({"update": {5}, "restore": {1}}, 2),
    ],
    ids=[
        "before any checkpoint",
        "three times",
        "at the last",
        "at restore",
    ],
)
def test_a_failed_learner_changes_nothing(config, undisturbed, tmp_path, deaths, restarts):
    path, fleet = trained(config, tmp_path / "disturbed", deaths)
    assert story(path) == undisturbed
    assert fleet.restarts == restarts
    assert ledger_faults(story(path)[1], config.group.per_iteration) == []
    events = (path / "events.jsonl").read_text()
    assert events.count('"type": "learner_failed"') == restarts
    assert '"reason": "Restarted"' in events


def test_an_iteration_that_kills_every_learner_is_given_up_with_its_reason(config, tmp_path):
    with pytest.raises(LearnerFailedError, match="killed; iteration 3 failed with 3 learners, so the run ends"):
        trained(config, tmp_path / "run", {"update": {3, 4, 5, 6, 7}})


def test_the_learner_s_restarts_are_limited(config, tmp_path):
    few = config.model_copy(update={"cluster": config.cluster.model_copy(update={"max_restarts": 1})})
    with pytest.raises(PoolError, match="the learner used up its 1 restarts"):
        trained(few, tmp_path / "run", {"update": {2, 4}})


def each_compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that the newest guard against hacking fills with the iterations of the evaluations it gets."""
    compared: list[int] = []
    begin, check = HackingGuard.__init__, HackingGuard.check

    def begun(guard: HackingGuard, *args: Any, earlier: Sequence[Measured] = (), **named: Any) -> None:
        compared[:] = [each.iteration for each in earlier]
        begin(guard, *args, earlier=earlier, **named)

    def noted(guard: HackingGuard, measured: Measured) -> None:
        compared.append(measured.iteration)
        check(guard, measured)

    monkeypatch.setattr(HackingGuard, "__init__", begun)
    monkeypatch.setattr(HackingGuard, "check", noted)
    return compared


def test_the_guard_against_hacking_gets_every_evaluation_once(config, tmp_path, monkeypatch):
    compared = each_compared(monkeypatch)
    path, _ = trained(config, tmp_path / "run", {"update": {1}})
    assert compared == [0, 2, 4, 5], "the one before a failure without any checkpoint counts"

    lines = [line for line in lines_of(path) if line["iteration"] < 4 or "evaluation/score" not in line]
    kept = [line for line in lines if line["iteration"] <= 4]
    (path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    trained(config, path, resume_from=read_checkpoint(path / "checkpoints" / "iteration_000004"))
    assert compared == [0, 2, 4, 5], "one that a stop kept out of the metrics is made again, and counts once"

    (path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    for file in (path / GALLERY).glob("*.json"):
        file.unlink()
    trained(config, path, resume_from=read_checkpoint(path / "checkpoints" / "iteration_000004"))
    assert compared == [0, 2, 4, 5], "without the readings of the images, the means of the metrics count"


@pytest.fixture(scope="module")
def watching(config: RunConfig) -> RunConfig:
    """The config with a scorer that never trains, an evaluation after every iteration, and only one checkpoint kept."""
    eyes = config.rewards["redness"].model_copy(update={"use": "evaluate"})
    return config.model_copy(
        update={
            "rewards": config.rewards | {"eyes": eyes},
            "evaluation": config.evaluation.model_copy(update={"every": 1}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 9, "keep": 1}),
        }
    )


def peak_of(path: Path) -> int:
    """The iteration at which the watched scorer was highest, the first of equals."""
    means = {line["iteration"]: line["evaluation/reward/eyes"] for line in lines_of(path) if "evaluation/score" in line}
    return max(means, key=lambda iteration: means[iteration])


def kept(path: Path) -> set[int]:
    return set(by_iteration(path / "checkpoints"))


@pytest.fixture(scope="module")
def watched(watching: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(watching, tmp_path_factory.mktemp("watched") / "run")[0]


def test_the_checkpoint_of_a_watched_scorer_s_peak_is_kept(watched):
    assert kept(watched) == {peak_of(watched), 5}
    state = read_checkpoint(watched / "checkpoints" / iteration_name(peak_of(watched)))
    assert state.adapter.version == peak_of(watched)


@pytest.mark.parametrize("deaths", [{"update": {3}}, {"state": {2}}])
def test_a_failed_learner_changes_neither_the_peak_nor_a_bit(watching, watched, tmp_path, deaths):
    path, fleet = trained(watching, tmp_path / "run", deaths)
    assert fleet.restarts == 1
    assert story(path) == story(watched)
    assert kept(path) == kept(watched)


def test_a_resumed_run_knows_its_peak_and_keeps_it(watching, watched, tmp_path):
    path, peak = tmp_path / "run", peak_of(watched)
    for until in (1, 2, 4):
        state = newest_checkpoint(path / "checkpoints") if until > 1 else None
        part = watching.model_copy(update={"iterations": until})
        trained(part, path, resume_from=state[0] if state else None)
        assert kept(path) == {peak_of(path), until}
    state = newest_checkpoint(path / "checkpoints")
    assert state is not None
    trained(watching, path, resume_from=state[0])
    assert story(path) == story(watched)
    assert kept(path) == {peak, 5}

"""The whole loop in one process on the tiny pipeline: real policy, real learner, a scorer that likes red."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.run.local import LocalFleet
from flow.models.pipeline import PipelineBackbone
from learner.checkpoint import read_checkpoint, write_checkpoint
from learner.loop.evaluate import Evaluation
from learner.loop.loop import train
from protocol.config.run import RunConfig
from protocol.errors import CheckpointError, ContractError, GuardError, RunFolderError, ShardLostError
from protocol.messages import LearnerState, Metadata, Prompt, Receipt, ScoredGroup, Scores, ShardRequest
from protocol.ports import Ports
from rewards.scores import scored
from tests.support.runs.watched import HELDOUT, TRAIN

Config = Callable[..., RunConfig]


@dataclass
class Story:
    """A journal in memory; `after` is called with each finished iteration."""

    after: Callable[[int], None] = lambda iteration: None
    records: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)
    saved: list[LearnerState] = field(default_factory=list)
    conditions: list[tuple[str, bool | None]] = field(default_factory=list)

    async def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.records.append((iteration, metrics))
        self.after(iteration)

    async def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        self.evaluations.append((iteration, evaluation))

    async def save(self, state: LearnerState) -> None:
        self.saved.append(state)

    def checkpoint(self, iteration: int) -> Path | None:
        return Path(str(iteration)) if iteration in [state.iteration for state in self.saved] else None

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        self.conditions.append((type, holds))


def red(tiny_config: Config, **sections: Any) -> RunConfig:
    group = {"size": 2} | sections.pop("group", {})
    return tiny_config(rewards={"redness": {"scorer": "tests.support.rewards.judges:Redness"}}, group=group, **sections)


def run(
    config: RunConfig,
    story: Story,
    *,
    stop: asyncio.Event | None = None,
    state: LearnerState | None = None,
    wrap: Callable[[Ports], Ports] = lambda ports: ports,
) -> LearnerState:
    """One run, or the continuation of one; returns the learner's last state."""

    async def scene() -> LearnerState:
        fleet = LocalFleet(config)
        await fleet.start()
        try:
            if state is not None:
                await fleet.ports.learner.restore(state)
            await train(
                config,
                prompts=TRAIN,
                heldout=HELDOUT,
                ports=wrap(fleet.ports),
                journal=story,
                stop=stop or asyncio.Event(),
                resume_from=state,
            )
            return await fleet.ports.learner.state()
        finally:
            fleet.stop()

    return asyncio.run(asyncio.wait_for(scene(), timeout=60))


def test_a_run_records_evaluates_and_saves_in_its_rhythm(tiny_config: Config) -> None:
    config = red(tiny_config, iterations=5, evaluation={"every": 2}, checkpoint={"every": 3})
    story = Story()
    last = run(config, story)
    assert [iteration for iteration, _ in story.records] == [1, 2, 3, 4, 5]
    assert [iteration for iteration, _ in story.evaluations] == [0, 2, 4, 5]
    assert [state.iteration for state in story.saved] == [3, 5]
    assert last.iteration == 5
    assert story.saved[-1].adapter.digest == last.adapter.digest
    for _, metrics in story.records:
        assert metrics["train/first_ratio_deviation"] == 0.0
        assert metrics["seconds/iteration"] == pytest.approx(
            sum(metrics[f"seconds/{stage}"] for stage in ("rollout_and_reward", "update", "publish"))
        )
    scores = [evaluation.score for _, evaluation in story.evaluations]
    assert len(set(scores)) > 1
    assert all(evaluation.seconds > 0 for _, evaluation in story.evaluations)


def test_two_runs_of_one_config_end_in_the_same_weights(tiny_config: Config) -> None:
    digests = {run(red(tiny_config), Story()).adapter.digest for _ in range(2)}
    assert len(digests) == 1
    assert run(red(tiny_config, seed=8), Story()).adapter.digest not in digests


def test_a_run_resumed_from_its_checkpoint_ends_in_the_uninterrupted_run_s_weights(
    tiny_config: Config, tmp_path: Path
) -> None:
    config = red(tiny_config, iterations=4, checkpoint={"every": 2})
    whole = Story()
    last = run(config, whole)
    folder = write_checkpoint(tmp_path, whole.saved[0], config.model.lora, keep=1)
    story = Story()
    resumed = run(config, story, state=read_checkpoint(folder))
    assert [iteration for iteration, _ in story.records] == [3, 4]
    assert [iteration for iteration, _ in story.evaluations] == [4], "the evaluation of the start is not repeated"
    assert resumed.adapter.digest == last.adapter.digest
    assert story.evaluations[-1][1].score == whole.evaluations[-1][1].score


class Same:
    """Every image is worth the same, so no group teaches anything."""

    name = "same"
    low = 0.0
    high = 1.0

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Any prompt will do."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        values = np.full(len(images), 0.5, np.float32)
        return Scores(values=values, valid=np.ones(len(values), bool), reasons=("",) * len(values))


def test_a_guard_counts_on_where_the_checkpoint_was_written(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(
        iterations=9,
        checkpoint={"every": 2},
        rewards={"same": {"scorer": f"{__name__}:Same"}},
        guards={"zero_variance_iterations": 3},
    )
    whole = Story()
    with pytest.raises(GuardError, match=r"contrast: .* at iteration 3 \(in 3 of 3 iterations in a row\)"):
        run(config, whole)
    assert [state.broken for state in whole.saved] == [{"contrast": 2}]
    folder = write_checkpoint(tmp_path, whole.saved[0], config.model.lora, keep=1)
    story = Story()
    with pytest.raises(GuardError, match=r"contrast: .* at iteration 3 \(in 3 of 3 iterations in a row\)"):
        run(config, story, state=read_checkpoint(folder))
    assert [iteration for iteration, _ in story.records] == [3]


def test_a_stop_ends_the_run_after_the_update_in_progress_with_a_checkpoint(tiny_config: Config) -> None:
    stop = asyncio.Event()
    story = Story(after=lambda iteration: stop.set() if iteration == 2 else None)
    last = run(red(tiny_config, iterations=50, checkpoint={"every": 50}), story, stop=stop)
    assert [iteration for iteration, _ in story.records] == [1, 2]
    assert [state.iteration for state in story.saved] == [2]
    assert last.iteration == 2


def test_a_stop_while_groups_are_drawn_saves_what_was_learned(tiny_config: Config) -> None:
    stop = asyncio.Event()

    class StopsInTheMiddle:
        """Rollouts that ask for a stop with the third iteration's first shard."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def rollout(self, request: ShardRequest) -> Any:
            if request.iteration == 2:
                stop.set()
            return await self._inner.rollout(request)

    story = Story()
    run(
        red(tiny_config, iterations=50, checkpoint={"every": 50}),
        story,
        stop=stop,
        wrap=lambda ports: replace(ports, rollouts=StopsInTheMiddle(ports.rollouts)),
    )
    assert [iteration for iteration, _ in story.records] == [1, 2]
    assert [state.iteration for state in story.saved] == [2]


def test_a_stop_before_the_first_update_saves_nothing(tiny_config: Config) -> None:
    stop = asyncio.Event()
    stop.set()
    story = Story()
    run(red(tiny_config), story, stop=stop)
    assert (story.records, story.saved) == ([], [])


def test_samples_of_other_weights_stop_the_run(tiny_config: Config) -> None:
    class Liar:
        """Rollouts whose receipt names another digest."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def rollout(self, request: ShardRequest) -> tuple[Receipt, Any, Any]:
            receipt, rollout, images = await self._inner.rollout(request)
            return replace(receipt, adapter_digest="0" * 64), rollout, images

    with pytest.raises(ContractError, match="images must come from adapter version 0"):
        run(red(tiny_config), Story(), wrap=lambda ports: replace(ports, rollouts=Liar(ports.rollouts)))


def test_with_lag_groups_are_drawn_ahead_with_the_version_they_name(tiny_config: Config) -> None:
    lags: list[int] = []

    class Watched:
        """A learner that notes how old its groups are."""

        def __init__(self, inner: Any) -> None:
            self._inner, self._step = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def update(self, groups: Sequence[Any]) -> Mapping[str, float]:
            metrics = await self._inner.update(groups)
            shards = [shard for group in groups for shard in group.result().shards]
            lags.append(max(self._step - shard.facts.request.adapter_version for shard in shards))
            self._step += 1
            return metrics

    config = red(tiny_config, iterations=4, group={"max_lag": 1})
    run(config, Story(), wrap=lambda ports: replace(ports, learner=Watched(ports.learner)))
    assert lags[0] == 0
    assert max(lags) == 1


@dataclass
class Wrapped:
    """A port that does something before it passes a call on."""

    inner: Any
    before: Mapping[str, Callable[..., None]]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in self.before:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.before[name](*args)
            return await method(*args, **kwargs)

        return call


def test_trajectories_are_let_go_when_their_iteration_is_done(tiny_config: Config) -> None:
    """Held until the next update, they would take the room of a whole iteration in the object store."""
    held: list[weakref.ref[Any]] = []
    counts: list[tuple[int, int]] = []

    def note(coming: Sequence["asyncio.Future[ScoredGroup]"]) -> None:
        for group in coming:
            group.add_done_callback(
                lambda done: held.extend(weakref.ref(s.rollout.latents) for s in done.result().shards)
            )

    def count(_: int) -> None:
        gc.collect()
        counts.append((len(held), sum(ref() is not None for ref in held)))

    config = red(tiny_config, iterations=2, group={"per_iteration": 2, "max_lag": 0})
    run(config, Story(after=count), wrap=lambda ports: replace(ports, learner=Wrapped(ports.learner, {"update": note})))
    assert counts == [(2, 0), (4, 0)]


def test_with_lag_a_resumed_run_draws_the_groups_in_flight_with_the_versions_of_before(
    tiny_config: Config, tmp_path: Path
) -> None:
    config = red(tiny_config, iterations=6, group={"max_lag": 2}, checkpoint={"every": 3})
    drawn: list[tuple[int, int]] = []

    def note(request: ShardRequest) -> None:
        drawn.append((request.iteration, request.adapter_version))

    def watched(ports: Ports) -> Ports:
        return replace(ports, rollouts=Wrapped(ports.rollouts, {"rollout": note}))

    whole = Story()
    last = run(config, whole, wrap=watched)
    assert set(drawn) == {(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)}
    assert [weights.version for weights in whole.saved[0].recent] == [1, 2]

    drawn.clear()
    folder = write_checkpoint(tmp_path, whole.saved[0], config.model.lora, keep=1)
    story = Story()
    resumed = run(config, story, state=read_checkpoint(folder), wrap=watched)
    assert set(drawn) == {(3, 1), (4, 2), (5, 3)}
    assert resumed.adapter.digest == last.adapter.digest
    timeless = [[{k: v for k, v in m.items() if "seconds" not in k} for _, m in s.records] for s in (whole, story)]
    assert timeless[1] == timeless[0][3:]


def test_with_lag_a_state_without_its_older_adapters_is_refused(tiny_config: Config) -> None:
    config = red(tiny_config, iterations=4, group={"max_lag": 1}, checkpoint={"every": 2})
    whole = Story()
    run(config, whole)
    with pytest.raises(CheckpointError, match=r"resumes with its older adapters, lacking \[1\]"):
        run(config, Story(), state=replace(whole.saved[0], recent=()))


def test_what_was_lost_with_a_node_is_drawn_again_and_the_result_is_the_same(tiny_config: Config) -> None:
    expected = run(red(tiny_config, iterations=3), Story())
    calls = {"training": 0, "evaluation": 0, "update": 0}

    def losing(name: str, *, lost: set[int]) -> Callable[..., None]:
        def before(*_: Any) -> None:
            calls[name] += 1
            if calls[name] in lost:
                raise ShardLostError("the node is gone")

        return before

    def wrap(ports: Ports) -> Ports:
        return replace(
            ports,
            rewards=Wrapped(
                ports.rewards,
                {
                    "score_for_training": losing("training", lost={2, 5}),
                    "score_for_evaluation": losing("evaluation", lost={1}),
                },
            ),
            learner=Wrapped(ports.learner, {"update": losing("update", lost={2})}),
        )

    story = Story()
    last = run(red(tiny_config, iterations=3), story, wrap=wrap)
    assert last.adapter.digest == expected.adapter.digest
    assert [metrics["ledger/first"] for _, metrics in story.records] == [0.0, 2.0, 4.0]
    assert calls["update"] == 4


def test_what_is_lost_every_time_ends_the_run(tiny_config: Config) -> None:
    def gone(*_: Any) -> None:
        raise ShardLostError("the node is gone")

    with pytest.raises(ShardLostError):
        run(
            red(tiny_config),
            Story(),
            wrap=lambda p: replace(p, rewards=Wrapped(p.rewards, {"score_for_training": gone})),
        )


class FullDisk(Story):
    """A journal that cannot save after some iterations."""

    def __init__(self, *full_at: int) -> None:
        super().__init__()
        self.full_at = full_at
        self.tried: list[int] = []

    async def save(self, state: LearnerState) -> None:
        self.tried.append(state.iteration)
        if len(self.records) in self.full_at:
            raise RunFolderError("no space left")
        await super().save(state)


def test_a_peak_is_saved_at_once(tiny_config: Config) -> None:
    config = red(tiny_config, iterations=5, evaluation={"every": 1}, checkpoint={"every": 9})
    watched = config.rewards | {"eyes": config.rewards["redness"].model_copy(update={"use": "evaluate"})}
    whole = Story()
    run(config.model_copy(update={"rewards": watched}), whole)
    means = [evaluation.readings["eyes"] for _, evaluation in whole.evaluations]
    peaks = [index for index in range(6) if index == 0 or means[index] > max(means[:index])]
    assert [state.iteration for state in whole.saved] == sorted({*peaks, 5})
    best = means.index(max(means))
    assert 0 < best < 5, "the scene has a peak in the middle"

    plain = Story()
    guards = config.guards.model_copy(update={"hacking": "off"})
    run(config.model_copy(update={"rewards": watched, "guards": guards}), plain)
    assert [state.iteration for state in plain.saved] == [5], "without the guard there are no peaks"
    assert plain.saved[-1].adapter.digest == whole.saved[-1].adapter.digest, "saving more often changes no bit"
    assert [evaluation.score for _, evaluation in plain.evaluations] == [
        evaluation.score for _, evaluation in whole.evaluations
    ]


class Scripted:
    """Rewards whose evaluations read prepared values, one mapping for each."""

    def __init__(self, inner: Any, readings: Sequence[Mapping[str, float]]) -> None:
        self._inner, self._readings = inner, list(readings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def score_for_evaluation(self, images: Any, prompts: Sequence[Prompt]) -> Scores:
        values = {name: np.full(len(prompts), value) for name, value in self._readings.pop(0).items()}
        return scored(values["redness"], values)


def test_a_peak_in_the_evaluation_that_ends_the_run_is_saved(tiny_config: Config) -> None:
    """One scorer falls while the trained reward rises; in the same evaluation another one is at its highest."""
    config = red(
        tiny_config,
        iterations=3,
        evaluation={"every": 1},
        checkpoint={"every": 9},
        guards={"hacking": "stop", "hacking_evaluations": 1},
    )
    watched = config.rewards["redness"].model_copy(update={"use": "evaluate"})
    config = config.model_copy(update={"rewards": config.rewards | {"falls": watched, "peaks": watched}})
    told = [{"redness": 0.1, "falls": 0.5, "peaks": 0.1}, {"redness": 0.2, "falls": 0.4, "peaks": 0.3}]
    story = Story()
    with pytest.raises(GuardError, match="scorer 'falls'.* at iteration 1 after 0.5000 at iteration 0"):
        run(config, story, wrap=lambda ports: replace(ports, rewards=Scripted(ports.rewards, told)))
    assert [state.iteration for state in story.saved] == [0, 1]


def test_a_checkpoint_that_cannot_be_written_is_tried_again_with_each_iteration(tiny_config: Config) -> None:
    story = FullDisk(2, 3)
    run(red(tiny_config, iterations=6, checkpoint={"every": 2}), story)
    assert story.tried == [2, 3, 4, 6]
    assert [state.iteration for state in story.saved] == [4, 6]
    assert story.conditions == [("CheckpointsWritten", False)] * 2 + [("CheckpointsWritten", True)]


def test_a_run_whose_last_checkpoint_cannot_be_written_does_not_end_as_if_it_could(tiny_config: Config) -> None:
    story = FullDisk(3)
    with pytest.raises(RunFolderError, match="no space left"):
        run(red(tiny_config, iterations=3, checkpoint={"every": 2}), story)
    assert [state.iteration for state in story.saved] == [2]


def test_with_offload_only_the_side_at_work_is_awake_and_the_bits_stay(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(red(tiny_config, iterations=3, evaluation={"every": 2}), Story())
    resting: set[int] = set()
    known: set[int] = set()
    turns: list[int] = []
    rest, wake, velocity = PipelineBackbone.rest, PipelineBackbone.wake, PipelineBackbone.velocity

    def rests(backbone: PipelineBackbone) -> None:
        resting.add(id(backbone))
        rest(backbone)

    def wakes(backbone: PipelineBackbone) -> None:
        resting.discard(id(backbone))
        wake(backbone)

    def computes(backbone: PipelineBackbone, *state: Any) -> Any:
        known.add(id(backbone))
        assert known - resting == {id(backbone)}, "the other side is awake too"
        if turns[-1:] != [id(backbone)]:
            turns.append(id(backbone))
        return velocity(backbone, *state)

    for name, action in (("rest", rests), ("wake", wakes), ("velocity", computes)):
        monkeypatch.setattr(PipelineBackbone, name, action)
    bundle = {"layout": "colocated", "rollout_actors": 1, "offload": True}
    last = run(red(tiny_config, iterations=3, evaluation={"every": 2}, cluster=bundle), Story())
    assert last.adapter.digest == expected.adapter.digest
    assert len(known) == 2
    assert len(turns) == 2 * 3 + 1, "three turns of each side, and the last evaluation"

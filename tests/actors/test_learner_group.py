"""The learner group on Ray has the bits of one learner in this process, whatever its size is and what happens to it."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private.worker import global_worker

from actors import learners
from actors.learners import LearnerGroup, LearnerWorker
from actors.pool.nodes import NodeFailures
from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError, NonFiniteError, PoolError
from protocol.messages import Adapter, LearnerState, Rollout, ScoredGroup
from tests.support.learning.groups import complete, draw_groups, learn
from tests.support.runs.metrics import untimed
from tests.support.scenes import long_scene
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("shared_ray")]
Config = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may start late on a busy machine, and the group has all its workers nevertheless."""
    monkeypatch.setattr(learners, "SETTLE_S", 120.0)


@ray.remote(num_cpus=0)
def behind(gate: str, rollout: Rollout) -> Rollout:
    """The rollout, once the file `gate` is there."""
    end = time.monotonic() + 200
    while not Path(gate).exists() and time.monotonic() < end:
        time.sleep(0.02)
    return rollout


def stored(groups: Sequence[ScoredGroup], gates: dict[tuple[int, int], Path] | None = None) -> list[ScoredGroup]:
    """The groups with their trajectories in the object store; those named by (group, first member) behind a gate."""

    def handle(rollout: Rollout) -> Any:
        gate = (gates or {}).get((rollout.request.group, rollout.request.first_member))
        return behind.remote(str(gate), rollout) if gate else ray.put(rollout)

    return [
        replace(group, shards=tuple(replace(shard, rollout=handle(shard.rollout)) for shard in group.shards))
        for group in groups
    ]


class Reference:
    """One learner in this process, which draws the groups of every iteration and learns from them."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._policy, self.learner = RolloutPolicy(config), Learner(config)
        self._adapters: list[Adapter] = []

    def draw(self) -> list[ScoredGroup]:
        """The groups of the next iteration, with the adapter that `group.max_lag` names."""
        self._adapters.append(self.learner.adapter())
        self._policy.receive(self._adapters[-1])
        adapter = self._adapters[max(0, self.learner.iteration - self._config.group.max_lag)]
        return draw_groups(self._policy, self._config, adapter, iteration=self.learner.iteration)

    async def learn(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        return await asyncio.to_thread(learn, self._config, groups, self.learner)


def require_equal(one: LearnerState, other: LearnerState) -> None:
    assert one.iteration == other.iteration
    assert one.adapter.digest == other.adapter.digest
    assert one.optimizer.keys() == other.optimizer.keys()
    assert all(np.array_equal(array, other.optimizer[name]) for name, array in one.optimizer.items())


class Handles:
    """Takes the part of `LearnerWorker` and keeps the actors that it makes."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> "Handles":
        self._options = options
        return self

    def remote(self, config: RunConfig) -> Any:
        self.made.append(LearnerWorker.options(**self._options).remote(config))
        return self.made[-1]


def die_in_backward(_: object, number: int) -> None:
    """Run in an actor: `kill -9` of its process in the middle of backward pass `number` from now on."""
    backward, numbers = torch.Tensor.backward, itertools.count(1)

    def deadly(loss: torch.Tensor, *args: Any, **how: Any) -> None:
        if next(numbers) == number:
            node: Any = loss.grad_fn
            for _ in range(10):
                node = next(each for each, _ in node.next_functions if each is not None)
            node.register_prehook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        backward(loss, *args, **how)

    torch.Tensor.backward = deadly


@asynccontextmanager
async def group_of(config: RunConfig, actor_class: Any = LearnerWorker) -> AsyncIterator[LearnerGroup]:
    group = LearnerGroup(config, NodeFailures(within_s=60), actor_class=actor_class)
    try:
        await group.start()
        yield group
    finally:
        group.stop()


def config_of(
    tiny_config: Config, workers: int, *, cpus: float = 0.5, max_lag: int = 0, model: Any = None, **cluster: Any
) -> RunConfig:
    learner = {"timeout_s": 300, "workers": workers, "cpus": cpus}
    group = {"size": 4, "shard": 2, "per_iteration": 4, "max_lag": max_lag}
    return tiny_config(
        model=model or {},
        group=group,
        learner={"updates_per_iteration": 2},
        cluster={"learner": learner, **cluster},
    )


async def test_a_group_gives_the_bits_of_one_learner_while_its_size_changes(tiny_config: Config) -> None:
    reference = Reference(config := config_of(tiny_config, 1, cpus=1.5))

    async def update(group: LearnerGroup, size: int) -> None:
        groups = reference.draw()
        told, expected = await group.update(complete(stored(groups))), await reference.learn(groups)
        assert untimed(told) == expected
        assert told["update/workers"] == size
        assert 0 < told["update/busy_share_min"] <= told["update/busy_share"] <= 1
        assert told["update/fetched_mb"] > 0
        require_equal(await group.state(), reference.learner.state())
        credit, own = await group.credit(1), reference.learner.credit(1)
        assert np.array_equal(credit.advantages, own.advantages)

    async with group_of(config) as group:
        await update(group, 1)
        with pytest.raises(PoolError, match=r"must divide learner.lanes 8, got 3"):
            group.scale(3)
        group.scale(4)
        await update(group, 1)
        await until(lambda: (group.status().ready, group.status().waiting) == (2, 2))
        await update(group, 2)
        group.scale(2)
        assert (group.status().desired, group.status().ready, group.status().waiting) == (2, 2, 0)
        assert (await group.adapter()).digest == reference.learner.adapter().digest
        assert {actor.adapter_version for actor in group.actors()} == {3}
        group.scale(1)
        await update(group, 1)
        assert [actor.name for actor in group.actors()] == ["learner-0"]
        assert group.status().restarts == 0


@pytest.mark.whole
async def test_a_group_repeats_its_bits_after_a_worker_raised_died_or_hung(tiny_config: Config, tmp_path: Path) -> None:
    reference, handles = Reference(config := config_of(tiny_config, 2, heartbeat_s=5)), Handles()
    async with group_of(config, handles) as group:
        groups = reference.draw()
        gate = tmp_path / "gate"
        with pytest.raises(NonFiniteError, match="must be finite"):
            await group.update(complete(stored(with_a_broken_shard(groups), {(1, 0): gate})))
        gate.touch()
        assert untimed(await group.update(complete(stored(groups)))) == await reference.learn(groups)
        saved = await group.state()
        require_equal(saved, reference.learner.state())

        groups = reference.draw()
        await handles.made[1].__ray_call__.remote(die_in_backward, 6)
        with pytest.raises(LearnerFailedError, match=r"learner worker 1 failed: .*(died|SIGKILL)"):
            await group.update(complete(stored(groups)))
        await group.restart()
        await group.restore(saved)
        assert untimed(await group.update(complete(stored(groups)))) == await reference.learn(groups)
        require_equal(await group.state(), reference.learner.state())
        assert [actor.restarts for actor in group.actors()] == [0, 1]

        victim = group.actors()[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        with pytest.raises(LearnerFailedError, match=r"learner worker 1 failed: no sign of life within 5 s"):
            await group.update(complete(stored(reference.draw())))


@long_scene
@pytest.mark.whole
async def test_the_driver_keeps_no_entry_of_trajectories_that_were_learnt_from(tiny_config: Config) -> None:
    """Ray frees an object's entry with the driver's own reference only; this one has to be the last."""
    config = config_of(tiny_config, 2)
    reference = Reference(config)
    entries = global_worker.core_worker.get_memory_store_size

    async def learn_from(drawn: Sequence[ScoredGroup], group: LearnerGroup) -> None:
        """The references of the caller end with the update, as soon as those of the workers."""
        gates = {(number, first): Path(__file__) for number in range(4) for first in (0, 2)}
        groups = stored(drawn, gates)
        await asyncio.to_thread(ray.wait, [s.rollout for g in groups for s in g.shards], num_returns=8)
        await group.update(complete(groups))

    async with group_of(config) as group:
        before = entries()
        for _ in range(3):
            drawn = reference.draw()
            await learn_from(drawn, group)
            await reference.learn(drawn)
        await until(lambda: entries() < before + 4)  # calls come and go; 24 trajectories were drawn


def with_a_broken_shard(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The first group's second shard, which worker 1 trains, has a loss that is not finite."""
    first, second = groups[0].shards
    log_probs = np.full_like(second.rollout.log_probs, np.nan)
    broken = replace(second, rollout=replace(second.rollout, log_probs=log_probs))
    return [replace(groups[0], shards=(first, broken)), *groups[1:]]


@long_scene
@pytest.mark.whole
async def test_six_iterations_have_the_same_bits_while_the_size_changes_and_a_worker_dies(tiny_config: Config) -> None:
    """float16, whose loss scale is state too, with groups of the adapter before."""
    model = tiny_config().model.model_dump() | {"dtype": "float16"}
    config = config_of(tiny_config, 1, model=model, max_lag=1)
    reference, handles = Reference(config), Handles()
    async with group_of(config, handles) as group:
        for size, dies in ((1, False), (2, False), (2, True), (4, False), (4, False), (1, False)):
            group.scale(size)
            await until(lambda size=size: group.status().ready >= size)
            saved, groups = await group.state(), reference.draw()
            if dies:
                await handles.made[-1].__ray_call__.remote(die_in_backward, 3)
                with pytest.raises(LearnerFailedError, match="learner worker 1 failed"):
                    await group.update(complete(stored(groups)))
                await group.restart()
                await group.restore(saved)
            told = await group.update(complete(stored(groups)))
            assert untimed(told) == await reference.learn(groups)
            assert told["update/workers"] == size
            require_equal(await group.state(), reference.learner.state())
        assert reference.learner.iteration == 6

"""A full cluster that loses a node goes on: every role has an actor again within a minute, and the others come back."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.fleet import RayFleet
from actors.learners import SETTLE_S, LearnerGroup
from actors.pool.calls import ActorHandle, answer
from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardPools
from actors.rollouts import RolloutPool
from actors.room import GRACE_S, LOOK_S
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from tests.support.runs.sinks import Silent
from tests.support.services.fake_nodes import START_S, FakeClass, FakeNodes
from tests.support.virtual_time import run_at_once

GOAL_S = 60.0
"""Seconds after Ray's detection within which a run goes on."""
Config = Callable[..., RunConfig]


class FakeFleet(RayFleet):
    """The fleet of a run with the real pools over actors without processes."""

    def __init__(self, config: RunConfig, nodes: FakeNodes) -> None:
        failures, sink = NodeFailures(within_s=60, find=lambda _: ""), Silent()
        self._config = config
        self.rollouts = RolloutPool(config, failures, sink, actor_class=FakeClass(nodes, "R"))
        self.rewards = RewardPools(config, failures, sink, actor_class=FakeClass(nodes, "W"))
        self.learner = LearnerGroup(config, failures, actor_class=FakeClass(nodes, "L"))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Ready and desired actors by role, one letter each."""
        return {pool.name[:2]: (pool.ready, pool.desired) for pool in self.pools()}

    async def iterate(self) -> None:
        """One iteration: each role has something to do, and a failed learner is replaced."""
        (reward,) = self.rewards.pools.values()
        shards = [self.rollouts.pool.call(_work) for _ in range(6)]
        await asyncio.gather(*shards, *(reward.call(_work) for _ in range(2)))
        while True:
            try:
                await self.learner.update([])
                return
            except LearnerFailedError:
                await self.restart_learner()

    async def becomes(self, what: Callable[[], bool], *, within_s: float = GOAL_S) -> None:
        """Return when something holds."""
        clock = asyncio.get_running_loop().time
        end = clock() + within_s
        while not what():
            assert clock() < end, self.counts()
            await asyncio.sleep(0.5)


def _work(actor: ActorHandle) -> Any:
    return answer(actor.work.remote(), timeout_s=600)


def fleet_of(tiny_config: Config, nodes: FakeNodes, layout: list[str]) -> FakeFleet:
    kinds = "".join(layout)
    cluster = {"rollout_actors": kinds.count("R"), "learner": {"workers": kinds.count("L")}, "max_restarts": 100}
    only = {"brightness": {"scorer": "tests.support.rewards.judges:Brightness", "actors": kinds.count("W")}}
    return FakeFleet(tiny_config(cluster=cluster, rewards=only), nodes)


LAYOUTS = (["RL", "RL", "RW"], ["RR", "RL", "LW"], ["RR", "RW", "LL"], ["RW", "LL", "LL"], ["RR", "LL", "WW"])


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_full_cluster_that_loses_a_node_goes_on_and_is_whole_again_when_a_node_comes(
    tiny_config, monkeypatch, layout, lost
):
    async def scenario() -> None:
        nodes = FakeNodes(layout, monkeypatch)
        fleet = fleet_of(tiny_config, nodes, layout)
        await fleet.start()
        whole = fleet.counts()
        assert all(ready == desired for ready, desired in whole.values())
        await fleet.iterate()
        nodes.lose(lost)
        await asyncio.wait_for(fleet.iterate(), GOAL_S)
        await asyncio.wait_for(fleet.iterate(), GOAL_S)
        assert all(nodes.homes(kind) for kind in "RLW")
        nodes.add(2.0)
        for _ in range(3):
            await asyncio.sleep(2 * LOOK_S + START_S)
            await fleet.iterate()
        assert fleet.counts() == whole
        fleet.stop()

    run_at_once(scenario())


def test_the_learner_goes_before_rollout_actors_that_wait(tiny_config, monkeypatch):
    """The one CPU that its end gives back is the learner's, so nobody has to end for it."""

    async def scenario() -> None:
        nodes = FakeNodes(layout := ["RL", "RL", "RW"], monkeypatch)
        fleet = fleet_of(tiny_config, nodes, layout)
        await fleet.start()
        nodes.lose(0)
        await fleet.iterate()
        assert fleet.counts() == {"ro": (2, 3), "re": (1, 1), "le": (1, 2)}
        assert sum(actor.kind == "R" for actor in nodes.left) == 2 + 1, "one waits for the next node"
        fleet.stop()

    run_at_once(scenario())


def test_a_rollout_actor_ends_for_a_reward_rather_than_a_learner_worker(tiny_config, monkeypatch):
    async def scenario() -> None:
        nodes = FakeNodes(layout := ["LL", "RW", "RR"], monkeypatch)
        fleet = fleet_of(tiny_config, nodes, layout)
        await fleet.start()
        nodes.lose(1)
        await asyncio.wait_for(fleet.iterate(), GOAL_S)
        assert fleet.counts() == {"ro": (1, 3), "re": (1, 1), "le": (2, 2)}
        fleet.stop()

    run_at_once(scenario())


def test_idle_actors_on_a_dead_node_are_no_longer_ready_within_seconds(tiny_config, monkeypatch):
    async def scenario() -> None:
        nodes = FakeNodes(layout := ["RR", "RW", "LL"], monkeypatch)
        fleet = fleet_of(tiny_config, nodes, layout)
        await fleet.start()
        nodes.lose(0)
        await fleet.becomes(lambda: fleet.counts()["ro"] == (1, 3), within_s=2 * LOOK_S)
        assert fleet.rollouts.pool.status().waiting == 2
        fleet.scale("rollout", 1)
        await asyncio.sleep(0)
        assert nodes.homes("R") == ["n1"]
        nodes.lose(2)
        await fleet.becomes(lambda: fleet.counts()["le"] == (0, 2), within_s=2 * LOOK_S)
        fleet.stop()

    run_at_once(scenario())


def test_a_smaller_group_goes_on_without_the_worker_that_is_dead(tiny_config, monkeypatch):
    async def scenario() -> None:
        nodes = FakeNodes(layout := ["LW", "LR"], monkeypatch)
        fleet = fleet_of(tiny_config, nodes, layout)
        await fleet.start()
        nodes.lose(0)
        await fleet.becomes(lambda: fleet.counts()["le"] == (1, 2), within_s=2 * LOOK_S)
        fleet.scale("learner", 1)
        assert (await fleet.learner.update([]))["update/workers"] == 1
        assert (fleet.counts()["le"], nodes.homes("L")) == ((1, 1), ["n1"])
        fleet.stop()

    run_at_once(scenario())


def test_a_smaller_size_acts_on_a_group_that_is_being_rebuilt(tiny_config, monkeypatch):
    """Nobody can end for it: with one worker desired it does not wait for a second one."""

    async def scenario() -> None:
        nodes = FakeNodes(layout := ["LL", "RW"], monkeypatch)
        fleet = fleet_of(tiny_config, nodes, layout)
        await fleet.start()
        nodes.lose(0)
        iteration = asyncio.ensure_future(fleet.iterate())
        await asyncio.sleep(3 * GRACE_S)
        assert (fleet.learner.status().ready, fleet.learner.status().waiting) == (0, 2)
        fleet.scale("learner", 1)
        assert fleet.learner.status().waiting == 1
        nodes.add(1.0)
        await asyncio.wait_for(iteration, START_S + SETTLE_S)
        assert fleet.counts()["le"] == (1, 1)
        fleet.stop()

    run_at_once(scenario())

"""A cluster that is too small, grows and loses a node: a desired size waits for its node, and the adapter stays."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from actors.fleet import RayFleet
from actors.pool.calls import answer
from actors.pool.pool import ActorPool
from protocol.config.run import RunConfig
from protocol.status import Condition
from tests.support.paths import ROOT
from tests.support.runs.watched import REDNESS, Scene, comes_to, go, left_behind
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.ray]
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""So that the cluster notices within seconds that a node is gone."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with room for a learner and one rollout actor; connected."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.fspath(ROOT))
        nodes = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@ray.remote(num_cpus=1)
class Idle:
    """Reserves resources."""

    def work(self) -> int:
        return 1


async def test_members_that_a_node_took_along_come_back_with_the_next_node(cluster):
    pool = ActorPool(
        "idle",
        lambda _: Idle.remote(),
        size=3,
        max_restarts=5,
        prepare=lambda member: answer(member.handle.work.remote(), timeout_s=60),
    )

    async def has(ready: int) -> bool:
        await pool.on_every_member(lambda actor: answer(actor.work.remote(), timeout_s=60))
        return pool.status().ready == ready

    first = cluster.add_node(num_cpus=1)
    await pool.start()
    assert {actor.node_id for actor in pool.actors()} == {cluster.head_node.node_id, first.node_id}
    cluster.remove_node(first, allow_graceful=False)
    await until(lambda: has(2))
    lost = pool.status()
    second = cluster.add_node(num_cpus=1)
    await until(lambda: has(3))
    status, homes = pool.status(), {actor.node_id for actor in pool.actors()}
    pool.stop()
    cluster.remove_node(second)
    assert (lost.desired, lost.ready, lost.restarts) == (3, 2, 1)
    assert (status.desired, status.ready, status.restarts, status.trouble) == (3, 3, 1, "")
    assert homes == {cluster.head_node.node_id, second.node_id}


def settled(scene: Scene) -> Condition:
    unknown = Condition(type="PoolSettled/rollout", status="Unknown", reason="", message="", since=0.0)
    held = scene.observed.reporter.status().conditions
    return next((condition for condition in held if condition.type == unknown.type), unknown)


def homes(scene: Scene) -> list[str]:
    """Cluster nodes of the rollout actors that take work."""
    actors = scene.observed.reporter.status().actors
    return sorted(actor.node_id for actor in actors if actor.kind == "rollout" and actor.state in ("idle", "busy"))


def test_a_desired_size_waits_for_a_node_and_outlives_it_and_the_weights_stay_the_same(
    cluster, tiny_config: Callable[..., RunConfig], tmp_path
):
    def config(iterations: int) -> RunConfig:
        return tiny_config(
            iterations=iterations,
            rewards=REDNESS,
            group={"size": 2, "shard": 1, "per_iteration": 1},
            status={"heartbeat_s": 0.05},
            cluster={"rollout_actors": 1, "reward": {"cpus": 0}},
        )

    head = cluster.head_node.node_id

    async def waits(scene: Scene) -> None:
        """The desired size stands, one actor has no node, the condition says why, and the run goes on."""

        async def holds() -> bool:
            return settled(scene).reason == "Unschedulable"

        await until(holds)
        assert settled(scene).status == "False"
        assert settled(scene).message.startswith("rollout has 1 of 2 actors; 1 wait for a node")
        assert "one more needs 1 CPU on one node, 0 CPU free in the cluster" in settled(scene).message
        pool = scene.observed.reporter.status().pools[0]
        assert (pool.desired, pool.ready, pool.waiting) == (2, 1, 1)
        assert homes(scene) == [head]
        done = scene.observed.reporter.status().iteration
        await until(lambda: comes_to(scene, done + 2))

    async def steer(scene: Scene) -> None:
        command = await scene.ask("scale", pool="rollout", count=2)
        await waits(scene)
        assert scene.observed.reporter.buffers.commands[command].is_open
        node = cluster.add_node(num_cpus=1)
        assert await scene.outcome(command) == ("done", "rollout has 2 actors")
        assert homes(scene) == sorted((head, node.node_id))
        assert settled(scene).status == "True"
        done = scene.observed.reporter.status().iteration
        await until(lambda: comes_to(scene, done + 2))
        cluster.remove_node(node, allow_graceful=False)
        await waits(scene)
        scene.stop.set()

    scaled = go(config(5000), tmp_path / "scaled", beside=steer, slow_s=1, make_fleet=RayFleet)
    status = left_behind(tmp_path / "scaled")
    assert (status.pools[0].desired, status.pools[0].restarts) == (2, 1)
    assert scaled == go(config(status.iteration), tmp_path / "plain")

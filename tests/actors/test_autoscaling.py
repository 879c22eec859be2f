"""Desired sizes are demands: the cluster starts nodes for a larger one and lets idle nodes go after a smaller one."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tenacity import retry, stop_after_delay, wait_fixed

from actors.pool.calls import answer
from actors.pool.nodes import ray_options
from actors.pool.pool import ActorPool
from tests.support.scenes import long_scene
from tests.support.services.autoscaling import autoscaling_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.whole, long_scene]


@ray.remote
class Idle:
    """Reserves resources."""

    def work(self) -> int:
        return 1


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of at most three workers with room for two rollout actors each."""
    folder = tmp_path_factory.mktemp("autoscaling")
    nodes = {"CPU": 2, "rollout": 2}
    with autoscaling_cluster(folder, head={"CPU": 0}, nodes=nodes, most=3, idle_s=3.0) as address:
        _connect(address)
        yield address
        ray.shutdown()


def _connect(address: str) -> None:
    retry(stop=stop_after_delay(120), wait=wait_fixed(1), reraise=True)(ray.init)(address, log_to_driver=False)


def workers() -> int:
    """Nodes that the autoscaler has started and not ended."""
    return sum(node["Alive"] and "rollout" in node["Resources"] for node in ray.nodes())


def demands(address: str) -> int:
    """Actors that wait for a node, as the autoscaler counts them."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    found: Any = get_cluster_status(address).resource_demands
    return sum(bundle.count for demand in found.ray_task_actor_demand for bundle in demand.bundles_by_count)


async def test_a_larger_size_starts_nodes_and_a_smaller_one_lets_idle_nodes_go(address: str) -> None:
    needs = {"CPU": 1.0, "GPU": 0.0, "rollout": 1.0}

    async def holds(condition: Callable[[], bool]) -> None:
        await until(lambda: asyncio.to_thread(condition))

    pool = ActorPool(
        "rollout",
        lambda _: Idle.options(**ray_options(needs)).remote(),
        size=1,
        max_restarts=0,
        prepare=lambda member: answer(member.handle.work.remote(), timeout_s=120),
    )
    assert workers() == 0
    await pool.start()
    assert workers() == 1
    pool.scale(8)  # two more than the cluster can ever hold
    await holds(lambda: pool.status().ready == 6)
    assert (workers(), pool.status().waiting) == (3, 2)
    await holds(lambda: demands(address) == 2)
    pool.scale(5)
    await holds(lambda: demands(address) == 0)
    assert (pool.status().ready, pool.status().waiting) == (5, 0)
    pool.scale(1)
    await holds(lambda: workers() == 1)
    assert pool.status().ready == 1
    await pool.on_every_member(lambda actor: answer(actor.work.remote(), timeout_s=60))
    pool.scale(2)
    await holds(lambda: pool.status().ready == 2)
    assert (workers(), pool.restarts) == (1, 0)
    pool.stop()

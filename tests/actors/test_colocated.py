"""A rollout actor and a learner worker share a bundle, or a process (`cluster.layout: joint`): the same bits."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from actors.fleet import RayFleet
from actors.pool.nodes import NodeFailures
from protocol.config.cluster import RoleConfig
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError, PoolError
from tests.support.paths import ROOT
from tests.support.runs.sinks import Silent
from tests.support.runs.watched import REDNESS, Scene, go
from tests.support.scenes import long_scene
from tests.support.waiting import until, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.whole, pytest.mark.timeout(600)]
Config = Callable[..., RunConfig]
CREATED, REMOVED = "CREATED", "REMOVED"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without CPUs and two nodes with one CPU each, room for one bundle on either; connected."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.fspath(ROOT))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def colocated(
    tiny_config: Config, bundles: int, *, timeout_s: float = 300, layout: str = "colocated", **cluster: Any
) -> RunConfig:
    role = {"cpus": 0.5, "timeout_s": timeout_s}
    sizes = {"rollout_actors": bundles, "rollout": role, "learner": {**role, "workers": bundles}}
    return config_of(tiny_config, layout=layout, reward={"cpus": 0}, **sizes, **cluster)


def config_of(tiny_config: Config, **cluster: Any) -> RunConfig:
    group = {"size": 4, "shard": 2, "per_iteration": 2}
    status = {"heartbeat_s": 0.05}
    return tiny_config(iterations=2, group=group, rewards=REDNESS, status=status, cluster=cluster)


@pytest.fixture(scope="module")
def separate(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the last adapter of the same run in one process."""
    return go(config_of(tiny_config), tmp_path_factory.mktemp("separate") / "run")


def groups(*states: str) -> list[dict[str, Any]]:
    """Ray's tables of placement groups, of those in these states."""
    tables: dict[str, dict[str, Any]] = dict(placement_group_table())
    return [table for table in tables.values() if table["state"] in states]


def homes(fleet: RayFleet) -> dict[str, str]:
    return {actor.name: actor.node_id for actor in fleet.actors() if not actor.kind.startswith("reward/")}


def require_in_bundles(held: dict[str, str], count: int) -> None:
    (table,) = groups(CREATED)
    nodes = table["bundles_to_node_id"]
    assert held == {f"{kind}-{slot}": nodes[slot] for kind in ("rollout", "learner") for slot in range(count)}


@pytest.mark.parametrize(
    ("bundles", "layout"),
    [
        pytest.param(1, {}, marks=long_scene),
        (2, {"offload": True}),
        (2, {"layout": "joint"}),
    ],
)
def test_actor_and_worker_share_a_bundle_and_the_run_has_the_bits_of_one_process(
    nodes: Any, separate: str, tiny_config: Config, tmp_path: Path, bundles: int, layout: dict[str, Any]
) -> None:
    fleets: list[RayFleet] = []

    def make(config: RunConfig, sink: Any) -> RayFleet:
        fleets.append(RayFleet(config, sink))
        return fleets[-1]

    async def watch(_: Scene) -> None:
        require_in_bundles(homes(fleets[0]), bundles)
        pids = [actor.pid for actor in fleets[0].actors() if not actor.kind.startswith("reward/")]
        assert len(set(pids)) == (bundles if "layout" in layout else 2 * bundles)
        with pytest.raises(PoolError, match=r"learner cannot be scaled to 4: its size is fixed.*: stop it and go on"):
            fleets[0].scale("learner", 4)
        assert {pool.name: pool.is_resizable for pool in fleets[0].pools()} == {
            "rollout": False,
            "reward/redness": True,
            "learner": False,
        }

    config = colocated(tiny_config, bundles, **layout)
    assert go(config, tmp_path / "run", beside=watch, make_fleet=make) == separate
    wait_until(lambda: not groups(CREATED), why="the bundles are not given back")


def test_killed_actors_come_back_in_their_bundle(nodes: Any, tiny_config: Config) -> None:
    async def scenario(fleet: RayFleet) -> None:
        await fleet.start()
        require_in_bundles(homes(fleet), 1)
        pids = {actor.name: actor.pid for actor in fleet.actors()}
        for name in ("rollout-0", "learner-0"):
            pid = pids[name]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(LearnerFailedError, match="learner worker 0 failed"):
            await fleet.ports.learner.state()
        await fleet.restart_learner()
        await fleet.ports.adapters.publish(await fleet.ports.learner.adapter())
        await until(lambda: fleet.rollouts.pool.ready == 1)
        require_in_bundles(homes(fleet), 1)
        assert {actor.name: actor.restarts for actor in fleet.actors()} == {
            "rollout-0": 1,
            "learner-0": 1,
            "reward/redness-0": 0,
        }

    with_fleet(colocated(tiny_config, 1), scenario)


@pytest.mark.parametrize("noticing", ["learner", "rollout"])
def test_the_two_sides_of_a_joint_process_die_and_come_back_together(
    nodes: Any, tiny_config: Config, noticing: str
) -> None:
    async def scenario(fleet: RayFleet) -> None:
        await fleet.start()
        (pid,) = {actor.pid for actor in fleet.actors() if not actor.kind.startswith("reward/")}
        adapter = await fleet.ports.learner.adapter()
        os.kill(pid, signal.SIGKILL)
        if noticing == "rollout":
            await fleet.ports.adapters.publish(adapter)
            await until(lambda: fleet.rollouts.pool.ready == 1)
        with pytest.raises(LearnerFailedError, match="learner worker 0 failed"):
            await fleet.ports.learner.state()
        await fleet.restart_learner()
        await fleet.ports.adapters.publish(await fleet.ports.learner.adapter())
        await until(lambda: fleet.rollouts.pool.ready == 1)
        require_in_bundles(homes(fleet), 1)
        (again,) = {actor.pid for actor in fleet.actors() if not actor.kind.startswith("reward/")}
        assert again != pid
        assert fleet.learner.status().restarts == 1
        assert fleet.rollouts.pool.restarts == int(noticing == "rollout"), "ended for the learner is not failed"

    with_fleet(colocated(tiny_config, 1, layout="joint"), scenario)


def with_fleet(config: RunConfig, scenario: Callable[[RayFleet], Awaitable[None]]) -> None:
    async def bounded() -> None:
        fleet = RayFleet(config, Silent())
        try:
            await asyncio.wait_for(scenario(fleet), 550)
        finally:
            fleet.stop()

    asyncio.run(bounded())
    wait_until(lambda: not groups(CREATED, "PENDING"), why="the bundles are not given back")


def test_a_cluster_too_small_for_all_bundles_is_said_and_ends_the_start(nodes: Any, tiny_config: Config) -> None:
    async def scenario(fleet: RayFleet) -> None:
        starting = asyncio.ensure_future(fleet.start())
        await until(lambda: [pool.waiting for pool in fleet.pools()] == [4, 0, 4])
        said = ""
        while "room for 2" not in said:  # what another test has left may still hold one
            said = await asyncio.to_thread(fleet.shortage, "rollout")
        assert "4 bundles" in said and "each with 1 CPU" in said
        rule = r"each of 4 bundles .*needs 1 CPU on one node"
        with pytest.raises(LearnerFailedError, match=rule):
            await starting

    with_fleet(colocated(tiny_config, 4, timeout_s=3), scenario)


def test_bundles_go_when_the_driver_is_killed(nodes: Any, tiny_config: Config) -> None:
    script = (
        "import ray, sys\n"
        "from actors.pool.bundles import Bundles\n"
        "from protocol.config.parse import parse_config\n"
        "import yaml\n"
        "config = parse_config(yaml.safe_load(sys.argv[2]))\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "bundles = Bundles(config.cluster)\n"
        "print('reserved', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [nodes.address, colocated(tiny_config, 2).to_yaml()]
    driver = subprocess.Popen([sys.executable, "-c", script, *words], cwd=ROOT, stdin=subprocess.PIPE)
    try:
        wait_until(lambda: len(groups(CREATED)) == 1, why="nothing is reserved")
    finally:
        driver.kill()
        driver.wait(60)
    wait_until(lambda: not groups(CREATED), why="the bundles outlive their driver")
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0, why="the CPUs are not free again")


@ray.remote(num_cpus=0.25)
class Idle:
    """Reserves a quarter of a node."""

    def home(self) -> str:
        return ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize(("placement", "used"), [("pack", [3]), ("spread", [1, 2])])
def test_a_pool_is_packed_or_spread(nodes: Any, placement: Any, used: list[int]) -> None:
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0, why="the CPUs are not free")
    where = NodeFailures(within_s=60)
    options = [where.options(RoleConfig(placement=placement)) for _ in range(5)]
    actors = [Idle.options(**each).remote() for each in options[:3]]
    at = ray.get([actor.home.remote() for actor in actors])
    assert sorted(at.count(home) for home in set(at)) == used
    actors += [Idle.options(**each).remote() for each in options[3:]]
    assert len(set(ray.get([actor.home.remote() for actor in actors], timeout=60))) == 2, (
        "the fifth finds the other node"
    )
    for actor in actors:
        ray.kill(actor)

"""docs/architecture.md, from prompt to gradient: compared with call traces of a group, in one process and on Ray."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.learners import LearnerGroup, LearnerWorker
from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardActor, RewardPools
from actors.rollouts import RolloutActor, RolloutPool
from deploy.run.local import LocalFleet
from learner.loop.groups import Groups
from protocol.config.run import RunConfig
from protocol.ports import Ports
from tests.support.learning.groups import PROMPTS
from tests.support.paths import ROOT
from tests.support.runs.sinks import Silent
from tests.support.services.local_ray import local_ray
from tests.support.tracing import Trace, TracedClass

IN_ONE_PROCESS = "deploy/run/local.py"
REDNESS = {
    "rewards": {"redness": {"scorer": "tests.support.rewards.judges:Redness"}},
    "evaluation": {"component": "reward"},
}
LOOP = "learner/loop/loop.py"


def section() -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page[page.index("## From prompt to gradient") : page.index("## Rules")]


def rows() -> list[tuple[str, str]]:
    """Process and file of each row; a row without a process has that of the row before."""
    found, process = [], ""
    for own, file in re.findall(r"^\| \d+ \|([^|]*)\| `([^`]+)` \|", section(), re.MULTILINE):
        process = own.strip() or process
        found.append((process, file))
    return found


def in_table() -> set[str]:
    return {file for _, file in rows()}


def without_the_list(found: set[str]) -> set[str]:
    """The files that are not in the list below the table."""
    listed = section()[section().index("The trajectory also passes") : section().index("The loop knows four ports")]
    others = re.findall(r"`([a-z_/]+(?:\.py|/))`", listed)
    folders = tuple(other for other in others if other.endswith("/"))
    return {name for name in found if not name.startswith(folders) and name not in others}


def config_of(tiny_config: Callable[..., RunConfig], **sections: Any) -> RunConfig:
    return tiny_config(group={"size": 2, "shard": 2, "per_iteration": 1}, **REDNESS, **sections)


async def files_of_one_group(config: RunConfig, ports: Ports, trace: Trace, *actors: TracedClass) -> set[str]:
    """What is called from the taking of a group to the end of its update, by this process and by these actors."""
    groups = Groups(config, PROMPTS, ports, None)
    await groups.begin(())
    async with groups.stream(0) as stream:
        for actor in actors:
            actor.start()
        trace.start()
        await groups.learn(0, stream.oldest(1))
        return trace.end().union(*(actor.end() for actor in actors))


def test_the_table_and_its_list_hold_the_files_that_a_trajectory_passes_in_one_process(
    tiny_config: Callable[..., RunConfig],
) -> None:
    async def scene() -> set[str]:
        trace = Trace()
        trace.start()  # threads that begin from here on are traced too
        fleet = LocalFleet(config_of(tiny_config))
        await fleet.start()
        found = await files_of_one_group(config_of(tiny_config), fleet.ports, trace)
        fleet.stop()
        return found

    found = asyncio.run(scene())
    counted = without_the_list(found) - {IN_ONE_PROCESS}
    assert counted - in_table() == set(), "a file on the way that the page leaves out"
    assert in_table() - counted == {name for name in in_table() if name.startswith("actors/")} | {LOOP}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    with local_ray(cpus=4):
        yield


@pytest.mark.ray
@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_the_table_and_its_list_hold_the_files_that_a_trajectory_passes_on_ray(
    tiny_config: Callable[..., RunConfig],
) -> None:
    config, nodes = config_of(tiny_config, cluster={"rollout_actors": 1}), NodeFailures(within_s=60)
    classes = [TracedClass(each) for each in (RolloutActor, RewardActor, LearnerWorker)]

    async def scene() -> set[str]:
        rollouts = RolloutPool(config, nodes, Silent(), actor_class=classes[0])
        rewards = RewardPools(config, nodes, Silent(), actor_class=classes[1])
        learner = LearnerGroup(config, nodes, actor_class=classes[2])
        pools = (rollouts.pool, *rewards.pools.values())
        await asyncio.gather(learner.start(), *(pool.start() for pool in pools))
        ports = Ports(rollouts=rollouts, rewards=rewards, learner=learner, adapters=rollouts)
        try:
            return await files_of_one_group(config, ports, Trace(), *classes)
        finally:
            for pool in (*pools, learner):
                pool.stop()

    found = asyncio.run(scene())
    counted = without_the_list(found)
    assert counted - in_table() == set(), "a file on the way that the page leaves out"
    assert in_table() - counted == {LOOP}

"""Actors of one role that would round differently do not start."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.learners import LearnerGroup
from actors.pool.alike import require_same_facts
from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardActor, RewardPools
from actors.rollouts import RolloutPool
from flow.device import library_facts
from protocol.config.run import RunConfig
from protocol.errors import InputError
from protocol.ground.import_path import file_digests
from tests.support.runs.sinks import Silent

TWO_ACTORS = {"brightness": {"scorer": "geneval", "actors": 2}}


class Answered:
    """A remote method that answers at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def options(self, **_: Any) -> "Answered":
        return self

    def remote(self, *_: Any) -> "Answered":
        return self

    def future(self) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(self._value)
        return done


class Machines:
    """Takes the part of an actor class; actor i computes on machine i with these facts."""

    def __init__(self, *facts: dict[str, str]) -> None:
        self._coming = iter(enumerate(facts))

    def options(self, **_: Any) -> "Machines":
        return self

    def remote(self, *_: Any) -> Any:
        number, facts = next(self._coming)
        return Stand(f"m{number}", facts)


class Stand:
    """An actor that is ready at once."""

    def __init__(self, host: str, facts: dict[str, str]) -> None:
        self.__ray_call__ = Answered((host, f"node-{host}", 1))
        self.ping = Answered(f"node-{host}")
        self.facts = Answered(facts)
        self.prepare = Answered(facts)
        self.call = Answered(None)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(ray, "kill", lambda _: None)
    first = {"GPU": "NVIDIA H100", **library_facts()}
    return lambda **other: Machines(first, first | other)


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        ({"GPU": "NVIDIA L4"}, "got one on node m1 with GPU NVIDIA L4 instead of NVIDIA H100"),
        ({"torch": "1.0"}, "got one on node m1 with torch 1.0 instead of"),
    ],
)
@pytest.mark.parametrize("role", ["learner", "rollout", "reward"])
def test_an_actor_on_another_gpu_or_another_version_ends_the_start_in_one_line(
    tiny_config: Callable[..., RunConfig],
    machines: Callable[..., Any],
    role: str,
    other: dict[str, str],
    rule: str,
) -> None:
    config = tiny_config(cluster={"learner": {"workers": 2}, "rollout_actors": 2}, rewards=TWO_ACTORS)
    with pytest.raises(InputError, match=rule) as refused:
        asyncio.run(started(config, role, machines(**other)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("role", ["learner", "rollout", "reward"])
def test_equal_actors_start(tiny_config: Callable[..., RunConfig], machines: Callable[..., Any], role: str) -> None:
    config = tiny_config(cluster={"learner": {"workers": 2}, "rollout_actors": 2}, rewards=TWO_ACTORS)
    assert asyncio.run(started(config, role, machines())) == 2


@pytest.mark.parametrize("others", [({}, {"CPU": "AVX512"}), ({"CPU": "AVX512"}, {}), ({}, {})])
def test_reward_actors_may_differ_in_whether_their_process_has_loaded_torch(
    tiny_config: Callable[..., RunConfig], machines: Callable[..., Any], others: tuple[dict[str, str], ...]
) -> None:
    """A fork of a warm process has loaded it, a new process has not; a scorer without torch runs in both."""
    config = tiny_config(rewards=TWO_ACTORS)
    assert asyncio.run(started(config, "reward", Machines(*[{"code": "1"} | other for other in others]))) == 2


async def started(config: RunConfig, role: str, machines: Any) -> int:
    """Start two actors of a role; how many are ready."""
    nodes = NodeFailures(within_s=60)
    if role == "learner":
        group = LearnerGroup(config, nodes, actor_class=machines)
        await group.start()
        return group.status().ready
    pool = (
        RolloutPool(config, nodes, Silent(), actor_class=machines).pool
        if role == "rollout"
        else RewardPools(config, nodes, Silent(), actor_class=machines).pools["brightness"]
    )
    await pool.start()
    return pool.ready


@pytest.mark.parametrize("role", ["learner", "rollout"])
def test_an_actor_with_another_file_of_the_credit_rule_than_the_driver_is_refused(
    tiny_config: Callable[..., RunConfig], machines: Callable[..., Any], tmp_path: Path, role: str
) -> None:
    (tmp_path / "mine.py").write_text("def late(rewards): return rewards[:, 1:]\n")
    rule = f"{tmp_path / 'mine.py'}:late"
    config = tiny_config(cluster={"learner": {"workers": 2}, "rollout_actors": 2}, credit={"rule": rule})
    held = file_digests(config.own_functions)
    assert asyncio.run(started(config, role, Machines(*[library_facts() | held] * 2))) == 2
    with pytest.raises(InputError, match=r"got one on node m1 with credit.rule another instead of"):
        asyncio.run(
            started(config, role, Machines(library_facts() | held, library_facts() | {"credit.rule": "another"}))
        )


def test_reward_actors_compare_the_file_of_their_scorer(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A file that changes while a run goes on is another scorer for the actors that start later."""
    file = tmp_path / "mine.py"
    file.write_text("from tests.support.rewards.judges import Redness\n")
    rewards = {"mine": {"scorer": f"{file}:Redness"}}
    reward = tiny_config(rewards=rewards, evaluation={"component": "reward"}).rewards["mine"]
    actor = RewardActor.__ray_metadata__.modified_class
    first = actor(reward).prepare()
    assert first == actor(reward).prepare()
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(InputError, match="the scorer's file .* instead of"):
        require_same_facts(first, actor(reward).prepare(), joining="one", role="actors")

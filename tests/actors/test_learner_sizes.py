"""The size of a learner group while it changes: whatever is asked for meanwhile, no worker is lost or left over."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors import learners
from actors.learners import LearnerGroup
from actors.pool.nodes import NodeFailures
from flow.device import library_facts
from learner.update.update import Finished
from protocol.config.run import RunConfig
from tests.support.waiting import until


class Call:
    """A remote call of a method."""

    def __init__(self, actor: "Fake", method: str) -> None:
        self._actor, self._method = actor, method
        self._answer: Future[Any] = Future()
        self._returns = 2 if method == "keep" else 1

    def options(self, *, num_returns: int = 0, **_: Any) -> "Call":
        self._returns = num_returns or self._returns
        return self

    def remote(self, *args: Any, **_: Any) -> "Call | tuple[Call | None, ...]":
        if self._method in ("call", "keep", "keep_each"):
            self._method, *args = args
        if self._method == "take_seat":
            self._actor.seat = args[0]
        if self._method == self._actor.holds:
            self._actor.held.append(self)
        else:
            self.end()
        return self if self._returns == 1 else (self, *[None] * (self._returns - 1))

    def end(self) -> None:
        finished = Finished(metrics={}, digest="")
        fetched = 0
        answers = {
            "__ray_call__": ("host", self._actor.node, 1),
            "prepare": library_facts(),
            "lane_sum": fetched,
            "added": fetched,
            "findings": fetched,
            "finish": finished,
        }
        if self._actor.is_dead:
            self._answer.set_exception(RayActorError())
        else:
            self._answer.set_result(answers.get(self._method))

    def future(self) -> "Future[Any]":
        return self._answer


class Fake:
    """Takes the part of a learner worker's actor; it does not answer the method `holds`."""

    def __init__(self, holds: str, node: str) -> None:
        self.holds, self.node = holds, node
        self.held: list[Call] = []
        self.seat: Any = None
        self.is_dead = False

    def __getattr__(self, method: str) -> Call:
        return Call(self, method)


class Fakes:
    """Takes the part of `LearnerWorker`: the nodes have room for some actors, the others wait for a node."""

    def __init__(self) -> None:
        self.room, self.holds, self.nodes = 100, "", "a"
        self.made: list[Fake] = []
        self.killed: list[Fake] = []

    def options(self, **_: Any) -> "Fakes":
        return self

    def remote(self, _: RunConfig) -> Fake:
        has_room = sum(actor.holds != "__ray_call__" for actor in self.left) < self.room
        node = self.nodes[len(self.made) % len(self.nodes)]
        self.made.append(Fake(self.holds if has_room else "__ray_call__", node))
        return self.made[-1]

    @property
    def left(self) -> list[Fake]:
        return [actor for actor in self.made if actor not in self.killed]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    monkeypatch.setattr(ray, "kill", made.killed.append)
    monkeypatch.setattr(ray, "put", lambda value: value)  # it would start Ray
    return made


def group_of(tiny_config: Callable[..., RunConfig], fakes: Fakes, workers: int) -> LearnerGroup:
    config = tiny_config(cluster={"learner": {"workers": workers, "timeout_s": 5}})
    return LearnerGroup(config, NodeFailures(within_s=60), actor_class=fakes)


def require_seats(actors: Sequence[Fake]) -> None:
    """Each has a seat of its own among so many."""
    assert sorted(actor.seat.worker for actor in actors) == list(range(len(actors)))
    assert {actor.seat.workers for actor in actors} == {len(actors)}


@pytest.mark.parametrize(("nodes", "by_seat"), [("abaabbba", "abababab"), ("aaababaa", "aaabaaab")])
async def test_the_workers_of_a_node_have_seats_in_one_branch_of_the_tree(tiny_config, fakes, nodes, by_seat):
    """Seats 0, 2, 4, 6 of one node; where nodes have 6 and 2 workers, two of a node have seats c and c + 4."""
    fakes.nodes = nodes
    group = group_of(tiny_config, fakes, 8)
    await group.start()
    require_seats(fakes.made)
    assert "".join(actor.node for actor in sorted(fakes.made, key=lambda actor: actor.seat.worker)) == by_seat
    await group.update([])


@pytest.mark.parametrize(("before", "then", "meanwhile"), [(2, 4, 1), (4, 8, 2), (1, 2, 8)])
async def test_a_size_that_is_asked_for_while_workers_join_waits_for_the_next_update(
    tiny_config, fakes, before, then, meanwhile
):
    group = group_of(tiny_config, fakes, before)
    await group.start()
    fakes.holds = "restore"
    group.scale(then)
    await until(lambda: group.status().ready == then)
    updating = asyncio.ensure_future(group.update([]))
    joining = fakes.made[before:]
    await until(lambda: all(actor.held for actor in joining))
    fakes.holds = ""
    group.scale(meanwhile)
    await until(lambda: group.status().ready == max(then, meanwhile))
    for actor in joining:
        actor.held.pop().end()
    await updating
    require_seats(fakes.made[:then])
    assert len(fakes.left) == max(then, meanwhile)
    await group.update([])
    require_seats(fakes.left)
    assert len(fakes.left) == meanwhile


async def test_a_worker_that_dies_before_it_joins_costs_the_others_nothing(tiny_config, fakes, caplog):
    group = group_of(tiny_config, fakes, 1)
    await group.start()
    group.scale(4)
    await until(lambda: group.status().ready == 4)
    dead = fakes.made[2]
    dead.is_dead = True
    metrics = await group.update([])
    assert metrics["update/workers"] == 1
    assert fakes.killed == [dead]
    await until(lambda: group.status().ready == 4)
    assert (await group.update([]))["update/workers"] == 4
    require_seats(fakes.left)
    assert group.status().restarts == 0
    assert "a further worker has failed before it joined" in caplog.text


async def test_a_failed_group_starts_again_where_there_is_room_for_it_and_its_desired_size_goes_on_waiting(
    tiny_config, fakes, monkeypatch
):
    monkeypatch.setattr(learners, "SETTLE_S", 0.1)
    fakes.room = 2
    group = group_of(tiny_config, fakes, 2)
    await group.start()
    group.scale(4)
    await until(lambda: len(fakes.made) == 4)
    await group.restart()
    await until(lambda: len(fakes.made) == 10)  # those without a node start again as further workers
    assert (group.status().desired, group.status().ready, group.status().waiting) == (4, 2, 2)
    require_seats(fakes.made[4:6])
    group.scale(2)
    assert group.status().waiting == 0


async def test_further_workers_have_names_of_their_own(tiny_config, fakes):
    group = group_of(tiny_config, fakes, 1)
    await group.start()
    fakes.holds = "prepare"
    group.scale(2)
    await until(lambda: len(fakes.made) == 2)
    fakes.holds = ""
    group.scale(4)
    await until(lambda: group.status().ready == 3)
    group.scale(2)  # learner-1 is given up; learner-2 and learner-3 wait for the next update
    group.scale(4)
    assert sorted(actor.name for actor in group.actors()) == [f"learner-{slot}" for slot in range(4)]
    group.stop()

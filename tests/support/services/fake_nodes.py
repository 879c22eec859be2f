"""A cluster without processes: nodes with CPUs, actors that wait for room, and calls that take virtual time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors import room
from flow.device import library_facts
from learner.update.update import Finished

START_S, CALL_S = 4.0, 1.0
"""Seconds until a process has started, and for a call."""
ANSWERS = {
    "prepare": library_facts(),
    "facts": library_facts(),
    "lane_sum": 0,
    "added": 0,
    "findings": 0,
    "finish": Finished(metrics={}, digest=""),
}


class FakeCall:
    """A remote call of a method."""

    def __init__(self, actor: "FakeActor", method: str) -> None:
        self._actor, self._method = actor, method
        self._answer: Future[Any] = Future()
        self._returns = 2 if method == "keep" else 1

    def options(self, *, num_returns: int = 0, **_: Any) -> "FakeCall":
        self._returns = num_returns or self._returns
        return self

    def remote(self, *args: Any, **_: Any) -> "FakeCall | tuple[FakeCall | None, ...]":
        if self._method in ("call", "keep", "keep_each"):
            self._method = args[0]
        self._actor.calls.append(self)
        self._actor.go_on()
        return self if self._returns == 1 else (self, *[None] * (self._returns - 1))

    def future(self) -> "Future[Any]":
        return self._answer

    def end(self) -> None:
        """Answer, or raise if the actor is dead."""
        if self._answer.done():
            return
        if self._actor.is_dead:
            self._answer.set_exception(RayActorError())
        else:
            where = (self._actor.node, self._actor.node, 1)
            self._answer.set_result(where if self._method == "__ray_call__" else ANSWERS.get(self._method))


class FakeActor:
    """An actor: it waits for a node, starts there and takes calls."""

    def __init__(self, kind: str, cpus: float) -> None:
        self.kind, self.cpus = kind, cpus
        self.node = ""
        self.is_dead = self.is_up = False
        self.calls: list[FakeCall] = []

    def __getattr__(self, method: str) -> FakeCall:
        return FakeCall(self, method)

    def run_on(self, node: str) -> None:
        self.node = node
        asyncio.get_running_loop().call_later(START_S, self._is_up)

    def die(self) -> None:
        self.is_dead = True
        self.go_on()

    def go_on(self) -> None:
        """Answer the calls that it has if it runs, or if it is dead."""
        if self.is_up or self.is_dead:
            calls, self.calls = self.calls, []
            for call in calls:
                asyncio.get_running_loop().call_later(0.0 if self.is_dead else CALL_S, call.end)

    def _is_up(self) -> None:
        self.is_up = True
        self.go_on()


class FakeClass:
    """Takes the part of an actor class."""

    def __init__(self, nodes: "FakeNodes", kind: str, cpus: float = 1.0) -> None:
        self._nodes, self._kind, self._cpus = nodes, kind, cpus

    def options(self, *, num_cpus: float, **_: Any) -> "FakeClass":
        return FakeClass(self._nodes, self._kind, num_cpus)

    def remote(self, *_: Any) -> FakeActor:
        actor = FakeActor(self._kind, self._cpus)
        self._nodes.actors.append(actor)
        self._nodes.schedule()
        return actor


class FakeNodes:
    """Nodes of two CPUs each. Actors find room in the order of their making, as far as there is a plan for them there.

    nodes = FakeNodes(["RR", "RL", "LW"], monkeypatch)      # kinds of the first actors of each node
    nodes.lose(0)
    """

    def __init__(self, layout: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._plan = {f"n{number}": list(kinds) for number, kinds in enumerate(layout)}
        self._room = {node: float(len(kinds)) for node, kinds in self._plan.items()}
        self.dead: set[str] = set()
        self.actors: list[FakeActor] = []
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "put", lambda value: value)
        monkeypatch.setattr(asyncio, "to_thread", _at_once)
        monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": n, "Alive": n not in self.dead} for n in self._room])
        monkeypatch.setattr(room, "free_resources", self.free)

    def free(self) -> dict[str, dict[str, float]]:
        """Free CPUs of each living node."""
        return {
            node: {"CPU": total - sum(actor.cpus for actor in self.left if actor.node == node)}
            for node, total in self._room.items()
            if node not in self.dead
        }

    @property
    def left(self) -> list[FakeActor]:
        return [actor for actor in self.actors if not actor.is_dead]

    def schedule(self) -> None:
        """Give actors that wait a node, in the order of their making."""
        for actor in self.left:
            if actor.node:
                continue
            free = {node: free["CPU"] for node, free in self.free().items()}
            planned = [node for node in free if actor.kind in self._plan[node]]
            for node in planned or ([] if any(self._plan.values()) else list(free)):
                if free[node] >= actor.cpus:
                    if planned:
                        self._plan[node].remove(actor.kind)
                    actor.run_on(node)
                    break

    def lose(self, number: int) -> None:
        """Ray has found that a node is dead."""
        self.dead |= {f"n{number}"}
        for actor in self.left:
            if actor.node in self.dead:
                actor.die()

    def add(self, cpus: float) -> None:
        """A further node joins."""
        node = f"n{len(self._room)}"
        self._room[node], self._plan[node] = cpus, []
        self.schedule()

    def kill(self, actor: FakeActor) -> None:
        """Take the part of `ray.kill`."""
        actor.die()
        self.schedule()

    def homes(self, kind: str) -> list[str]:
        """Nodes of the living actors of a kind that have one."""
        return [actor.node for actor in self.left if actor.kind == kind and actor.node]


async def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)

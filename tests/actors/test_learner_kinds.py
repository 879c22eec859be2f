"""A learner group whose workers would round differently does not start."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from actors.learners import LearnerGroup
from actors.pool.nodes import NodeFailures
from flow.device import library_facts
from protocol.config.run import RunConfig
from protocol.errors import InputError


class Answered:
    """A remote method that answers at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def remote(self, *_: Any) -> "Answered":
        return self

    def future(self) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(self._value)
        return done


class Machines:
    """Takes the part of `LearnerActor`; worker i computes on machine i with these facts."""

    def __init__(self, *facts: dict[str, str]) -> None:
        self._coming = iter(enumerate(facts))

    def options(self, **_: Any) -> "Machines":
        return self

    def remote(self, _: RunConfig) -> Any:
        number, facts = next(self._coming)
        return Worker(f"m{number}", facts)


class Worker:
    """An actor that is ready at once."""

    def __init__(self, host: str, facts: dict[str, str]) -> None:
        self.__ray_call__ = Answered((host, f"node-{host}", 1))
        self.ping = Answered(f"node-{host}")
        self.prepare = Answered(facts)
        self.sit = Answered(None)


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        ({"GPU": "NVIDIA L4"}, "got one on node m1 with GPU NVIDIA L4 instead of NVIDIA H100"),
        ({"torch": "1.0"}, "got one on node m1 with torch 1.0 instead of"),
        ({}, ""),
    ],
)
def test_a_worker_on_another_gpu_or_another_version_ends_the_start_in_one_line(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, other: dict[str, str], rule: str
) -> None:
    monkeypatch.setattr(ray, "kill", lambda _: None)
    first = {"GPU": "NVIDIA H100", **library_facts()}
    machines: Any = Machines(first, first | other)
    config = tiny_config(cluster={"learner": {"workers": 2}})
    group = LearnerGroup(config, NodeFailures(within_s=60), actor_class=machines)
    if rule:
        with pytest.raises(InputError, match=rule) as refused:
            asyncio.run(group.start())
        assert "\n" not in str(refused.value)
    else:
        asyncio.run(group.start())
        assert group.status().ready == 2

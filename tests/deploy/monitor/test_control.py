"""Commands of anybody who may write to a board, and the reasons that conditions give for a size that is not reached."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from actors.fleet import shortage_of
from deploy.monitor import control as control_module
from deploy.monitor.control import Control
from deploy.monitor.reporter import Reporter
from protocol.commands import MAX_ACTORS, Command, new_command
from protocol.errors import PoolError
from protocol.status import PoolStatus
from tests.support.runs.sinks import Silent, Told


class OnePool:
    """A fleet of one pool that is one actor short and cannot be scaled."""

    def __init__(self, shortage: str = "") -> None:
        self._shortage = shortage

    def pools(self) -> list[PoolStatus]:
        return [PoolStatus(name="rollout", desired=2, ready=1, busy=0, waiting=1)]

    def actors(self) -> list[Any]:
        return []

    def queues(self) -> dict[str, int]:
        return {}

    def scale(self, pool: str, size: int) -> None:
        raise PoolError(f"{pool} cannot have {size} actors")

    def shortage(self, pool: str) -> str:
        return self._shortage


@pytest.mark.parametrize(
    ("phase", "shortage", "reasons"),
    [
        ("running", "", ["Starting"]),
        ("running", "one more needs 1 GPU on one node, 0 GPU free", ["Unschedulable"]),
        ("starting", "", []),  # as it should be
        ("starting", "one more needs 1 GPU on one node, 0 GPU free", ["Unschedulable"]),
    ],
)
async def test_an_actor_that_only_starts_is_not_called_unschedulable(
    tiny_config, monkeypatch, phase, shortage, reasons
):
    monkeypatch.setattr(control_module, "WAITING_S", -1.0)
    monkeypatch.setattr(control_module, "STARTING_S", -1.0)
    sink = Told()
    fleet: Any = OnePool(shortage)
    reporter = Reporter(tiny_config(), name="mine", lines=[], fleet=fleet)
    reporter.phase = phase
    await Control(fleet, reporter, sink, asyncio.Event()).reconcile()
    assert list(sink.reasons.values()) == reasons


async def test_a_cluster_that_seems_full_while_actors_start_is_not_called_too_small(tiny_config, monkeypatch):
    """Ray gives a waiting actor its CPU before its process stands."""
    monkeypatch.setattr(control_module, "WAITING_S", -1.0)
    sink = Told()
    fleet: Any = OnePool("one more needs 1 CPU on one node, 0 CPU free in the cluster")
    reporter = Reporter(tiny_config(), name="mine", lines=[], fleet=fleet)
    reporter.phase = "running"
    await Control(fleet, reporter, sink, asyncio.Event()).reconcile()
    assert list(sink.reasons.values()) == ["Starting"]


@pytest.mark.parametrize(
    ("nodes", "shortage"),
    [
        ([{"CPU": 0.0}, {"CPU": 1.0}], ""),
        ([{"CPU": 0.0}], "one more needs 1 CPU on one node, 0 CPU free in the cluster"),
        (
            [{"CPU": 0.5}, {"CPU": 0.5}],
            "one more needs 1 CPU on one node, 1 CPU free in the cluster but not together on one node",
        ),
    ],
)
def test_a_shortage_is_only_what_no_node_has_room_for(nodes, shortage):
    assert shortage_of({"CPU": 1.0, "GPU": 0.0}, nodes) == shortage


async def test_a_refused_size_leaves_the_one_that_was_accepted_before(tiny_config):
    fleet: Any = OnePool()
    reporter = Reporter(tiny_config(), name="mine", lines=[], fleet=fleet)
    reporter.phase, reporter.desired_sizes = "running", {"rollout": 3}
    Control(fleet, reporter, Silent(), asyncio.Event()).take(new_command("scale", pool="rollout", count=8))
    assert (reporter.desired_sizes, [command.state for command in reporter.buffers.commands.values()]) == (
        {"rollout": 3},
        ["failed"],
    )


@pytest.mark.parametrize(
    ("is_saved", "outcomes"),
    [
        (True, [("checkpoint", "done"), ("stop", "done"), ("pause", "failed")]),
        (False, [("checkpoint", "failed"), ("stop", "done"), ("pause", "failed")]),
    ],
)
async def test_a_run_that_ends_says_whether_its_last_iteration_has_a_checkpoint(tiny_config, is_saved, outcomes):
    fleet: Any = OnePool()
    reporter = Reporter(tiny_config(), name="mine", lines=[], fleet=fleet)
    reporter.phase = "running"
    control = Control(fleet, reporter, Silent(), asyncio.Event())
    for kind in ("checkpoint", "stop", "pause"):
        control.take(new_command(kind))
    control.end(is_saved=is_saved)
    commands = list(reporter.buffers.commands.values())
    assert [(command.kind, command.state) for command in commands] == outcomes
    assert ("with a checkpoint" in commands[1].message) == is_saved


@pytest.mark.parametrize(
    "facts", [{}, {"pool": "rollout"}, {"count": 2}, {"pool": "rollout", "count": 0}, {"pool": "x", "count": 10**9}]
)
def test_a_scale_command_that_no_run_could_carry_out_is_no_command(facts):
    with pytest.raises(ValidationError, match=f"scale must name a pool and 1 to {MAX_ACTORS} actors"):
        Command(id="0" * 32, kind="scale", requested=1.0, **facts)

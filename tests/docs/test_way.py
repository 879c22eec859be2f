"""The way of a trajectory in docs/architecture.md, compared with a call trace of one group in one process."""

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deploy.run.local import LocalFleet
from learner.loop.groups import Groups
from protocol.config.run import RunConfig
from tests.support.learning.groups import PROMPTS
from tests.support.paths import ROOT

IN_ONE_PROCESS = "deploy/run/local.py"
REDNESS = {
    "rewards": {"redness": {"scorer": "tests.support.rewards.judges:Redness"}},
    "evaluation": {"component": "reward"},
}
PRODUCT = ("protocol", "flow", "toyworld", "rewards", "learner", "actors", "deploy")


def section() -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page[page.index("## The way of one trajectory") : page.index("## Rules")]


def in_table() -> list[str]:
    return re.findall(r"^\| \d+ \|[^|]*\| `([^`]+)` \|", section(), re.MULTILINE)


def not_counted() -> list[str]:
    """Files, and folders with a slash at their end."""
    listed = section()[section().index("Not counted are:") : section().index("With these,")]
    return re.findall(r"`([a-z_/]+(?:\.py|/))`", listed)


@contextmanager
def traced(found: set[str]) -> Iterator[None]:
    """Collect the product's files in which a function is called, in every thread that begins inside."""

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            if name.startswith(PRODUCT):
                found.add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def files_of_one_group(config: RunConfig) -> set[str]:
    """What is called from the taking of a group to the end of its update."""

    async def scene() -> set[str]:
        found: set[str] = set()
        with traced(found):
            fleet = LocalFleet(config)
            await fleet.start()
            groups = Groups(config, PROMPTS, fleet.ports, None)
            await groups.begin(())
            async with groups.stream(0) as stream:
                found.clear()
                await groups.learn(0, stream.oldest(1))
                passed = set(found)
            fleet.stop()
        return passed

    return asyncio.run(scene())


def test_the_table_and_its_list_hold_exactly_the_files_that_a_trajectory_passes(
    tiny_config: Callable[..., RunConfig],
) -> None:
    config = tiny_config(group={"size": 2, "shard": 2, "per_iteration": 1}, **REDNESS)
    found, table, others = files_of_one_group(config), in_table(), not_counted()
    listed = {name for name in found if name.startswith(tuple(o for o in others if o.endswith("/"))) or name in others}
    counted = found - listed - {IN_ONE_PROCESS}
    assert counted - set(table) == set(), "a file on the way that the page leaves out"
    elsewhere = {name for name in table if name.startswith("actors/")} | {"learner/loop/loop.py"}
    assert set(table) - counted == elsewhere, "Ray's part and the loop, which this trace leaves out"

"""What many tests share: a tiny random Stable Diffusion 3 pipeline on disk, and a config that names it."""

import asyncio
import gc
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from tests.support.warm.ray_workers import variables
from tests.support.worlds.devices import NEEDS_GPU, has_gpu

if TYPE_CHECKING:
    from tests.support.commands import Cli

NEEDS_PACKAGES = "needs packages that are not installed; make installs them all"
collect_ignore = [] if find_spec("ray") else ["actors", "deploy", "lab"]
"""Folders whose own conftest needs such packages."""
WARM = pytest.StashKey[pytest.MonkeyPatch]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: file by file, but all tests with a Ray cluster on one worker, and all with machines.

    Many of the former have deadlines, which two clusters side by side would miss; tests of whole runs wait for far
    longer. Of the machines there is one laboratory. Tests for a GPU are skipped where there is none.
    """
    is_lacking = any(item.get_closest_marker("gpu") for item in items) and not has_gpu()
    for item in items:
        if is_lacking and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))
        has_deadlines = item.get_closest_marker("ray") and not item.get_closest_marker("whole")
        group = "ray" if has_deadlines else "cluster" if item.get_closest_marker("cluster") else str(item.path)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Where not even Ray is installed, a file that needs a package which is not there is skipped."""
    report = yield
    if report.failed and find_spec("ray") is None:
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"Skipped: {NEEDS_PACKAGES}")
    return report


def pytest_collection_finish() -> None:
    """Modules and tests live until the end: Python need not search them for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Ray's workers start warm, but not beside a GPU. The shared cluster ends before a test that needs none of it."""
    if "shared_ray" not in item.fixturenames and (local := sys.modules.get("tests.support.services.local_ray")):
        local.leave_shared_ray()
    if (item.get_closest_marker("ray") or item.get_closest_marker("chaos")) and not item.get_closest_marker("gpu"):
        item.stash[WARM] = pytest.MonkeyPatch()
        for name, value in variables().items():
            item.stash[WARM].setenv(name, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """The variables of the warm workers end with the test, after its fixtures."""
    try:
        yield
    finally:
        if WARM in item.stash:
            item.stash[WARM].undo()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test has written goes from worker to worker as UTF-8, also a path that is not."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped, and the remedy, in one line for each reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("skipped tests")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session", autouse=True)
def torch_threads() -> None:
    """The order of sums, and with it every bit, depends on torch's thread count: 1, or TEST_TORCH_THREADS."""
    import torch

    torch.set_num_threads(int(os.environ.get("TEST_TORCH_THREADS", "1")))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test computes: on the CPU and, with the marker `gpu`, again on a GPU, with the kernels that a run takes.

    Without a GPU the second one is skipped with the reason.
    """
    from tests.support.worlds.devices import kernels_of_a_run

    with kernels_of_a_run(request.param):
        yield request.param


@pytest.fixture(scope="module")
def gpus(device: str) -> float:
    """What a rollout actor or a learner worker reserves of the one GPU, so that six fit; 0 on the CPU."""
    return 0.15 if device == "cuda" else 0


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Cli":
    """`flowcredit …` in this process."""
    from tests.support.commands import Cli

    return Cli(monkeypatch, capsys)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StableDiffusion3Pipeline folder with random weights: latents 4x8x8, images 16x16, no T5."""
    from tests.support.worlds.tiny_models import write_sd3

    return write_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")


@pytest.fixture(scope="session")
def tiny_config(tiny_sd3: Path) -> Callable[..., RunConfig]:
    """`tiny_config(sampling={"steps": 4}, ...)`: a small config of the tiny pipeline, sections merged into its own.

    The LoRA is on one projection of each of the transformer's streams, image and text: fewer layers, faster tests.
    """

    def make(**sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "seed": 7,
            "iterations": 2,
            "model": {
                "path": str(tiny_sd3),
                "max_sequence_length": 2,
                "lora": {"rank": 4, "alpha": 8, "targets": ["to_q", "add_v_proj"]},
            },
            "data": {"train": "train.txt", "heldout": "heldout.txt"},
            "sampling": {"steps": 4},
            "completion": {"substeps": 2},
            "group": {"size": 4, "shard": 2, "per_iteration": 2},
            "learner": {"updates_per_iteration": 1},
            "rewards": {"brightness": {"scorer": "geneval"}},
            "evaluation": {"component": "reward", "steps": 2, "images_per_prompt": 2, "batch": 3},
        }
        for name, value in sections.items():
            held = tree.get(name)
            tree[name] = held | value if isinstance(held, dict) and name != "rewards" else value
        return parse_config(tree)

    return make

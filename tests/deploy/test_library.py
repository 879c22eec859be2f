"""`import flowcredit`: train, evaluate and read runs, in a script, in a running event loop, and awaited."""

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowcredit
from deploy import library
from deploy.run.signals import StopRequest, stop_on_signal
from protocol.errors import ConfigError, InputError, RunFolderError
from tests.support.paths import ROOT


def tree_of(tiny_sd3: Path, folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("red circle\n")
    (folder / "b.txt").write_text("blue square\ngreen circle\n")
    return {
        "iterations": 1,
        "model": {"path": str(tiny_sd3), "max_sequence_length": 2},
        "data": {"train": str(folder / "a.txt"), "heldout": str(folder / "b.txt")},
        "sampling": {"steps": 3},
        "group": {"size": 2, "per_iteration": 2},
        "rewards": {"dark": {"scorer": "tests.support.rewards.dark:Dark"}},
        "evaluation": {"images_per_prompt": 1, "steps": 2},
        "status": {"board": "off", "trajectories": 0},
    }


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Path:
    folder = tmp_path_factory.mktemp("library")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree_of(tiny_sd3, folder)))
    return path


@pytest.fixture(scope="module")
def run(preset: Path) -> Path:
    """A run that was trained inside a running event loop, as a cell of a notebook does."""

    async def cell() -> flowcredit.Outcome:
        return flowcredit.train(preset, {"seed": 3}, run=preset.parent / "run", is_local=True, is_quiet=True)

    outcome = asyncio.run(cell())
    assert outcome.finished
    return preset.parent / "run"


def test_a_run_is_read_with_its_metrics_as_columns(run: Path) -> None:
    held = flowcredit.read_run(run)
    assert (held.name, held.config.seed, held.phase) == ("run", 3, "finished")
    iterations, seconds, rewards = held.values("reward/mean")
    assert iterations.tolist() == [1]
    assert seconds.tolist() == [held.seconds]
    assert rewards.tolist() == [held.iterations[0]["reward/mean"]]
    assert held.values("evaluation/score", of="evaluations")[0].tolist() == [0, 1]
    assert held.values("no/metric")[0].tolist() == []


async def test_awaited_training_leaves_the_loop_free_and_goes_on_with_the_run(run: Path, preset: Path) -> None:
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(beside())
    words = ["iterations=2"]
    outcome = await flowcredit.train_async(overrides=words, run=run, is_local=True, is_quiet=True)
    other.cancel()
    assert (outcome.finished, outcome.iteration) == (True, 2)
    assert turns > 100


def test_cancelled_training_stops_with_a_checkpoint_and_goes_on_later(preset: Path) -> None:
    folder = preset.parent / "cancelled"

    async def scene() -> None:
        task = asyncio.create_task(
            flowcredit.train_async(preset, {"iterations": 5000}, run=folder, is_local=True, is_quiet=True)
        )
        for _ in range(12000):
            if (folder / "metrics.jsonl").exists() and '"reward/mean"' in (folder / "metrics.jsonl").read_text():
                break
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 120)

    asyncio.run(scene())
    done = len(flowcredit.read_run(folder).iterations)
    assert 1 <= done < 5000
    outcome = flowcredit.train(run=folder, overrides={"iterations": done}, is_local=True, is_quiet=True)
    assert outcome.iteration == done, "the checkpoint is that of the last finished iteration"


def test_evaluation_awaited_or_not_gives_the_same_scores(run: Path) -> None:
    both = flowcredit.evaluate(run, has_base=True, is_local=True)
    assert [each.name for each in both] == ["base", "adapter"]
    awaited = asyncio.run(flowcredit.evaluate_async(run, has_base=True, is_local=True))
    assert [each.scores for each in awaited] == [each.scores for each in both]
    with pytest.raises(RunFolderError, match="two different runs must be given"):
        flowcredit.compare(run, run)


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^a preset must be named, or run= with a run"):
        flowcredit.train()
    with pytest.raises(RunFolderError, match=f"^run folder {tmp_path} must hold config.yaml"):
        flowcredit.read_run(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'group'"):
        asyncio.run(flowcredit.train_async("toy_geneval", {"grup.size": 4}, run=tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    with pytest.raises(AttributeError, match="flowcredit has no 'tarin', it has "):
        flowcredit.tarin  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flowcredit.train("toy_geneval", run=3), "run must be a path, got 3: give a text or a pathlib.Path"),
        (lambda: flowcredit.train("toy_geneval", fork=[1]), "fork must be a path, got [1]: give"),
        (lambda: flowcredit.read_run(b"mine"), "run must be a path, got b'mine': give"),
        (lambda: flowcredit.compare("mine", 4), "second must be a path, got 4: give"),
        (lambda: flowcredit.evaluate(preset="toy_geneval", iteration="x"), "iteration must be a whole number, got 'x'"),
        (lambda: flowcredit.evaluate(preset="toy_geneval", adapter_share="x"), "adapter_share must be a number, got"),
        (lambda: flowcredit.train("toy_geneval", "seed=3"), "overrides must be texts or values by key, got 'seed=3'"),
        (lambda: flowcredit.train("toy_geneval", None), "overrides must be texts or values by key, got None: write"),
    ],
)
def test_an_argument_of_another_type_is_one_line_with_its_name(
    call: Callable[[], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value).startswith(message)


def test_importing_costs_nothing_and_the_stub_names_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    code = (
        "import sys, json, flowcredit; first = sorted({'numpy', 'torch', 'pydantic'} & set(sys.modules));"
        " print(json.dumps([first, flowcredit.load_config('toy_geneval', overrides={'seed': 7}).seed]))"
    )
    path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=path, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout) == [[], 7]
    stub = ast.parse((ROOT / "flowcredit" / "__init__.pyi").read_text())
    names = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(library.__all__) == dir(flowcredit)


def test_a_request_stops_in_order_and_a_second_one_at_once() -> None:
    async def scene(*, is_twice: bool) -> None:
        request = StopRequest()
        with stop_on_signal(lambda text: None, within_s=60, request=request) as stop:
            request.send()
            await asyncio.wait_for(stop.wait(), 30)
            if is_twice:
                request.send()
                await asyncio.sleep(30)
        request.send()  # nobody hears it any more

    asyncio.run(scene(is_twice=False))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene(is_twice=True))


async def test_what_was_asked_before_the_run_began_is_heard_when_it_begins() -> None:
    request = StopRequest()
    request.send()
    with stop_on_signal(lambda text: None, within_s=60, request=request) as stop:
        await asyncio.wait_for(stop.wait(), 30)
    assert stop.is_set()

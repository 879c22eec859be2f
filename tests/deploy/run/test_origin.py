"""A run knows how it began: its versions and, of a fork, the run whose adapter it began with."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.app import app
from deploy.folder import run_folder
from deploy.folder.read import config_of, origin_of, status_of
from deploy.folder.run_folder import RunFolder
from deploy.monitor.progress import Progress
from deploy.run.run import run_training
from deploy.tools.generate import generate_images
from flowcredit.packages import VERSION
from learner.checkpoint import newest_checkpoint, read_checkpoint
from protocol.config.run import RunConfig
from protocol.errors import RunFolderError
from protocol.messages import Prompt

A = Prompt(index=0, text="a")


@pytest.fixture(scope="module")
def config(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    prompts = tmp_path_factory.mktemp("prompts")
    for name in ("a", "b"):
        (prompts / f"{name}.txt").write_text(f"{name}\n")
    return tiny_config(
        iterations=1,
        data={"train": str(prompts / "a.txt"), "heldout": str(prompts / "b.txt")},
        rewards={"dark": {"scorer": "tests.support.rewards.dark:Dark"}},
        evaluation={"images_per_prompt": 1, "component": "reward"},
        status={"board": "off", "trajectories": 0},
    )


def train(config: RunConfig, folder: Path, fork: Path | None = None) -> None:
    run_training(config, folder=folder, fork=fork, is_local=True, progress=Progress())


@pytest.fixture(scope="module")
def first(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; it was started where an event loop runs, as in a notebook."""
    folder = tmp_path_factory.mktemp("runs") / "first"

    async def cell() -> None:
        train(config, folder)

    asyncio.run(cell())
    return folder


def test_a_run_started_beside_an_event_loop_ends_well_and_its_actors_with_it(first: Path) -> None:
    held = status_of(first)
    assert held is not None
    assert held.status.phase == "finished"
    assert {actor.state for actor in held.status.actors} == {"ended"}
    assert {(pool.ready, pool.busy) for pool in held.status.pools} == {(0, 0)}


def test_a_fork_that_was_killed_before_its_first_checkpoint_begins_with_the_adapter_again(
    first: Path, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_checkpoint", killed)
        patch.setattr(RunFolder, "abandon", RunFolder.close)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "fork", fork=first)
    train(config.model_copy(update={"iterations": 2}), tmp_path / "fork", fork=first)
    begun, source = (newest_checkpoint(path / "checkpoints") for path in (tmp_path / "fork", first))
    assert source is not None
    assert begun is not None
    origin = origin_of(tmp_path / "fork")
    assert origin is not None
    assert origin.fork is not None
    assert origin.fork.digest == source[0].adapter.digest
    held = read_checkpoint(tmp_path / "fork" / "checkpoints" / "iteration_000000")
    assert held.adapter.digest == source[0].adapter.digest
    assert begun[0].iteration == 2


def test_a_fork_that_comes_back_from_its_copies_does_not_begin_again(
    first: Path, config: RunConfig, tmp_path: Path
) -> None:
    settings = config.checkpoint.model_copy(update={"url": f"file://{tmp_path}/store"})
    config = config.model_copy(update={"checkpoint": settings})
    train(config, tmp_path / "lost", fork=first)
    shutil.rmtree(tmp_path / "lost")
    train(config, tmp_path / "again", fork=first)
    checkpoints = tmp_path / "again" / "checkpoints"
    assert newest_checkpoint(checkpoints) is not None
    assert "iteration_000000" not in [path.resolve().name for path in checkpoints.glob("l*")]
    with pytest.raises(RunFolderError, match=f"exists and it is a fork of {first.resolve()}"):
        train(config, tmp_path / "third", fork=tmp_path / "again")
    assert not (tmp_path / "third").exists()


def test_a_fork_keeps_its_origin_and_is_not_taken_for_another(
    first: Path, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    origin = origin_of(first)
    assert origin is not None
    assert origin.fork is None
    assert origin.versions["flowcredit"] == VERSION
    train(config, tmp_path / "fork", fork=first)
    origin = origin_of(tmp_path / "fork")
    assert origin is not None
    assert origin.fork is not None
    assert (origin.fork.run, origin.fork.iteration) == (str(first.resolve()), 1)
    train(config, tmp_path / "fork", fork=first)
    assert "is a fork of" in capsys.readouterr().out
    for folder, source, reason in (
        (first, tmp_path / "fork", "exists and it is not a fork"),
        (tmp_path / "fork", tmp_path, f"exists and it is a fork of {first.resolve()}"),
    ):
        with pytest.raises(RunFolderError, match=reason):
            train(config, folder, fork=source)


def test_the_remedy_for_a_key_of_another_version_works_for_every_command(
    first: Path, config: RunConfig, tmp_path: Path
) -> None:
    text = (first / "config.yaml").read_text()
    (first / "config.yaml").write_text(text + "newer: 1\n")
    message = rf"begun by flowcredit {VERSION}, this is .*'newer'.*; remove the key from {first}/config.yaml"
    for command in (
        lambda: train(config, first),
        lambda: config_of(first),
        lambda: list(generate_images(first, [A], out=tmp_path, count=1, seed=0)),
        lambda: app(["eval", "--run", str(first)], standalone_mode=False),
        lambda: app(["train", "--run", str(first)], standalone_mode=False),
        lambda: app(["export", str(first), str(tmp_path / "merged")], standalone_mode=False),
    ):
        with pytest.raises(RunFolderError, match=message):
            command()
    (first / "config.yaml").write_text(text)
    train(config, first)
    assert list(generate_images(first, [A], out=tmp_path, count=1, seed=0))


def test_the_version_is_an_option(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        app(["--version"])
    assert capsys.readouterr().out == f"flowcredit {VERSION}\n"

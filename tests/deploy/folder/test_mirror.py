"""Checkpoints on another store: copied whole, taken by an empty folder, and no run ends because a copy fails."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy.folder import mirror
from deploy.folder.read import Fork, require_fork_of
from deploy.folder.run_folder import open_run_folder
from deploy.jobs.fetch import fetch
from learner.checkpoint import newest_checkpoint
from protocol.errors import CheckpointError, RunFolderError
from protocol.ground.files import by_iteration
from protocol.messages import Adapter, LearnerState, digest_of
from tests.support.full_disk import files_limited


def state(iteration: int) -> LearnerState:
    arrays = {"transformer.q.lora_A.weight": np.full((2, 4), iteration, np.float32)}
    adapter = Adapter(version=iteration, arrays=arrays, digest=digest_of(arrays))
    return LearnerState(iteration=iteration, adapter=adapter, optimizer={})


@pytest.fixture
def config(tiny_config, tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("a\n")
    prompts = str(tmp_path / "prompts.txt")
    url = f"file://{tmp_path}/store/run"
    return tiny_config(data={"train": prompts, "heldout": prompts}, checkpoint={"url": url, "keep": 2})


def test_an_empty_folder_is_filled_with_the_newest_copy(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    for iteration in (1, 2, 3):
        run.append({"iteration": iteration})
        run.save(state(iteration))
    run.close()
    copies = sorted(path.name for path in (tmp_path / "store/run/checkpoints").iterdir())
    assert copies == ["iteration_000002", "iteration_000003"]
    shutil.rmtree(tmp_path / "first")

    again = open_run_folder(tmp_path / "second", config)
    found = again.newest()
    assert found is not None
    assert found[0].adapter.digest == state(3).adapter.digest
    assert [line["iteration"] for line in again.lines()] == [1, 2, 3]
    again.close()


def test_a_copy_that_was_never_whole_does_not_keep_the_store_from_being_pruned(config, tmp_path):
    store = tmp_path / "store/run/checkpoints"
    (store / "iteration_000001").mkdir(parents=True)
    (store / "iteration_000001/state.json").write_text("{}")
    run = open_run_folder(tmp_path / "run", config)
    run.save(state(2))
    run.close()
    assert [path.name for path in store.iterdir()] == ["iteration_000002"]


@pytest.mark.parametrize("damage", [False, True], ids=["whole", "damaged"])
def test_the_checkpoint_with_the_best_held_out_score_comes_back_too(config, tmp_path, damage, caplog):
    run = open_run_folder(tmp_path / "first", config)
    for iteration, score in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6), (5, 0.8)):
        run.append({"iteration": iteration, "evaluation/score": score})
        run.save(state(iteration))
    run.close()
    store = tmp_path / "store/run/checkpoints"
    if damage:
        (store / "iteration_000002/state.json").write_text("{}")
    again = open_run_folder(tmp_path / "second", config)
    held = {5: "iteration_000005"} if damage else {2: "iteration_000002", 5: "iteration_000005"}
    assert {name: path.name for name, path in by_iteration(again.checkpoints).items()} == held
    assert ("checkpoint refused" in caplog.text) == damage
    again.save(state(6))
    again.close()
    if not damage:
        assert sorted(path.name[-1] for path in store.iterdir()) == ["2", "5", "6"]
        assert (again.checkpoints / "best").resolve().name == "iteration_000002"


def test_the_checkpoint_at_a_watched_scorer_s_peak_comes_back_too(tiny_config, tmp_path):
    url = f"file://{tmp_path}/store/run"
    rewards = {"red": {"scorer": "geneval"}, "eyes": {"scorer": "geneval", "use": "evaluate"}}
    config = tiny_config(checkpoint={"url": url, "keep": 1}, rewards=rewards)
    run = open_run_folder(tmp_path / "first", config)
    for step, score, eyes in ((1, 0.5, 0.9), (2, 0.9, 0.5), (3, 0.7, 0.4)):
        run.append({"iteration": step, "evaluation/score": score, "evaluation/reward/eyes": eyes})
        run.save(state(step))
    run.close()
    again = open_run_folder(tmp_path / "second", config)
    assert list(by_iteration(again.checkpoints)) == [1, 2, 3]
    again.save(state(4))
    again.close()
    assert list(by_iteration(tmp_path / "store/run/checkpoints")) == [1, 2, 4]
    fetched = fetch(url, tmp_path / "fetched", address=None)
    assert list(by_iteration(fetched / "checkpoints")) == [1, 2, 4]


def killed_while_it_fills(path: Path, config) -> None:
    """Open a run folder in a process that dies as soon as it has fetched the newest copy."""
    child = os.fork()
    if not child:
        try:
            mirror.read_checkpoint = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            open_run_folder(path, config)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("url", ["the same", None], ids=["from the same store", "without a store"])
def test_a_process_that_was_killed_while_it_filled_a_folder_leaves_no_trouble(config, tmp_path, url):
    run = open_run_folder(tmp_path / "first", config)
    run.save(state(1))
    run.close()
    killed_while_it_fills(tmp_path / "second", config)
    assert any((tmp_path / "second" / "checkpoints").iterdir())
    if url is None:
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"url": None})})
    again = open_run_folder(tmp_path / "second", config)
    found = again.newest()
    assert (found and found[0].iteration) == (1 if url else None)
    again.close()
    assert not list((tmp_path / "second").rglob("*.partial"))


def test_copies_that_cannot_be_used_leave_nothing_behind(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    run.save(state(1))
    run.close()
    (tmp_path / "prompts.txt").write_text("b\n")
    (tmp_path / "third").mkdir()
    for name in ("second", "third"):
        with pytest.raises(RunFolderError, match="was started with other contents"):
            open_run_folder(tmp_path / name, config)
    assert not (tmp_path / "second").exists()
    (tmp_path / "prompts.txt").write_text("a\n")
    again = open_run_folder(tmp_path / "third", config)
    assert again.newest() is not None
    again.close()


def test_the_origin_of_a_run_and_its_ids_at_trackers_come_back(config, tmp_path):
    fork = Fork(run="/runs/other", iteration=7, digest="abc")
    run = open_run_folder(tmp_path / "first", config, fork=fork)
    for name in ("wandb.id", "mlflow.id"):
        (run.path / name).write_text(name)
    run.save(state(1))
    run.close()
    again = open_run_folder(tmp_path / "second", config)
    again.close()
    for name in ("wandb.id", "mlflow.id", "origin.json"):
        assert (tmp_path / "second" / name).read_text() == (tmp_path / "first" / name).read_text()
    assert require_fork_of(tmp_path / "second", Path("/runs/other")) == fork


def test_fetch_brings_the_newest_copy_of_a_run(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    for iteration in (1, 2):
        run.save(state(iteration))
    run.close()
    fetched = fetch(config.checkpoint.url, tmp_path / "fetched", address=None)
    found = newest_checkpoint(fetched / "checkpoints")
    assert found is not None
    assert found[0].adapter.digest == state(2).adapter.digest
    assert (fetched / "config.yaml").read_text() == (tmp_path / "first" / "config.yaml").read_text()


def test_a_running_mean_is_copied_with_its_checkpoint(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    run.save(replace(state(1), average=state(7).adapter))
    run.close()
    again = open_run_folder(tmp_path / "second", config)
    found = again.newest()
    assert found is not None
    assert found[0].average is not None
    assert found[0].average.digest == state(7).adapter.digest
    again.close()


def test_of_damaged_copies_the_one_before_is_taken_and_when_none_is_whole_the_run_stops(config, tmp_path, caplog):
    run = open_run_folder(tmp_path / "first", config)
    for iteration in (1, 2):
        run.save(state(iteration))
    run.close()
    store = tmp_path / "store/run/checkpoints"
    (store / "iteration_000002/optimizer.safetensors").write_bytes(b"")
    again = open_run_folder(tmp_path / "second", config)
    found = again.newest()
    assert found is not None
    assert found[0].iteration == 1
    assert "checkpoint refused" in caplog.text
    again.close()
    (store / "iteration_000001/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint at file:.* is whole; the newest: .*iteration_000002"):
        open_run_folder(tmp_path / "third", config)
    assert not (tmp_path / "third").exists()


def test_a_copy_without_its_manifest_does_not_count(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    for iteration in (1, 2):
        run.save(state(iteration))
    run.close()
    (tmp_path / "store/run/checkpoints/iteration_000002/manifest.json").unlink()
    again = open_run_folder(tmp_path / "second", config)
    found = again.newest()
    assert found is not None
    assert found[0].iteration == 1
    again.close()


def test_copies_of_another_config_are_refused(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    run.save(state(1))
    run.close()
    other = config.model_copy(update={"seed": 99})
    with pytest.raises(RunFolderError, match=r"belongs to another config: seed \(there 7, now 99\)"):
        open_run_folder(tmp_path / "second", other)


def test_a_store_that_takes_nothing_ends_no_run(config, tmp_path, caplog):
    run = open_run_folder(tmp_path / "first", config)
    (tmp_path / "store").write_text("a file where the folder should be")
    assert run.save(state(1)).is_dir()
    run.close()
    assert "a checkpoint could not be copied to file://" in caplog.text


def test_a_store_that_fills_up_keeps_its_copies_and_the_lines_that_belong_to_them(config, tmp_path, caplog):
    run = open_run_folder(tmp_path / "first", config)
    run.append({"iteration": 1})
    run.save(state(1))
    run.close()
    run = open_run_folder(tmp_path / "first", config)
    held = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    run.append({"iteration": 2, **{f"work/{number:04}": 1.0 for number in range(600)}})
    with files_limited(8_000):
        run.save(state(2))
        run.close()
    assert "a checkpoint could not be copied to file://" in caplog.text
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == held


def test_a_folder_without_room_for_the_copies_is_named_and_nothing_is_left(config, tmp_path):
    run = open_run_folder(tmp_path / "first", config)
    run.append({"iteration": 1, **{f"work/{number:04}": 1.0 for number in range(600)}})
    run.save(state(1))
    run.close()
    before = sorted(tmp_path.iterdir())
    line = f"^{tmp_path} must have room for the copies of checkpoint.url file://.*, got File too large: free some space"
    with pytest.raises(RunFolderError, match=line), files_limited(8_000):
        fetch(config.checkpoint.url, tmp_path / "fetched", address=None)
    with pytest.raises(RunFolderError, match=line), files_limited(8_000):
        open_run_folder(tmp_path / "second", config)
    assert sorted(tmp_path.iterdir()) == before


HANGING = """
import sys, time
from pathlib import Path
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from deploy.folder import mirror

class Hanging(MemoryFileSystem):
    protocol = "hanging"
    def put_file(self, *args, **more):
        time.sleep(3600)

fsspec.register_implementation("hanging", Hanging)
mirror.CLOSE_S = 0.2
copies = mirror.Mirror("hanging://run")
for _ in range(2):
    copies.push(Path(sys.argv[1]), beside=[])
copies.close()
"""


def test_a_copy_that_hangs_is_left_and_the_process_ends(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "the copy to hanging://run is not finished and was abandoned" in ended.stderr


def test_a_checkpoint_from_before_the_first_metrics_is_copied(config, tmp_path, caplog):
    run = open_run_folder(tmp_path / "first", config)
    run.save(state(0))
    run.close()
    assert (tmp_path / "store/run/checkpoints/iteration_000000/manifest.json").is_file()
    assert "could not be copied" not in caplog.text


def test_a_store_that_cannot_be_asked_keeps_an_empty_folder_from_starting_over(config, tmp_path):
    (tmp_path / "store").write_text("a file where the folder should be")
    with pytest.raises(RunFolderError, match="checkpoint.url file://.* cannot be read"):
        open_run_folder(tmp_path / "first", config)


@pytest.mark.parametrize("url", ["nosuchthing://bucket/run", "s3://bucket/run", "github://x", "dir://x"])
def test_a_url_that_cannot_be_opened_is_one_line(config, tmp_path, url):
    settings = config.checkpoint.model_copy(update={"url": url})
    with pytest.raises(RunFolderError, match=f"checkpoint.url {url} cannot be opened: .*"):
        open_run_folder(tmp_path / "run", config.model_copy(update={"checkpoint": settings}))
    assert not (tmp_path / "run").exists()

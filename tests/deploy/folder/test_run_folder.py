"""A run's folder: metrics that strict readers can read, full disks, and folders that nobody used."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deploy.folder.names import METRICS
from deploy.folder.run_folder import RunFolder, open_run_folder, require_usable
from flowcredit.code import code_digest
from learner.checkpoint import read_facts
from protocol.errors import LeaseLostError, RunFolderError
from protocol.ground.files import by_iteration
from protocol.messages import Adapter, LearnerState, digest_of


@pytest.fixture
def folder(tmp_path: Path, tiny_config) -> Iterator[RunFolder]:
    run = open_run_folder(tmp_path / "run", tiny_config())
    yield run
    run.close()


def test_a_number_that_is_not_finite_stands_as_null(folder):
    folder.append({"iteration": 1, "reward/mean": float("nan"), "train/loss": 0.5})
    assert (folder.path / METRICS).read_text() == '{"iteration": 1, "reward/mean": null, "train/loss": 0.5}\n'


def test_damaged_metrics_are_named_and_a_cut_off_last_line_is_dropped(folder):
    folder.append({"iteration": 1})
    with (folder.path / METRICS).open("a") as file:
        file.write('{"iterat')
    assert folder.lines() == [{"iteration": 1}]
    folder.rewind(1)
    folder.append({"iteration": 2})
    assert [json.loads(line)["iteration"] for line in (folder.path / METRICS).read_text().splitlines()] == [1, 2]
    (folder.path / METRICS).write_bytes(b"\x00\x00\n{}\n")
    with pytest.raises(RunFolderError, match="holds a damaged metrics.jsonl"):
        folder.lines()


def state(iteration: int, size: int = 4) -> LearnerState:
    arrays = {"transformer.q.lora_A.weight": np.zeros((size, 4), np.float32)}
    adapter = Adapter(version=iteration, arrays=arrays, digest=digest_of(arrays))
    return LearnerState(iteration=iteration, adapter=adapter, optimizer={})


@pytest.mark.parametrize("name", ["checkpoints", "gallery", "trajectories", ".lease"])
def test_a_file_where_a_folder_must_be_is_named(name, tmp_path, tiny_config):
    open_run_folder(tmp_path / "run", tiny_config()).close()
    path = tmp_path / "run" / name
    shutil.rmtree(path)
    path.touch()
    rule = f"{path} must be a folder, got a file: remove it, or set --run to another folder"
    with pytest.raises(RunFolderError, match=re.escape(rule)):
        open_run_folder(tmp_path / "run", tiny_config())
    with pytest.raises(RunFolderError, match=re.escape(rule)):
        require_usable(tmp_path / "run")


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(folder):
    folder.save(state(1, 4))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RunFolderError, match="cannot be written"):
            folder.save(state(2, 4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    newest = folder.newest()
    assert newest is not None
    assert newest[0].iteration == 1


def test_a_folder_in_which_nothing_was_drawn_is_discarded_and_another_is_kept(tmp_path, tiny_config):
    (tmp_path / "empty").mkdir()
    for name, is_left in (("new", False), ("empty", True)):
        run = open_run_folder(tmp_path / name, tiny_config())
        run.discard_if_unused()
        run.close()
        assert (tmp_path / name).exists() == is_left
    assert list((tmp_path / "empty").iterdir()) == []
    run = open_run_folder(tmp_path / "used", tiny_config())
    run.append({"iteration": 0})
    run.discard_if_unused()
    run.close()
    assert len(run.lines()) == 1
    run = open_run_folder(tmp_path / "learned", tiny_config())
    for iteration in (0, 1):
        run.save(state(iteration))
        run.discard_if_unused(is_forked=iteration == 1)
        assert run.newest() is not None
    run.close()


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"seed: \xff", b"a: [", b"old_key: 3\n"])
def test_an_unreadable_config_of_a_run_is_named(content, tmp_path, tiny_config):
    open_run_folder(tmp_path / "run", tiny_config()).close()
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises(RunFolderError, match="holds no readable config.yaml"):
        open_run_folder(tmp_path / "run", tiny_config())


def read_only(descriptor: int) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_lines_that_a_disk_does_not_take_wait_and_come_whole_and_in_order(folder, monkeypatch):
    folder.append({"iteration": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", read_only)
        for iteration in (2, 3):
            with pytest.raises(RunFolderError, match="cannot be written: Read-only file system"):
                folder.append({"iteration": iteration})
        with pytest.raises(RunFolderError):
            folder.save(state(3))
        assert folder.lines() == [{"iteration": 1}]
        assert folder.newest() is None
    folder.append({"iteration": 4})
    assert [line["iteration"] for line in folder.lines()] == [1, 2, 3, 4]


def test_a_rewind_drops_the_lines_after_it_also_those_that_wait(folder, monkeypatch):
    for iteration in (0, 1, 2, 2, 3):
        folder.append({"iteration": iteration})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", read_only)
        with pytest.raises(RunFolderError):
            folder.append({"iteration": 4})
    folder.rewind(2)
    assert [line["iteration"] for line in folder.lines()] == [0, 1, 2, 2]
    folder.append({"iteration": 3})
    assert [line["iteration"] for line in folder.lines()] == [0, 1, 2, 2, 3]
    folder.rewind(-1)
    assert folder.lines() == []


@pytest.mark.parametrize("line", ["[]", "3", '{"reward": 1}', '{"iteration": "x"}'])
def test_a_line_that_is_no_iteration_is_damage(folder, line):
    (folder.path / METRICS).write_text(line + "\n")
    with pytest.raises(RunFolderError, match="holds a damaged metrics.jsonl"):
        folder.lines()


def test_other_library_versions_are_told(folder, monkeypatch):
    checkpoint = folder.save(state(1))
    assert folder.version_changes(checkpoint) == []
    monkeypatch.setattr("deploy.folder.run_folder.library_versions", lambda: {"torch": "9.9"})
    assert any(
        change.startswith("torch (there ") and "now 9.9" in change for change in folder.version_changes(checkpoint)
    )


def test_a_process_that_took_over_fences_this_one_out(folder):
    (folder.path / ".lease" / "token_000099").write_text('{"host": "elsewhere", "pid": 7}')
    with pytest.raises(LeaseLostError, match="was taken over by process 7 on elsewhere"):
        folder.append({"iteration": 1})
    with pytest.raises(LeaseLostError, match="was taken over"):
        folder.save(state(1))
    assert folder.lines() == []


def test_a_run_that_was_killed_while_its_folder_was_made_begins_again(tmp_path, tiny_config):
    for name in ("checkpoints", "gallery", "trajectories"):
        (tmp_path / "run" / name).mkdir(parents=True)
    open_run_folder(tmp_path / "run", tiny_config()).close()
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "checkpoints" / "mine").touch()
    with pytest.raises(RunFolderError, match="must be new, empty or a run's own, got one with other files"):
        open_run_folder(tmp_path / "other", tiny_config())


def test_a_run_that_was_killed_before_its_config_begins_again_with_other_prompts(tmp_path, tiny_config):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    config = tiny_config(data={"train": str(prompts), "heldout": str(prompts)})
    open_run_folder(tmp_path / "run", config).close()
    (tmp_path / "began").mkdir()
    shutil.copy(tmp_path / "run" / "inputs.json", tmp_path / "began")
    prompts.write_text("b\n")
    open_run_folder(tmp_path / "began", config).close()
    open_run_folder(tmp_path / "began", config).close()


def test_the_checkpoint_with_the_best_held_out_score_stays(tmp_path, tiny_config):
    folder = open_run_folder(tmp_path / "best", tiny_config(checkpoint={"keep": 1}))
    for iteration, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.9), (5, 0.7)):
        if score is not None:
            folder.append({"iteration": iteration, "evaluation/score": score})
        folder.save(state(iteration))
    folder.close()
    held = sorted(path.name for path in folder.checkpoints.iterdir() if not path.is_symlink())
    assert held == ["iteration_000002", "iteration_000005"]
    assert (folder.checkpoints / "best").resolve().name == "iteration_000002"
    assert (folder.checkpoints / "latest").resolve().name == "iteration_000005"


def watched(tiny_config, hacking="warn", **sections):
    rewards = {"red": {"scorer": "geneval"}, "eyes": {"scorer": "geneval", "use": "evaluate"}}
    return tiny_config(rewards=rewards, guards={"hacking": hacking}, **sections)


@pytest.mark.parametrize(("hacking", "steps"), [("stop", [2, 3, 6]), ("warn", [2, 3, 6]), ("off", [2, 6])])
def test_the_checkpoint_at_a_watched_scorer_s_peak_stays(tmp_path, tiny_config, hacking, steps):
    folder = open_run_folder(tmp_path / "run", watched(tiny_config, hacking, checkpoint={"keep": 1}))
    for step, score, eyes in (
        (1, 0.5, 0.3),
        (2, 0.9, 0.5),
        (3, 0.7, 0.8),
        (4, 0.7, None),
        (5, 0.7, 0.8),
        (6, 0.1, 0.1),
    ):
        folder.append({"iteration": step, "evaluation/score": score, "evaluation/reward/eyes": eyes})
        folder.save(state(step))
    folder.close()
    assert list(by_iteration(folder.checkpoints)) == steps


def test_a_checkpoint_records_the_code_and_a_resume_with_other_code_is_told(folder, monkeypatch):
    checkpoint = folder.save(state(1))
    versions = read_facts(checkpoint)["versions"]
    assert versions["code"] == code_digest()
    monkeypatch.setattr("deploy.folder.run_folder.library_versions", lambda: versions | {"code": "0123456789ab"})
    assert folder.version_changes(checkpoint) == [f"code (there {code_digest()}, now 0123456789ab)"]

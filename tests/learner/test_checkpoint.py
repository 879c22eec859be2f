"""Checkpoints come back bit for bit, and a damaged one is refused with its reason."""

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.checkpoint import (
    FILES,
    MANIFEST,
    OPTIMIZER,
    RECENT,
    STATE,
    newest_checkpoint,
    put_back,
    read_checkpoint,
    read_facts,
    write_checkpoint,
)
from protocol.config.model import LoraConfig
from protocol.errors import CheckpointError
from protocol.ground.files import ADAPTER_FILE, sha256_of
from protocol.messages import Adapter, LearnerState, digest_of

LORA = LoraConfig(rank=2, alpha=4)


def state(iteration: int) -> LearnerState:
    numbers = np.random.default_rng(iteration)
    arrays = {f"transformer.q.lora_{x}.weight": numbers.normal(size=(2, 3)).astype(np.float32) for x in "AB"}
    optimizer = {f"{name}/{slot}": numbers.normal(size=(2, 3)).astype(np.float32) for name in arrays for slot in "mv"}
    optimizer |= {f"{name}/step": np.array(float(iteration), np.float32) for name in arrays}
    return LearnerState(
        iteration=iteration,
        adapter=Adapter(version=iteration, arrays=arrays, digest=digest_of(arrays)),
        optimizer=optimizer,
    )


def write(root: Path, iteration: int, keep: int = 3) -> Path:
    return write_checkpoint(root, state(iteration), LORA, keep=keep)


def held(root: Path) -> list[str]:
    """All that a checkpoint root holds, but for the pointer."""
    return sorted(path.name for path in root.iterdir() if path.name != "latest")


def same(first: LearnerState, second: LearnerState) -> bool:
    return (
        first.iteration == second.iteration
        and first.adapter.version == second.adapter.version
        and first.adapter.digest == second.adapter.digest == digest_of(second.adapter.arrays)
        and digest_of(first.optimizer) == digest_of(second.optimizer)
    )


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = write(tmp_path, 7)
    assert folder == tmp_path / "iteration_000007"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, MANIFEST])
    assert same(read_checkpoint(folder), state(7))


def test_a_state_without_optimizer_moments_comes_back(tmp_path: Path) -> None:
    fresh = LearnerState(iteration=0, adapter=state(0).adapter, optimizer={})
    assert read_checkpoint(write_checkpoint(tmp_path, fresh, LORA, keep=1)).optimizer == {}


def test_guards_that_are_broken_come_back_and_a_checkpoint_that_names_none_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, replace(state(3), broken={"contrast": 2}), LORA, keep=1)
    assert read_checkpoint(folder).broken == {"contrast": 2}
    facts = json.loads((folder / STATE).read_text())
    del facts["broken"]
    (folder / STATE).write_text(json.dumps(facts))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest[STATE] = hashlib.sha256((folder / STATE).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert read_checkpoint(folder).broken == {}


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    for iteration in (1, 2, 10):
        write(tmp_path, iteration)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest[1].name == "iteration_000010"
    assert same(newest[0], state(10))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("damage", "reason"), [(truncate, "altered"), (alter, "altered"), (Path.unlink, "lacks")])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: object, reason: str
) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    damage(folder / name)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=f"{reason}.*{name}" if reason == "altered" else f"lacks {name}"):
        read_checkpoint(folder)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert same(newest[0], state(1))
    assert name in caplog.text


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"state.json": "0"}', '"text"'])
def test_a_folder_without_a_full_manifest_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = write(tmp_path, 2)
    (folder / MANIFEST).unlink()
    if content is not None:
        (folder / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", ['{"iteration": 2}', "[]", "3", '{"iteration": "x", "digest": "y"}'])
def test_consistent_digests_over_wrong_content_are_refused(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, 2)
    (folder / STATE).write_text(content)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest[STATE] = hashlib.sha256(content.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        read_checkpoint(folder)


def test_files_of_two_checkpoints_cannot_be_mixed(tmp_path: Path) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    shutil.copy(first / ADAPTER_FILE, second / ADAPTER_FILE)
    with pytest.raises(CheckpointError, match=ADAPTER_FILE):
        read_checkpoint(second)


def test_a_checkpoint_on_a_bad_sector_is_refused_and_the_one_before_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (1, 2):
        write(tmp_path, iteration)

    def read(path: Path) -> str:
        if path.parent.name == "iteration_000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sha256_of(path)

    monkeypatch.setattr("learner.checkpoint.sha256_of", read)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[0].iteration == 1
    assert "iteration_000002 cannot be read: [Errno 5] Input/output error" in caplog.text


def test_when_none_is_whole_the_run_stops(tmp_path: Path) -> None:
    for iteration in (1, 2):
        truncate(write(tmp_path, iteration) / OPTIMIZER)
    with pytest.raises(CheckpointError, match="no checkpoint under .* is whole; the newest: .*iteration_000002"):
        newest_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    write(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints").chmod(0o300)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # folders above it may be closed to another user
    user = os.geteuid()
    try:
        if not user:
            os.seteuid(65534)
        with pytest.raises(CheckpointError, match="^checkpoints under checkpoints cannot be listed: Permission denied"):
            newest_checkpoint(Path("checkpoints"))
    finally:
        os.seteuid(user)
        (tmp_path / "checkpoints").chmod(0o700)


def test_a_checkpoint_that_the_run_replaces_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    read: list[str] = []

    def reading(folder: Path) -> LearnerState:
        read.append(folder.name)
        if len(read) == 1:
            write(tmp_path, 2, keep=1)
        return read_checkpoint(folder)

    monkeypatch.setattr("learner.checkpoint.read_checkpoint", reading)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[0].iteration == 2
    assert read == ["iteration_000001", "iteration_000002"]
    assert not caplog.text


def test_who_may_read_the_folder_may_read_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    means = {"average": state(1).adapter, "recent": (state(0).adapter,)}
    for number, umask in enumerate((0o022, 0o077, 0o002)):
        before = os.umask(umask)
        try:
            folder = write_checkpoint(tmp_path / str(umask), replace(state(number), **means), LORA, keep=3)
        finally:
            os.umask(before)
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) == 6
        assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path, iteration, keep=2)
    assert held(tmp_path) == ["iteration_000003", "iteration_000004"]


def test_a_damaged_later_checkpoint_does_not_push_out_the_ones_that_a_resumed_run_writes(tmp_path: Path) -> None:
    write(tmp_path, 30)
    truncate(write(tmp_path, 40) / OPTIMIZER)
    write(tmp_path, 35, keep=1)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert same(newest[0], state(35))
    write(tmp_path, 40, keep=1)
    assert held(tmp_path) == ["iteration_000040"]


def test_a_copy_that_a_person_made_is_neither_read_nor_dropped(tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path, 2), tmp_path / "iteration_000002_best")
    (tmp_path / "iteration_000002_best" / STATE).write_text("{}")
    write(tmp_path, 3, keep=1)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert same(newest[0], state(3))
    assert held(tmp_path) == ["iteration_000002_best", "iteration_000003"]


def test_the_millionth_step_is_newer_than_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 999_999)
    write(tmp_path, 1_000_000, keep=2)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest[0].iteration == 1_000_000


def test_a_leftover_of_an_interrupted_write_is_never_read_and_is_removed_by_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / ".iteration_000009.partial"
    leftover.mkdir()
    (leftover / STATE).write_text("{}")
    assert newest_checkpoint(tmp_path) is None
    write(tmp_path, 1)
    assert held(tmp_path) == ["iteration_000001"]


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_write_that_fails_midway_leaves_the_older_checkpoints_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full_disk)
        with pytest.raises(OSError, match="no space"):
            write(tmp_path, 2)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert same(newest[0], state(1))
    write(tmp_path, 2)
    assert held(tmp_path) == ["iteration_000001", "iteration_000002"]


def test_a_rewrite_of_the_same_step_that_fails_keeps_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full_disk)
        with pytest.raises(OSError, match="no space"):
            write(tmp_path, 1)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert same(newest[0], state(1))


def test_a_checkpoint_that_was_about_to_be_replaced_when_its_process_was_killed_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            write(tmp_path, 1)
    assert newest_checkpoint(tmp_path) is None
    again = tmp_path.with_name("again")
    shutil.copytree(tmp_path, again, symlinks=True)
    put_back(again)
    newest = newest_checkpoint(again)
    assert newest is not None and same(newest[0], state(1))
    write(tmp_path, 2)
    assert held(tmp_path) == ["iteration_000001", "iteration_000002"]


def with_average(iteration: int) -> LearnerState:
    means = {"average": state(iteration + 100).adapter, "old": state(iteration + 200).adapter}
    return replace(state(iteration), **means, baseline=(0.1, None, -0.25))


def test_a_running_mean_and_a_baseline_come_back_bit_for_bit(tmp_path: Path) -> None:
    saved = with_average(3)
    read = read_checkpoint(write_checkpoint(tmp_path, saved, LORA, keep=1))
    assert same(read, saved)
    assert read.average is not None
    assert saved.average is not None
    assert read.average.digest == saved.average.digest
    assert read.old is not None
    assert saved.old is not None
    assert read.old.digest == saved.old.digest
    assert read.baseline == saved.baseline


@pytest.mark.parametrize(("damage", "reason"), [(truncate, "altered"), (alter, "altered"), (Path.unlink, "lacks")])
@pytest.mark.parametrize("mean", ["average", "old"])
def test_a_damaged_running_mean_is_named(tmp_path: Path, mean: str, damage: object, reason: str) -> None:
    folder = write_checkpoint(tmp_path, with_average(3), LORA, keep=1)
    damage(folder / mean / ADAPTER_FILE)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(folder)


def test_older_adapters_that_groups_in_flight_need_come_back(tmp_path: Path) -> None:
    recent = (state(5).adapter, state(6).adapter)
    folder = write_checkpoint(tmp_path, replace(state(7), recent=recent), LORA, keep=1)
    back = read_checkpoint(folder).recent
    assert [(each.version, each.digest) for each in back] == [(each.version, each.digest) for each in recent]
    assert [digest_of(each.arrays) for each in back] == [each.digest for each in recent]
    alter(folder / RECENT)
    with pytest.raises(CheckpointError, match=f"altered {RECENT}"):
        read_checkpoint(folder)


def test_latest_leads_to_the_newest(tmp_path: Path) -> None:
    for iteration in (1, 2, 10):
        write(tmp_path, iteration)
        assert (tmp_path / "latest").resolve().name == f"iteration_{iteration:06d}"
    assert same(read_checkpoint(tmp_path / "latest"), state(10))


def test_young_checkpoints_are_kept_beyond_the_count(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4, 5):
        folder = write_checkpoint(tmp_path, state(iteration), LORA, keep=2, keep_hours=1.0)
        if iteration <= 2:
            hours_ago = time.time() - 2 * 3600
            os.utime(folder, (hours_ago, hours_ago))
    assert held(tmp_path) == ["iteration_000003", "iteration_000004", "iteration_000005"]


def test_facts_stand_beside_the_state(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, state(3), LORA, keep=1, facts={"versions": {"torch": "2.9"}, "iteration": 77})
    assert read_facts(folder)["versions"] == {"torch": "2.9"}
    assert read_checkpoint(folder).iteration == 3


def test_a_write_that_fails_leaves_no_partial_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []

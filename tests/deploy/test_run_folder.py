"""A run's folder: metrics that strict readers can read, full disks, and folders that nobody used."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.run_folder import METRICS, RunFolder, open_run_folder
from protocol.errors import RunFolderError
from protocol.messages import LearnerState, PolicyWeights, digest_of


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


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(folder):
    import numpy as np

    def state(step: int, size: int) -> LearnerState:
        arrays = {"transformer.q.lora_A.weight": np.zeros((size, 4), np.float32)}
        weights = PolicyWeights(version=step, arrays=arrays, digest=digest_of(arrays))
        return LearnerState(step=step, weights=weights, optimizer={})

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
    assert newest[0].step == 1


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


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"seed: \xff", b"a: [", b"old_key: 3\n"])
def test_an_unreadable_config_of_a_run_is_named(content, tmp_path, tiny_config):
    open_run_folder(tmp_path / "run", tiny_config()).close()
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises(RunFolderError, match="holds no readable config.yaml"):
        open_run_folder(tmp_path / "run", tiny_config())

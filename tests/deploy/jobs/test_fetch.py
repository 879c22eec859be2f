"""A run folder that travels through the log of a job, or out of a store, and arrives whole."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy.folder import location, names
from deploy.jobs import pack
from deploy.jobs.fetch import Received, fetch
from protocol.errors import ConfigError, RunFolderError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "mine"
    for name in ("iteration_000004", "iteration_000008", "iteration_1000000"):
        folder = run / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "pytorch_lora_weights.safetensors").write_bytes(name.encode() * 50_000)
        if name != "iteration_1000000":
            (folder / "manifest.json").write_text("{}")
    (run / "gallery").mkdir()
    (run / "gallery" / "before_after.png").write_bytes(b"image")
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "control.token").write_text("secret")
    return run


def printed(*words: str, **variables: str) -> str:
    """What the job prints, on a machine without the project."""
    command = [sys.executable, "-I", pack.__file__, *words]
    return subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout


def test_the_newest_whole_checkpoint_and_everything_else_but_secrets_arrive(run):
    archive = io.BytesIO()
    received = Received(archive)
    text = "a line of Ray's\n" + printed(str(run))
    for begin in range(0, len(text), 1000):
        received.take(text[begin : begin + 1000])
    received.require_whole("mine", 0)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        assert sorted(tar.getnames()) == [
            "checkpoints/iteration_000008/manifest.json",
            "checkpoints/iteration_000008/pytorch_lora_weights.safetensors",
            "config.yaml",
            "gallery/before_after.png",
        ]
        file = tar.extractfile("checkpoints/iteration_000008/pytorch_lora_weights.safetensors")
        assert file.read() == b"iteration_000008" * 50_000


def test_all_that_a_run_folder_holds_travels_but_what_belongs_to_its_machine() -> None:
    stays = {names.CHECKPOINTS, names.LEASE, names.FILLING, names.TOKEN}
    known = {value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)}
    assert {*pack.FILES, *pack.FOLDERS} == (known | {*names.RECORDS}) - stays


def test_a_name_is_looked_up_in_the_folder_of_runs(run):
    for name in ("mine", "runs/mine"):
        assert pack.WHOLE in printed(name, FLOWCREDIT_RUNS=str(run.parent))
    assert pack.WHOLE in printed("~/runs/mine", HOME=str(run.parents[1])), "the home of the head"
    received = Received(io.BytesIO())
    received.take(printed("other", FLOWCREDIT_RUNS=str(run.parent)))
    with pytest.raises(RunFolderError, match=r"^there is no run .*/runs/other; .*/runs holds mine$"):
        received.require_whole("other", 0)


def test_without_a_variable_the_folder_of_runs_is_that_of_a_job(tmp_path, monkeypatch):
    monkeypatch.delenv(location.RUNS_VARIABLE, raising=False)
    monkeypatch.setenv(location.JOB_VARIABLE, '{"metadata": {"job_submission_id": "mine"}}')
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"there is no run {location.runs_folder() / 'mine'};" in printed("mine", HOME=str(tmp_path))


@pytest.mark.parametrize("harm", [lambda text: text[: len(text) // 2], lambda text: text.replace("A", "B", 1)])
def test_a_broken_copy_is_refused(run, harm):
    received = Received(io.BytesIO())
    received.take(harm(printed(str(run))))
    with pytest.raises(RunFolderError, match=r"^run mine could not be fetched, its job ended with 0: "):
        received.require_whole("mine", 0)


def test_a_folder_that_exists_is_left_alone(tmp_path):
    with pytest.raises(RunFolderError, match="must not exist"):
        fetch("file:///nowhere", tmp_path, address=None)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for above in ("file", "file/new", "loop"):
        with pytest.raises(RunFolderError, match=r"cannot be written: .*set --into$"):
            fetch("file:///nowhere", tmp_path / above / "run", address=None)


def test_an_empty_store_and_a_missing_cluster_leave_nothing_behind(tmp_path):
    with pytest.raises(RunFolderError, match=r"^the store file://.*/none holds no run"):
        fetch(f"file://{tmp_path}/none", tmp_path / "a", address=None)
    with pytest.raises(ConfigError, match="does not accept jobs"):
        fetch("mine", tmp_path / "b", address="http://127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []

"""A run goes on only with the contents that it began with."""

import hashlib
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from deploy.folder import fingerprint
from deploy.folder.fingerprint import (
    code_name,
    differences,
    file_digest,
    input_digests,
    library_versions,
    version_changes,
)
from deploy.folder.run_folder import open_run_folder
from flowcredit.code import code_digest, git_commit
from protocol.errors import RunFolderError


@pytest.fixture
def config(tiny_config, tmp_path: Path):
    (tmp_path / "train.txt").write_text("a\nb\n")
    (tmp_path / "heldout.txt").write_text("c\n")
    return tiny_config(data={"train": str(tmp_path / "train.txt"), "heldout": str(tmp_path / "heldout.txt")})


def test_digests_are_of_the_contents(config, tmp_path):
    digests = input_digests(config)
    assert digests["data.train"] == hashlib.sha256(b"a\nb\n").hexdigest()
    assert any(name.startswith("model.path/transformer/") for name in digests)
    (tmp_path / "train.txt").touch()
    assert input_digests(config) == digests


def test_large_files_are_told_apart_by_size_ends_and_header(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MIB", 16)
    monkeypatch.setattr(fingerprint, "WHOLE_MIB", 4)
    path = tmp_path / "weights"
    seen = set()
    for content in (b"x" * 1000, b"x" * 1001, b"y" + b"x" * 999, b"x" * 999 + b"y"):
        path.write_bytes(content)
        seen.add(file_digest(path))
    assert len(seen) == 4


def test_a_run_with_changed_prompts_is_refused_with_the_list_and_the_remedy(config, tmp_path):
    open_run_folder(tmp_path / "run", config).close()
    open_run_folder(tmp_path / "run", config).close()
    (tmp_path / "train.txt").write_text("a\nB\n")
    with pytest.raises(RunFolderError, match=r"other contents: data.train \(there .*, now .*\); .* --fork"):
        open_run_folder(tmp_path / "run", config)


def test_a_run_with_a_changed_model_is_refused(config, tmp_path, tiny_sd3):
    import shutil

    model = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    open_run_folder(tmp_path / "run", config).close()
    weights = next(model.rglob("transformer/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RunFolderError, match=f"model.path/transformer/{weights.name}"):
        open_run_folder(tmp_path / "run", config)


@pytest.mark.parametrize("where", ["{home}", "~"])
@pytest.mark.parametrize("name", ["lora.safetensors", "folder/pytorch_lora_weights.safetensors"])
def test_a_run_with_another_lora_to_start_from_is_refused(config, tmp_path, monkeypatch, name, where):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"one")
    start = f"{where.format(home=tmp_path)}/{name.split('/')[0]}"
    lora = config.model.lora.model_copy(update={"start": start})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    open_run_folder(tmp_path / "run", config).close()
    file.write_bytes(b"two")
    with pytest.raises(RunFolderError, match=r"other contents: model\.lora\.start"):
        open_run_folder(tmp_path / "run", config)


def test_differences_name_what_changed_came_and_went():
    before, now = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}
    assert differences(before, now) == [
        "b (there 2, now 9)",
        "c (there 3, now nothing)",
        "d (there nothing, now 4)",
    ]


def test_versions_name_python_and_torch():
    versions = library_versions()
    assert versions["python"].count(".") == 2
    assert "torch" in versions


def test_versions_name_the_code_and_its_commit(monkeypatch):
    versions = library_versions()
    assert versions["code"] == code_digest()
    monkeypatch.setattr("deploy.folder.fingerprint.git_commit", lambda: "0123456789ab, changed")
    assert code_name(library_versions()) == f"{code_digest()} (commit 0123456789ab, changed)"
    monkeypatch.setattr("deploy.folder.fingerprint.git_commit", lambda: None)
    assert code_name(library_versions()) == code_digest()
    assert code_name({}) == ""


def test_other_code_is_a_change_and_another_commit_of_the_same_code_is_none():
    before = {"code": "aaa", "commit": "1"}
    assert version_changes(before, {"code": "aaa", "commit": "2"}) == []
    assert version_changes(before, {"code": "bbb", "commit": "1"}) == ["code (there aaa, now bbb)"]


def test_the_commit_is_that_of_the_checkout_and_says_whether_it_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("flowcredit.code.ROOT", tmp_path)
    assert git_commit.__wrapped__() is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "file").write_text("1")
    for words in (("init", "-q"), ("add", "file"), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True)
    commit = git_commit.__wrapped__()
    assert len(commit) == 12
    (tmp_path / "file").write_text("2")
    assert git_commit.__wrapped__() == f"{commit}, changed"


def test_the_condition_images_of_prompts_are_inputs_too(config, tmp_path):
    assert "data.train images" not in input_digests(config)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "train.txt").write_text('{"prompt": "b", "image": "a.png"}\n')
    open_run_folder(tmp_path / "run", config).close()
    Image.new("RGB", (8, 16)).save(tmp_path / "a.png")
    with pytest.raises(RunFolderError, match=r"other contents: data.train images \(there"):
        open_run_folder(tmp_path / "run", config)

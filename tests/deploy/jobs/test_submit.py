"""What `flowcredit submit` sends to a cluster."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.jobs.submit import MIB, PACKAGES, Submission, connect, require_small
from protocol.errors import ConfigError
from protocol.ground.addresses import secrets_among
from tests.support.paths import ROOT
from tests.support.services.serving import free_port


def test_a_checkout_travels_as_the_working_directory():
    environment = Submission(preset="toy_geneval", working_dir=ROOT).environment()
    assert environment["working_dir"] == str(ROOT)
    assert {"/runs/", ".venv/"} <= set(environment["excludes"])
    assert "py_modules" not in environment
    assert environment["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "180"}


def test_from_any_other_folder_the_packages_travel_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"path": "some/model"}}))
    given = tmp_path / "env.yaml"
    given.write_text(yaml.safe_dump({"pip": ["einops"], "excludes": ["data"], "env_vars": {"A": "file", "B": "file"}}))
    environment = Submission(
        preset="toy_geneval",
        overrides=("cluster.stop_within_s=10",),
        working_dir=tmp_path,
        runtime_env=given,
        variables={"A": "line"},
    ).environment()
    assert [Path(module).name for module in environment["py_modules"]] == list(PACKAGES)
    assert all((Path(module) / "__init__.py").is_file() for module in environment["py_modules"])
    assert environment["pip"] == ["einops"]
    assert "data" in environment["excludes"]
    assert environment["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "130", "A": "line", "B": "file"}


def test_a_folder_that_ray_would_not_take_is_refused_with_its_largest_entries_before_anything_is_sent(tmp_path):
    def make(name: str, mib: int) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(mib * MIB)

    for name, mib in {"a/one.bin": 40, "a/two.bin": 30, "b.bin": 28, "mine.yaml": 0, "runs/old.bin": 500}.items():
        make(name, mib)
    environment = Submission(preset="toy_geneval", working_dir=tmp_path).environment()
    require_small(environment)
    make("c.bin", 5)
    with pytest.raises(
        ConfigError, match=r"at most 100 MiB.* got 103 MiB.*\.rayignore.* a \(70 MiB\), b\.bin \(28 MiB\)"
    ):
        require_small(environment)
    (tmp_path / ".rayignore").write_text("one.bin\n")
    require_small(environment)


def test_no_secret_is_sent_unasked_and_one_that_is_asked_for_is_named(monkeypatch, tmp_path):
    for name, value in {"FLOWCREDIT_BOARD": "redis://:word@b/0", "HF_TOKEN": "word", "PLAIN": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    words = ["submit", "toy_geneval", "--address", f"http://127.0.0.1:{free_port()}"]
    said = CliRunner().invoke(app, words).output
    assert "note: FLOWCREDIT_BOARD, HF_TOKEN not sent: " in said and "word" not in said
    said = CliRunner().invoke(app, [*words, "--env", "FLOWCREDIT_BOARD", "--env", "PLAIN", "--env", "HF_TOKEN"]).output
    assert "note: FLOWCREDIT_BOARD, HF_TOKEN: Ray writes env_vars to its logs" in said and "word" not in said


def test_secrets_are_told_by_name_or_by_a_password_in_an_address():
    free = {"A": "redis://b/0", "TOKENIZERS_PARALLELISM": "1", "RAY_AUTH_TOKEN_PATH": "/a", "URL": "http://a/b:c@d"}
    held = {
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PGPASSWORD": "x",
        "A": "redis://:w@b/0",
        "B": "rediss://b/0?password=w",
    }
    assert secrets_among(free) == []
    assert secrets_among(held) == list(held)


@pytest.mark.parametrize(
    ("run", "runs", "fetched"),
    [
        ("mine", None, "mine"),
        ("mine", "/shared/runs", "/shared/runs/mine"),
        ("runs/mine", "/shared/runs", "/shared/runs/mine"),
        ("/disk/mine", "/shared/runs", "/disk/mine"),
    ],
)
def test_a_run_is_fetched_from_the_folder_of_runs_of_its_job(run, runs, fetched):
    variables = {"FLOWCREDIT_RUNS": runs} if runs else {}
    assert Submission(preset="toy_geneval", run=run, working_dir=ROOT, variables=variables).fetched_as() == fetched


@pytest.mark.parametrize(
    "text", ["env_vars: [1, 2]", "env_vars: {A: 1}", "excludes: data", "py_modules: 3", "pip: 3", "1: 2"]
)
def test_a_file_that_is_no_environment_is_one_line(tmp_path, text):
    (given := tmp_path / "env.yaml").write_text(text)
    submission = Submission(preset="toy_geneval", working_dir=tmp_path, runtime_env=given)
    with pytest.raises(ConfigError, match=r"^--runtime-env .*env.yaml must be a Ray runtime environment: ") as refused:
        submission.environment()
    assert "\n" not in str(refused.value)


def test_every_word_of_the_command_arrives_as_it_is():
    submission = Submission(preset="toy_geneval", overrides=("data.tags=[counting, colors]", "seed=3"), run="a b")
    words = [
        "python",
        "-m",
        "flowcredit",
        "train",
        "toy_geneval",
        "data.tags=[counting, colors]",
        "seed=3",
        "--run",
        "a b",
    ]
    assert shlex.split(submission.entrypoint()) == words
    assert submission.run_name() == "a b"


@pytest.mark.parametrize("where", ["{elsewhere}/mine.yaml", "../mine.yaml"])
def test_a_preset_outside_the_working_directory_is_refused(tmp_path, where):
    (tmp_path / "here").mkdir()
    preset = where.format(elsewhere=tmp_path)
    with pytest.raises(ConfigError, match=r"^the preset must be a path in the working directory .*/here, got "):
        Submission(preset=preset, working_dir=tmp_path / "here").environment()


def test_a_preset_that_extends_one_outside_the_working_directory_is_refused(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "outside.yaml").write_text("base: toy_geneval\n")
    (tmp_path / "here" / "mine.yaml").write_text("base: ../outside.yaml\n")
    with pytest.raises(ConfigError, match=r"working directory .*/here, got .*outside.yaml"):
        Submission(preset="mine.yaml", working_dir=tmp_path / "here").environment()
    (tmp_path / "here" / "mine.yaml").write_text("base: toy_geneval\n")
    assert Submission(preset="mine.yaml", working_dir=tmp_path / "here").environment()["env_vars"]


def test_a_wrong_key_is_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match="unknown key 'grup'"):
        Submission(preset="toy_geneval", overrides=("grup.size=4",), working_dir=ROOT).environment()


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"http://127.0.0.1:{free_port()}"
    expected = rf"^the Ray cluster at {address} does not accept jobs: Failed to connect .*; check "
    with pytest.raises(ConfigError, match=expected):
        connect(address)


def test_a_token_that_is_asked_for_and_not_there_is_one_line(tmp_path: Path):
    keep = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "flowcredit", "submit", "toy_geneval", "--address", "http://127.0.0.1:1"]
    done = subprocess.run(command, env=keep, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "does not accept jobs: Token authentication is enabled" in line

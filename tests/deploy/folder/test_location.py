"""Where run folders are: never in Ray's copy of a job's working directory."""

import json
from pathlib import Path

import pytest

from deploy.folder.location import (
    default_folder,
    folder_named,
    job_id,
    job_name,
    runs_folder,
    stop_grace_s,
    stop_wait_s,
)
from deploy.presets import load_config
from protocol.errors import ConfigError, RunFolderError


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "FLOWCREDIT_RUNS", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(monkeypatch):
    facts = {"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1", "job_name": "raysubmit_1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(facts))
    monkeypatch.setenv("HOME", "/home/ray")


def test_outside_a_job_runs_are_in_the_current_folder(monkeypatch):
    assert job_id() is None
    assert runs_folder() == Path("runs")
    assert folder_named(Path("runs/mine")) == Path("runs/mine")
    assert default_folder("toy_geneval", load_config("toy_geneval")) == Path("runs/toy_geneval")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert job_id() is None


def test_in_a_job_runs_are_in_the_home_of_its_drivers_node(job):
    assert job_id() == "raysubmit_1"
    assert runs_folder() == Path("/home/ray/flowcredit/runs")
    assert folder_named(Path("runs/mine")) == folder_named(Path("mine")) == Path("/home/ray/flowcredit/runs/mine")
    assert folder_named(Path("/disk/mine")) == Path("/disk/mine")
    config = load_config("toy_geneval")
    assert default_folder("toy_geneval", config) == runs_folder() / job_name("toy_geneval", config)


def test_a_variable_names_the_folder_of_runs(job, monkeypatch):
    monkeypatch.setenv("FLOWCREDIT_RUNS", "/disk/runs")
    assert runs_folder() == Path("/disk/runs")
    assert folder_named(Path("runs/mine")) == Path("/disk/runs/mine")
    monkeypatch.setenv("FLOWCREDIT_RUNS", "~nobody_of_this_name/runs")
    with pytest.raises(ConfigError, match="cannot be resolved"):
        runs_folder()


@pytest.mark.parametrize("run", ["../mine", "runs/../../mine", "runs", "."])
def test_a_run_of_a_job_stays_in_the_folder_of_runs(job, run):
    with pytest.raises(RunFolderError, match=r"^--run must be a name or an absolute path in a Ray job, got "):
        folder_named(Path(run))


def test_the_same_command_finds_its_run_and_another_config_gets_its_own():
    def name(*overrides: str) -> str:
        return job_name("toy_geneval", load_config("toy_geneval", overrides=overrides))

    assert name() == name("iterations=99", "cluster.rollout_actors=5", "checkpoint.every=2") != name("seed=1")
    assert name().startswith("toy_geneval-") and len(name()) == len("toy_geneval-") + 8


def test_the_time_that_a_job_needs_to_stop(monkeypatch):
    assert stop_grace_s() == 3
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "90")
    assert stop_grace_s() == 90
    assert stop_wait_s(load_config("toy_geneval", overrides=["cluster.stop_within_s=59.5"])) == 180

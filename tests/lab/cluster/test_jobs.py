"""Runs as Ray jobs on several machines that share nothing but the Python installation.

Jobs are sent from a machine outside the cluster, which alone has the project.
"""

import json

import pytest

from tests.lab.faults.cluster import PASSWORD, REDIS, SECRETS, SMALL, Cluster
from tests.lab.faults.lab import HOME, until
from tests.support.pages import blocks_of
from tests.support.paths import ROOT
from tests.support.runs.scene import Story, story
from tests.support.scenes import long_scene

CLUSTER = ROOT / "docs" / "cluster.md"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_job_keeps_its_run_and_the_same_command_resumes_it(cluster: Cluster, undisturbed: Story):
    job = cluster.submit("first")
    said = job.finish()
    folder = f"{HOME}/flowcredit/runs/first"
    assert f"run       {folder} on m1\n" in said
    assert f"LoRA      {folder}/checkpoints/iteration_000008/pytorch_lora_weights.safetensors" in said
    assert f"page      flowcredit serve {folder}\nfetch     flowcredit fetch {folder}  (" in said
    assert "`ray job stop` kills this job" not in said
    cluster.require_undisturbed("first", undisturbed)
    told = json.loads((cluster.run_folder("first") / "status.json").read_text())["status"]
    assert told["job"] == job.id
    assert "continuing from" in cluster.submit("first").finish()
    cluster.require_undisturbed("first", undisturbed)
    said = cluster.flowcredit("fetch", "first", "--address", cluster.jobs)
    assert "LoRA      runs/first/checkpoints/iteration_000008/pytorch_lora_weights.safetensors" in said
    assert story(cluster.laptop.home / "project" / "runs" / "first") == undisturbed


def test_rays_own_command_keeps_its_run_too(cluster: Cluster):
    command = ["ray", "job", "submit", "--address", cluster.jobs, "--working-dir", "flowcredit"]
    waits = ["--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "180"}}']
    run = ["--", "python", "-m", "flowcredit", "train", *SMALL, "--local", "iterations=1"]
    folders = set()
    for environment in ([], waits):
        said = cluster.laptop.run([*command, *environment, *run], timeout_s=400)
        assert ("`ray job stop` kills this job after 3 s" in said) == (not environment)
        (line,) = [line for line in said.splitlines() if line.startswith("run       ")]
        folders.add(line.split()[1])
    (folder,) = folders
    assert folder.startswith(f"{HOME}/flowcredit/runs/toy_geneval-")
    assert not list(cluster.head.files.glob("tmp/ray/**/_ray_pkg_*/runs"))


def test_the_shown_command_of_ray_is_watched_scaled_and_stopped_from_another_machine_and_no_log_holds_a_secret(
    cluster: Cluster,
):
    (shown,) = [line for block in blocks_of(CLUSTER, "As a Ray job") for line in block if line.startswith("ray job")]
    typed = shown.replace("HEAD", cluster.head.name).replace("submit", "submit --no-wait", 1)
    cluster.laptop.run(["bash", "-c", f"cd flowcredit; {typed}"])
    run = cluster.run_folder("plain")

    def asked(*words: str) -> str:
        return cluster.flowcredit(*words, board=cluster.board)

    until(lambda: (run / "config.yaml").exists(), "the job has begun", seconds=300)
    until(lambda: "plain" in asked("status"), "the board shows the run", seconds=300)
    cluster.wait_for_iteration("plain", 1)
    asked("scale", "plain", "rollout", "1")
    until(lambda: len(cluster.homes("plain")) == 1, "one rollout actor is left", seconds=300)
    asked("stop", "plain")
    until(lambda: "stopped" in asked("status", "plain"), "the run is stopped", seconds=200)
    said = "".join(path.read_text() for path in cluster.head.files.glob("tmp/ray/session_2*/logs/job-driver-*.log"))
    assert f"board     redis://{cluster.head.address}:{REDIS}/0\n" in said
    cluster.require_kept(PASSWORD, *SECRETS.values())


def test_without_the_token_a_job_is_refused_in_one_line(cluster: Cluster):
    words = [
        "bash",
        "-c",
        "mv .ray/auth_token .ray/kept; cd project; python -m flowcredit submit mine.yaml --address $0",
    ]
    try:
        said = cluster.laptop.run([*words, cluster.jobs], code=2)
    finally:
        (cluster.laptop.home / ".ray" / "kept").rename(cluster.laptop.home / ".ray" / "auth_token")
    assert len(said.splitlines()) == 1, said
    assert "token" in said


@long_scene
def test_a_job_that_is_stopped_writes_a_checkpoint_and_goes_on(cluster: Cluster, undisturbed: Story):
    job = cluster.submit("stopped")
    job.wait_for_iteration(2)
    cluster.laptop.run(["ray", "job", "stop", "--address", cluster.jobs, job.id], timeout_s=200)
    said = job.finish()
    assert "stopping with a checkpoint" in said
    assert "the same command continues" in said
    cluster.submit("stopped").finish()
    cluster.require_undisturbed("stopped", undisturbed)

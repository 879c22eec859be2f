"""The main job on the shipped toy world: whole small runs on Ray and in one process give the same adapter."""

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.folder.fingerprint import library_versions
from deploy.presets import load_config
from deploy.report.runs import read_run
from deploy.tools.estimate import estimate
from flow.adapter.lora_file import read_lora
from flowcredit.code import code_digest
from learner.checkpoint import OPTIMIZER
from protocol.ground.files import ADAPTER_FILE
from tests.support.runs.metrics import untimed
from tests.support.runs.presets import small_preset
from tests.support.runs.scene import Driver
from tests.support.scenes import long_scene

pytestmark = pytest.mark.xdist_group("ray")  # all its runs are forks of one warm process
SMALL = [
    "iterations=3",
    "group.size=8",
    "group.shard=4",
    "group.per_iteration=2",
    "data.tags=[colors]",
    "evaluation.images_per_prompt=1",
    "evaluation.steps=2",
    "checkpoint.every=1",
    "cluster.learner.threads=1",  # two threads spin when other programs want the cores
]
POINTS = [
    "sampling.splits=[]",
    "completion={rule: tweedie, every: 2}",
    "credit.rule=gae",
    "credit.normalise=per_step",
]
"""Points between the steps are completed and scored, which the preset's trees leave out."""


@pytest.fixture(scope="module")
def start(gpus: float) -> Callable[..., Driver]:
    """Begin a run on the test's device."""
    where = (f"cluster.rollout.gpus={gpus}", f"cluster.learner.gpus={gpus}")
    return lambda folder, *words: Driver(Path("toy_geneval"), folder, *SMALL, *where, *words)


@pytest.fixture(scope="module")
def start_with_points(start) -> Callable[..., Driver]:
    """Begin a run on the test's device whose points are scored."""
    return lambda folder, *words: start(folder, *POINTS, *words)


def sha(folder: Path, name: str, iteration: int = 3) -> str:
    return hashlib.sha256((folder / "checkpoints" / f"iteration_{iteration:06d}" / name).read_bytes()).hexdigest()


def adapter_sha(folder: Path, iteration: int = 3) -> str:
    return sha(folder, ADAPTER_FILE, iteration)


def curve(folder: Path) -> list[dict]:
    """All metrics without wall times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [untimed(line) for line in lines]


@pytest.fixture(scope="module")
def local_run(start_with_points, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("local") / "run"
    return folder, start_with_points(folder, "--local").finish()


def test_run_leaves_its_story_behind(local_run):
    folder, said = local_run
    assert "held-out score before" in said
    assert str(folder / "checkpoints" / "iteration_000003" / ADAPTER_FILE) in said.replace("\n", "")
    assert str(folder / "gallery" / "before_after.png") in said.replace("\n", "")
    names = {path.name for path in folder.iterdir()} - {".lease"}
    assert names == {
        "config.yaml",
        "inputs.json",
        "origin.json",
        "metrics.jsonl",
        "checkpoints",
        "gallery",
        "trajectories",
        "run.log",
        "status.json",
    }
    assert [line["iteration"] for line in curve(folder)] == [0, 1, 2, 3, 3]


def test_learner_and_rollout_agree_exactly_and_the_adapter_moves(local_run):
    folder, _ = local_run
    lines = [line for line in curve(folder) if "train/loss" in line]
    assert [line["train/first_ratio_deviation"] for line in lines] == [0.0, 0.0, 0.0]
    assert [line["reward/missing"] for line in lines] == [0.0, 0.0, 0.0]
    weights = read_lora(folder / "checkpoints" / "iteration_000003", version=3)
    assert any(np.abs(array).max() > 0 for name, array in weights.arrays.items() if "lora_B" in name)


def test_the_run_counts_what_the_estimate_counts(local_run):
    folder, _ = local_run
    counts = estimate(load_config("toy_geneval", overrides=[*SMALL, *POINTS])).evaluations
    for line in (line for line in curve(folder) if "train/loss" in line):
        assert line["work/main_evaluations"] + line["work/completion_evaluations"] == counts.rollout
        assert line["work/images"] == counts.images
        assert 0 < line["work/gradient_evaluations"] <= counts.pairs
        assert line["work/images_mb"] == pytest.approx(counts.images * 32 * 32 * 3 / 1e6)
    told = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
    parts = ("sampling", "completing", "decoding", "scoring", "crediting", "fetching", "training")
    assert all(told[f"work/{part}_seconds"] > 0 for part in parts)


def test_other_seed_gives_another_adapter(start_with_points, local_run, tmp_path):
    start_with_points(tmp_path / "run", "--local", "seed=1", "iterations=1").finish()
    assert adapter_sha(tmp_path / "run", 1) != adapter_sha(local_run[0], 1)


def test_interrupted_run_stops_with_a_checkpoint_and_goes_on_to_the_same_end(start_with_points, local_run, tmp_path):
    folder = tmp_path / "run"
    driver = start_with_points(folder, "--local")
    driver.wait_for_iteration(1)
    driver.process.send_signal(signal.SIGINT)
    assert "stopping with a checkpoint" in driver.finish()
    stopped_at = max(line["iteration"] for line in curve(folder))
    assert stopped_at < 3
    assert (folder / "checkpoints" / f"iteration_{stopped_at:06d}" / "manifest.json").exists()
    assert "continuing from" in start_with_points(folder, "--local").finish()
    assert adapter_sha(folder) == adapter_sha(local_run[0])
    assert curve(folder) == curve(local_run[0])


def test_finished_run_is_not_run_again(start_with_points, local_run):
    before = adapter_sha(local_run[0])
    said = start_with_points(local_run[0], "--local").finish()
    assert "iteration 1/3" not in said
    assert "held-out score before" in said
    assert adapter_sha(local_run[0]) == before


@pytest.mark.ray
def test_run_on_ray_gives_the_same_bits_with_several_actors_and_workers(start_with_points, local_run, tmp_path):
    start_with_points(tmp_path / "run", "cluster.rollout_actors=2", "cluster.learner.workers=2").finish()
    for name in (ADAPTER_FILE, OPTIMIZER):
        assert sha(tmp_path / "run", name) == sha(local_run[0], name)
    assert curve(tmp_path / "run") == curve(local_run[0])
    told = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    actors = ["reward/geneval-0", "rollout-0", "rollout-1", *(f"learner-{k}" for k in range(2))]
    assert all(told[f"usage/{actor}/memory_gib"] > 0.1 for actor in actors)


def test_plain_diffusers_pipeline_with_the_lora_draws_the_policys_images(local_run):
    from diffusers import StableDiffusion3Pipeline

    from deploy.presets import load_config
    from flow.rollout import RolloutPolicy
    from protocol.ground.resources import resolve
    from protocol.messages import GenerateRequest, Prompt

    folder, _ = local_run
    config = load_config(folder / "config.yaml")
    policy = RolloutPolicy(config)
    weights = read_lora(folder / "checkpoints" / "iteration_000003", version=3)
    policy.receive(weights)
    texts = ["a photo of a red circle", "a photo of a blue square", "a photo of two triangles"]
    request = GenerateRequest(
        prompts=tuple(Prompt(index=i, text=text) for i, text in enumerate(texts)),
        numbers=(0, 0, 0),
        seed=5,
        steps=8,
        adapter_version=3,
        adapter_digest=weights.digest,
    )
    _, ours = policy.generate(request)

    from flow.maths.noise import normal

    pipeline = StableDiffusion3Pipeline.from_pretrained(
        resolve(config.model.path), text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(folder / "checkpoints" / "iteration_000003")
    latents = torch.stack([normal("draw", 5, i, 0, shape=(4, 8, 8)) for i in range(3)])
    theirs = pipeline(
        texts,
        latents=latents,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=config.model.max_sequence_length,
        output_type="np",
    ).images
    np.testing.assert_array_equal(ours, (theirs * 255).round().astype(np.uint8))


@long_scene
@pytest.mark.whole
@pytest.mark.ray
def test_a_forward_method_gives_the_same_bits_on_ray_and_in_one_process_and_after_a_stop(start, tmp_path):
    """Its rollouts use `old`, its evaluations the trained adapter: both reach every rollout actor."""
    words = ("method=diffusion_nft", "evaluation.adapter=trained", "learner.old={rate: 0.1, most: 0.5}")
    local, ray = tmp_path / "local", tmp_path / "ray"
    start(local, *words, "--local", "iterations=1").finish()
    start(local, *words, "--local", "iterations=2").finish()
    start(ray, *words, "iterations=2", "cluster.rollout_actors=2", "cluster.learner.workers=2").finish()
    for name in (ADAPTER_FILE, OPTIMIZER, f"old/{ADAPTER_FILE}"):
        assert sha(local, name, 2) == sha(ray, name, 2)
    assert sha(local, ADAPTER_FILE, 2) != sha(local, f"old/{ADAPTER_FILE}", 2)


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_damaged_gallery_costs_the_images_before_and_after_alone(tiny_sd3, tmp_path, iteration, cli):
    status = {"board": "off", "trajectories": 0}
    preset = small_preset(tmp_path, tiny_sd3, scorer="tests.support.rewards.dark:Dark", status=status)
    run = tmp_path / "run"
    words = ("train", str(preset), "--local", "--run", str(run))
    assert "images    " in cli.done(*words)
    gallery = run / "gallery" / f"iteration_{iteration:06d}.npz"
    gallery.write_bytes(gallery.read_bytes()[:500])
    said = cli.done(*words)
    assert "LoRA      " in said and "images    " not in said
    assert f"gallery {gallery} cannot be read" in (run / "run.log").read_text()


def test_a_resume_with_other_code_is_a_notice_and_a_condition_and_the_report_names_both(
    tiny_sd3, tmp_path, monkeypatch, cli
):
    status = {"board": "off", "trajectories": 0}
    preset = small_preset(tmp_path, tiny_sd3, scorer="tests.support.rewards.dark:Dark", status=status)
    words = ("train", str(preset), "--local", "--run", str(tmp_path / "run"))
    cli.done(*words)
    now = library_versions() | {"code": "0123456789ab", "commit": "fedcba987654, changed"}
    monkeypatch.setattr("deploy.folder.run_folder.library_versions", lambda: now)
    said = cli.done(*words, "iterations=2")
    notice = f"the run may compute differently from here on: code (there {code_digest()}, now 0123456789ab)"
    assert notice in said
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [each["holds"] for each in events if each["type"] == "SameVersions"] == [False]
    assert read_run(tmp_path / "run").code.endswith(", later 0123456789ab (commit fedcba987654, changed)")

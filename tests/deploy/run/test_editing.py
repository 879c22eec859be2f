"""A whole run of a model that edits: prompts with images of several sizes, evaluated in one batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from actors.fleet import RayFleet
from deploy.folder.read import lines_of
from deploy.monitor.progress import Progress
from deploy.run.inputs import check_inputs
from deploy.run.run import run_training
from flow.rollout import RolloutPolicy
from learner.update.lanes import Seat
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.errors import PromptError
from protocol.ground.files import ADAPTER_FILE, iteration_name, sha256_of
from protocol.messages import LearnerState
from protocol.prompts import read_prompts
from tests.support.learning.groups import draw_groups, learn, require_exact_ratios
from tests.support.runs.watched import go
from tests.support.services.local_ray import local_ray
from tests.support.worlds.tiny_models import write_kontext


@pytest.fixture
def configured(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunConfig]:
    """A config of a tiny FLUX.1-Kontext and of three prompts, each with an image."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for number, (height, width) in enumerate([(20, 20), (30, 20), (20, 20)]):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(f"{number}.png")
        lines.append({"prompt": "make it red", "image": f"{number}.png"})
    Path("edits.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    model = {"path": str(write_kontext(tmp_path / "model")), "height": 16, "width": 16, "condition_side": 16}

    def make(**more: Any) -> RunConfig:
        return tiny_config(
            **{
                "iterations": 2,
                "data": {"train": "edits.jsonl", "heldout": "edits.jsonl"},
                "rewards": {"brightness": {"scorer": "tests.support.rewards.dark:Dark"}},
                "status": {"board": "off", "trajectories": 0},
                **more,
                "model": {**model, "lora": {"rank": 4, "alpha": 8, "targets": ["attn.to_q"]}, **more.get("model", {})},
            }
        )

    return make


def test_a_run_edits_with_a_ratio_of_1_and_has_the_same_bits_with_a_cache(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    digests = []
    for name, cache in (("without", None), ("with", str(tmp_path / "cache"))):
        run = tmp_path / name
        run_training(
            configured(model={"embedding_cache": cache}), folder=run, is_local=True, progress=Progress(Console())
        )
        trained = [line for line in lines_of(run) if "train/loss" in line]
        assert [line["train/first_ratio_deviation"] for line in trained] == [0.0, 0.0]
        digests.append(sha256_of(run / "checkpoints" / iteration_name(2) / ADAPTER_FILE))
        assert "data.train images" in json.loads((run / "inputs.json").read_text())
    assert digests[0] == digests[1]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 3


def test_two_workers_learn_the_bits_of_one(configured: Callable[..., RunConfig]) -> None:
    config = configured()
    prompts = read_prompts(config.data, config.data.train)
    policy, digests = RolloutPolicy(config), []
    learners = [[Learner(config, seat=Seat(worker, count)) for worker in range(count)] for count in (1, 2)]
    first = policy.first_adapter()
    policy.receive(first)
    groups = draw_groups(policy, config, first, iteration=0, prompts=prompts)
    for workers in learners:
        for learner in workers:
            learner.restore(LearnerState(iteration=0, adapter=first, optimizer={}))
        require_exact_ratios(learn(config, groups, *workers), config)
        digests += [learner.adapter().digest for learner in workers]
    assert len(set(digests)) == 1
    assert digests[0] != first.digest


@pytest.mark.ray
@pytest.mark.whole
def test_two_actors_and_two_workers_on_ray_learn_the_same_bits(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = configured(model={"embedding_cache": str(tmp_path / "cache")})
    prompts = read_prompts(config.data, config.data.train)
    alone = go(config, tmp_path / "alone", prompts=(prompts, prompts))
    several = configured(
        model={"embedding_cache": str(tmp_path / "other")},
        cluster={"rollout_actors": 2, "learner": {"workers": 2}},
    )
    with local_ray(6):
        assert go(several, tmp_path / "ray", prompts=(prompts, prompts), make_fleet=RayFleet) == alone


def test_a_model_that_edits_needs_images_and_another_refuses_them(
    configured: Callable[..., RunConfig], tiny_sd3: Path
) -> None:
    with pytest.raises(PromptError, match=r"line 1 .*tiny_sd3, a StableDiffusion3Pipeline, makes images of text alone"):
        check_inputs(configured(model={"path": str(tiny_sd3)}), is_local=True)
    Path("edits.jsonl").write_text('{"prompt": "a", "image": "0.png"}\n{"prompt": "b"}\n')
    with pytest.raises(PromptError, match=r"line 2 .*a FluxKontextPipeline, takes 1 condition images a prompt, got 0"):
        check_inputs(configured(), is_local=True)

"""The seconds of scoring: by the table, and as `doctor --measure` measures them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from deploy.presets import load_config
from deploy.tools.estimate import Estimate, count_evaluations, count_shard, estimate
from deploy.tools.measure import assumed_tflops
from deploy.tools.planning.plan import plan_of
from deploy.tools.planning.scoring import measured_lines, scoring_of, seconds_of
from protocol.config.run import RunConfig
from rewards.scores import scored

Config = Callable[..., RunConfig]
RATE = assumed_tflops("H100")


def counted(config: RunConfig) -> Estimate:
    """The counts of SD3.5-Medium's dry run, without its memory."""

    def sigmas(steps: int) -> torch.Tensor:
        even = torch.linspace(1, 1e-3, steps)
        return torch.cat([3 * even / (1 + 2 * even), torch.zeros(1)])  # SD3.5 has a shift of 3

    shapes: Any = SimpleNamespace(latent_shape=(16, 64, 64), sigmas=sigmas, tiny_decoder=None)
    shard = count_shard(config, shapes)
    counts = count_evaluations(config, shard, forward=2.24e12, gradient=2.2, image=2.5e12, point=2.5e12)
    return Estimate(evaluations=counts, rollout={}, learner={}, trained=0, image=512 * 512 * 3)


@pytest.fixture(scope="module")
def sd35() -> Estimate:
    return counted(load_config("sd35_pickscore"))


@pytest.mark.parametrize("name", ["pickscore", "geneval", "ocr"])
def test_scoring_takes_at_most_a_tenth_of_an_iteration_of_the_sd35_presets(name: str) -> None:
    config = load_config(f"sd35_{name}")
    found = counted(config)
    assert found.evaluations.images == 1152
    iteration = plan_of(config, found, heldout=0, tflops=RATE).iteration
    for reward in config.rewards.values():
        seconds = seconds_of(config, reward, found, tflops=RATE)
        assert seconds is not None and seconds < 0.1 * iteration


def test_seconds_are_those_of_the_actors_cpus_and_of_the_gpus_that_they_share(sd35: Estimate) -> None:
    config = load_config("sd35_pickscore", overrides=["rewards.pickscore.actors=2"])
    found = replace(sd35, evaluations=replace(sd35.evaluations, images=1000))
    # 1,000 images of 3.5 ms on two CPUs, and of 0.335 TFLOP at half of 100 TFLOP/s on two GPUs
    assert seconds_of(config, config.rewards["pickscore"], found, tflops=100) == pytest.approx(1.75 + 3.35)
    for override in ("rewards.pickscore.args={model: mine}", "rewards.pickscore.gpus=0"):
        own = load_config("sd35_pickscore", overrides=[override])
        assert scoring_of(own, found, tflops=100) == {"pickscore": None}, "not in the table"


class Mean:
    """Mean brightness; black images have no score."""

    name = "mean"
    low = 0.0
    high = 255.0
    shapes: ClassVar[list[tuple[int, ...]]] = []

    def check(self, prompts) -> None:
        """Accept any prompt."""

    def score(self, images, prompts, metadata):
        self.shapes.append(images.shape)
        return scored(images.mean((1, 2, 3)))


def test_a_scorer_is_measured_on_random_images_of_the_run_s_size(tiny_config: Config, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat\na dog\n")
    rewards = {"grey": {"scorer": f"{__name__}:Mean", "batch": 4}}
    config = tiny_config(data={"train": str(tmp_path / "train.txt")}, rewards=rewards)
    found = estimate(config)
    (line,) = measured_lines(config, found)
    side = math.isqrt(found.image // 3)
    assert Mean.shapes == [(4, side, side, 3)] * 2
    assert line.startswith("reward grey: ") and line.endswith(f"in a call of 4 random images of {side} x {side}")

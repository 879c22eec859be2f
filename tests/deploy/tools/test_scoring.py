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
from deploy.tools.balance import advice
from deploy.tools.estimate import Estimate, count_evaluations, count_shard, estimate
from deploy.tools.measure import assumed_tflops
from deploy.tools.scoring import measured_lines, scoring_lines, seconds_of
from protocol.config.run import RunConfig
from rewards.scores import scored

Config = Callable[..., RunConfig]
RATE = assumed_tflops("H100")


@pytest.fixture(scope="module")
def sd35() -> Estimate:
    """The counts of `train sd35_pickscore --dry-run`, without its memory."""
    config = load_config("sd35_pickscore")

    def sigmas(steps: int) -> torch.Tensor:
        even = torch.linspace(1, 1e-3, steps)
        return torch.cat([3 * even / (1 + 2 * even), torch.zeros(1)])  # SD3.5 has a shift of 3

    shapes: Any = SimpleNamespace(latent_shape=(16, 64, 64), sigmas=sigmas, tiny_decoder=None)
    counts = count_evaluations(config, count_shard(config, shapes), forward=1.93e12, gradient=2.0)
    counts = replace(counts, decoding_flops=counts.images * 2.47e12)
    return Estimate(evaluations=counts, rollout={}, learner={}, trained=0, image=512 * 512 * 3)


def test_scoring_takes_at_most_a_tenth_of_an_iteration_of_the_sd35_presets(sd35: Estimate) -> None:
    configs = [load_config(f"sd35_{name}") for name in ("pickscore", "geneval", "ocr")]
    assert sd35.evaluations.images == 9264
    (line,) = [line for line in advice(configs[0], sd35.evaluations, tflops=RATE) if "an iteration takes" in line]
    iteration = float(line.partition("an iteration takes ")[2].split()[0])
    for config in configs:
        same = ("group", "sampling", "completion", "credit", "learner")
        assert all(getattr(config, section) == getattr(configs[0], section) for section in same)
        assert config.model == configs[0].model
        for reward in config.rewards.values():
            seconds = seconds_of(config, reward, sd35, tflops=RATE)
            assert seconds is not None and seconds < 0.1 * iteration


def test_seconds_are_those_of_the_actors_cpus_and_of_the_gpus_that_they_share(sd35: Estimate) -> None:
    config = load_config("sd35_pickscore", overrides=["rewards.pickscore.actors=2"])
    found = replace(sd35, evaluations=replace(sd35.evaluations, images=1000))
    # 1,000 images of 3.5 ms on two CPUs, and of 0.335 TFLOP at half of 100 TFLOP/s on two GPUs
    assert seconds_of(config, config.rewards["pickscore"], found, tflops=100) == pytest.approx(1.75 + 3.35)
    assert list(scoring_lines(config, found, tflops=100)) == [
        "scoring, reward pickscore: 2 reward actors need 5.1 s for 1000 images"
    ]
    for override in ("rewards.pickscore.args={model: mine}", "rewards.pickscore.gpus=0"):
        (line,) = scoring_lines(load_config("sd35_pickscore", overrides=[override]), found, tflops=100)
        assert "not in the table" in line


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

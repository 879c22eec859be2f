"""How long scoring takes: by a table for the built-in scorers with their own weights, or measured on this machine."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deploy.tools.estimate import Estimate
from flow.device import torch_threads
from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.prompts import read_prompts
from rewards.geneval.scorer import PHOTOS
from rewards.scorer import score_prompts, scorer_of

IMAGE = 512 * 512 * 3
"""Bytes of an image of the table."""
MEASURED = 16
"""Images of a call that is measured."""


@dataclass(frozen=True)
class ScoringCost:
    """What a scorer does for one image."""

    cpu_ms: float
    """Milliseconds of one CPU core for an image of 512 x 512, without the networks; they grow with the pixels."""
    tflop: float = 0.0
    """10^12 operations of its networks, by torch's count."""


CLIP_L, CLIP_H = ScoringCost(3.5, 0.162), ScoringCost(3.5, 0.335)
WORK = {
    "pickscore": CLIP_H,
    "hpsv2": CLIP_H,
    "clipscore": CLIP_L,
    "aesthetic": CLIP_L,
    "diversity": CLIP_L,
    "geneval": ScoringCost(
        10.0, 0.449
    ),  # Mask2Former at 800 pixels; colours, where a prompt asks for them, come on top
    "ocr": ScoringCost(110.0),
}
"""CPU milliseconds were measured on one core of a shared machine, operations were counted: see docs/rewards.md."""
OWN = {"model", "detector", "detector_args", "engine", "engine_args"}
"""Arguments that choose what computes the scores."""


def seconds_of(config: RunConfig, reward: RewardConfig, estimated: Estimate, *, tflops: float) -> float | None:
    """Estimate the seconds in which a reward's actors score the images of an iteration.

    Args:
        tflops: rate of a GPU with the transformer, in 10^12 operations per second; TF32 has half of it.

    Returns:
        Seconds; None for a scorer that the table does not hold, or whose networks would run on the CPU.
    """
    work = WORK.get(reward.scorer)
    gpus = config.cluster.reward.gpus if reward.gpus is None else reward.gpus
    if work is None or _own_weights(reward) or (work.tflop and not gpus):
        return None
    cpu_s = work.cpu_ms / 1e3 * estimated.image / IMAGE / reward.actors
    gpu_s = 2 * work.tflop / tflops / min(reward.actors, math.ceil(config.reserved.get("GPU", 0.0)) or 1)
    return estimated.evaluations.images * (cpu_s + gpu_s)


def scoring_of(config: RunConfig, estimated: Estimate, *, tflops: float) -> dict[str, float | None]:
    """Estimate the seconds of scoring in an iteration, by reward that trains; None where the table holds none."""
    return {
        name: seconds_of(config, reward, estimated, tflops=tflops)
        for name, reward in config.rewards.items()
        if reward.use == "train"
    }


def measured_lines(config: RunConfig, estimated: Estimate) -> Iterator[str]:
    """Measure each scorer in this process with random images of the run's size and its first prompts.

    Raises:
        InputError: a prompt file or a scorer cannot be loaded.
    """
    prompts = read_prompts(config.data, config.data.train)
    side = math.isqrt(estimated.image // 3)
    height, width = config.model.height or side, config.model.width or side
    for name, reward in config.rewards.items():
        count = config.group.size if reward.sees == "group" else min(reward.batch, MEASURED)
        asked = [prompts[0 if reward.sees == "group" else i % len(prompts)] for i in range(count)]
        images = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)
        with torch_threads(config.cluster.reward.threads):
            scorer = scorer_of(reward)
            for _ in range(2):  # the first call loads and warms up
                wall, cpu = time.perf_counter(), time.process_time()
                scores = score_prompts(scorer, images, asked)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        failed = f"; {int((~scores.valid).sum())} have no score" if not scores.valid.all() else ""
        yield (
            f"reward {name}: {1e3 * wall / count:.3g} ms an image, {1e3 * cpu / count:.3g} ms of it CPU, in a call of"
            f" {count} random images of {width} x {height}{failed}"
        )


def _own_weights(reward: RewardConfig) -> bool:
    """Tell whether the reward's arguments name other weights than the table."""
    named = {key for key in OWN & reward.args.keys() if (key, reward.args[key]) != ("detector", PHOTOS)}
    return bool(named) and reward.scorer != "hpsv2"  # which has no default

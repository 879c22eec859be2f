"""Images per second of each scorer with one and two reward actors on Ray: `python -m benchmarks.speed.rewards`."""

import asyncio
import time
from typing import Any

import numpy as np
import ray
import typer

from actors.pool.nodes import NodeFailures
from actors.rewards.pool import RewardPools
from benchmarks.local_ray import local_ray
from benchmarks.pretraining.dataset import draw_examples
from protocol.config.parse import parse_config
from protocol.config.reward import RewardConfig
from protocol.messages import Metadata, Prompt
from toyworld.world.words import caption, draw_signs

REQUEST = 32
"""Images of one request; requests are concurrent, as those of a run's groups."""


class Quiet:
    """A status sink that discards everything."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """Discard a condition."""

    def event(self, message: str, kind: str = "info") -> None:
        """Discard an event."""


def work() -> dict[str, tuple[dict[str, Any], np.ndarray, list[Prompt]]]:
    """Return, by scorer, the config of its reward, images and their prompts, which take some seconds."""
    shapes, signs = draw_examples(64, seed=5), draw_signs(64, seed=5)
    lines: list[Metadata] = list(shapes.true_lines)
    drawn = [Prompt(index=0, text=str(line["prompt"]), metadata=line) for line in lines]
    quoted = [Prompt(index=0, text=caption(word, "red", "a photo of"), metadata={}) for word in signs.words]
    detector = {"detector": "toyworld.world.detector:ShapeDetector"}
    clip = {"model": "pkg://toyworld/clip", "device": "cpu"}
    return {
        "geneval": ({"scorer": "geneval", "args": detector}, np.tile(shapes.images, (100, 1, 1, 1)), drawn * 100),
        "pickscore": ({"scorer": "pickscore", "args": clip}, np.tile(shapes.images, (50, 1, 1, 1)), drawn * 50),
        "ocr": ({"scorer": "ocr", "batch": 8}, np.tile(signs.images, (3, 1, 1, 1)), quoted * 3),
    }


def source_of(reward: dict[str, Any]) -> Any:
    """Return the reward actors of one scorer, as a run would start them."""
    tree = {
        "iterations": 1,
        "model": {"path": "unused"},
        "data": {"train": "unused", "heldout": "unused"},
        "rewards": {"reward": RewardConfig.model_validate(reward).model_dump()},
        "evaluation": {"component": "reward"},
    }
    return RewardPools(parse_config(tree), NodeFailures(within_s=60.0), Quiet())


async def score(source: Any, images: np.ndarray, prompts: list[Prompt]) -> None:
    """Score all images in concurrent requests; they are passed by reference."""
    starts = range(0, len(images), REQUEST)
    parts = [(ray.put(images[start : start + REQUEST]), prompts[start : start + REQUEST]) for start in starts]
    await asyncio.gather(*(source.score_for_training(*part) for part in parts))


async def rate(reward: dict[str, Any], images: np.ndarray, prompts: list[Prompt]) -> float:
    """Measure images per second after a warm-up."""
    source = source_of(reward)
    await source.pools["reward"].start()
    await score(source, images[:64], prompts[:64])
    began = time.perf_counter()
    await score(source, images, prompts)
    found = len(images) / (time.perf_counter() - began)
    source.pools["reward"].stop()
    return found


def main() -> None:
    """Measure the speed of reward actors, each on one thread."""
    with local_ray(2):
        for name, (reward, images, prompts) in work().items():
            one, two = (asyncio.run(rate({**reward, "actors": size}, images, prompts)) for size in (1, 2))
            typer.echo(f"{name:10} one actor {one:.1f} images/s, two {two:.1f}: {two / one:.2f} times")


if __name__ == "__main__":
    typer.run(main)

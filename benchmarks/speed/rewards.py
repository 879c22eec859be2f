"""The speed of scoring: `python -m benchmarks.speed.rewards` (`--help` lists the parts).

speed   images per second of each scorer by batch size, in this process
share   share of scoring in the CPU time of an iteration of the toy presets
objects CPU milliseconds of the detector for photographs, beside its networks
actors  images per second of each scorer by the number of reward actors on Ray
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.speed.reward_share import share
from protocol.config.parse import parse_config
from protocol.config.reward import RewardConfig
from protocol.messages import Metadata, Prompt
from rewards.scorer import build_scorer

console = Console(highlight=False, soft_wrap=True)
BATCHES = (1, 4, 16, 64)


SHAPES = {"detector": "toyworld.world.detector:ShapeDetector"}
"""Arguments of the GenEval scorer on the toy world's images."""


class Quiet:
    """A status sink that discards everything."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """Discard a condition."""

    def event(self, message: str, kind: str = "info") -> None:
        """Discard an event."""


def scorers() -> dict[str, Callable[[int], tuple[Any, np.ndarray, list[str], list[Metadata]]]]:
    """Return, by scorer, a function from a batch size to the scorer with its images, prompts and metadata."""
    from benchmarks.pretraining.dataset import draw_examples
    from toyworld.world.words import caption, draw_signs

    shapes, signs = draw_examples(64, seed=5), draw_signs(64, seed=5)
    lines: list[Metadata] = list(shapes.true_lines)
    texts = [str(line["prompt"]) for line in lines]
    quoted = [caption(word, "red", "a photo of") for word in signs.words]
    return {
        "geneval (shapes)": lambda size: (build_scorer("geneval", **SHAPES), shapes.images, texts, lines),  # noqa: ARG005
        "pickscore (toy CLIP)": lambda size: (
            build_scorer("pickscore", model="pkg://toyworld/clip", batch=size, device="cpu"),
            shapes.images,
            texts,
            lines,
        ),
        "ocr (RapidOCR)": lambda size: (build_scorer("ocr"), signs.images, quoted, lines),  # noqa: ARG005
    }


def speed(seconds: float) -> None:
    """Measure images per second of CPU time in this process on one thread, with one batch in each call.

    CPU time does not include other programs, so the figures hold on a busy machine too.
    """
    import torch

    torch.set_num_threads(1)
    for name, make in scorers().items():
        rates = []
        for size in track(BATCHES, name):
            scorer, images, texts, lines = make(size)
            scorer.score(images[:size], texts[:size], lines[:size])
            done, began = 0, time.process_time()
            while time.process_time() - began < seconds:
                start = done % len(images)
                part = slice(start, start + size)
                scorer.score(images[part], texts[part], lines[part])
                done += size
            rates.append(done / (time.process_time() - began))
        shown = ", ".join(f"{size}: {rate:.1f}" for size, rate in zip(BATCHES, rates, strict=True))
        console.print(
            f"{name:22} images per CPU second by batch {shown}; best is {max(rates) / rates[0]:.1f} times single"
        )


def objects(seconds: float) -> None:
    """Measure, on one thread, what the detector for photographs does with one image beside its networks.

    The image has 512 x 512 pixels, the detector's input 800 x 800, and the networks' outputs are random: a hundred
    queries with blobs as masks, some of which are sure of their class. The least of all rounds counts.
    """
    import torch
    from torch.nn.functional import interpolate
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    from rewards.geneval.photo_detector import instances, prepared

    torch.set_num_threads(1)
    torch.manual_seed(0)
    image = np.random.default_rng(0).integers(0, 256, (1, 512, 512, 3), np.uint8)
    processor = Mask2FormerImageProcessorPil(size={"shortest_edge": 800, "longest_edge": 1333})
    _, pixel_mask = prepared(processor, image, "cpu")
    masks = interpolate(torch.randn(1, 100, 5, 5) * 6 - 2, size=(200, 200), mode="bicubic")[0]
    work: dict[str, Callable[[], Any]] = {"resizing": lambda: prepared(processor, image, "cpu")}
    for sure in (3, 10, 100):
        classes = torch.zeros(100, 81)
        classes[torch.arange(100), torch.where(torch.arange(100) < sure, 0, 80)] = 20.0
        work[f"{sure} objects"] = partial(
            instances, classes, masks, pixel_mask=pixel_mask[0], size=(512, 512), threshold=0.3
        )
    for name, step in work.items():
        rounds, ends = [], time.monotonic() + seconds
        while len(rounds) < 3 or time.monotonic() < ends:
            began = time.process_time()
            step()
            rounds.append(time.process_time() - began)
        console.print(f"{name:12} {1e3 * min(rounds):.1f} ms of CPU an image")


def source_of(reward: dict[str, Any]) -> Any:
    """Return the reward actors of one scorer, as a run would start them."""
    from actors.pool.nodes import NodeFailures
    from actors.rewards.pool import RewardPools

    tree = {
        "iterations": 1,
        "model": {"path": "unused"},
        "data": {"train": "unused", "heldout": "unused"},
        "rewards": {"reward": RewardConfig.model_validate(reward).model_dump()},
        "evaluation": {"component": "reward"},
    }
    return RewardPools(parse_config(tree), NodeFailures(within_s=60.0), Quiet())


async def drive(
    source: Any, images: np.ndarray, texts: list[str], lines: Sequence[Metadata], *, request: int
) -> np.ndarray:
    """Score all images in concurrent requests, as the groups of a run do.

    Args:
        source: the reward actors.
        images: uint8 [B, H, W, 3]; they are passed by reference.
        texts: the prompt of each image.
        lines: the metadata of each image.
        request: images of one request.

    Returns:
        The scores [B].
    """
    import ray

    starts = range(0, len(images), request)
    prompts = [Prompt(index=0, text=text, metadata=line) for text, line in zip(texts, lines, strict=True)]
    parts = [(ray.put(images[s : s + request]), prompts[s : s + request]) for s in starts]
    answers = await asyncio.gather(*(source.score_for_training(*part) for part in parts))
    return np.concatenate([answer.values for answer in answers])


ACTED: dict[str, tuple[dict[str, Any], int]] = {
    "geneval (shapes)": ({"scorer": "geneval", "batch": 64, "args": SHAPES}, 100),
    "pickscore (toy CLIP)": ({"scorer": "pickscore", "args": {"model": "pkg://toyworld/clip", "device": "cpu"}}, 50),
    "ocr (RapidOCR)": ({"scorer": "ocr", "batch": 8}, 3),
}
"""Config of each scorer for `actors`, and how often its 64 images are scored, which takes some seconds."""


def actors() -> None:
    """Measure images per second of each scorer with one and two actors, each on one thread."""
    for name, make in scorers().items():
        reward, times = ACTED[name]
        _, images, texts, lines = make(16)
        many = np.concatenate([images] * times), texts * times, list(lines) * times
        rates = [asyncio.run(_rate({**reward, "actors": size}, many)) for size in (1, 2)]
        shown = f"one actor {rates[0]:.1f} images/s, two {rates[1]:.1f}"
        console.print(f"{name:22} {shown}: {rates[1] / rates[0]:.2f} times")


async def _rate(reward: dict[str, Any], work: tuple[np.ndarray, list[str], list[Metadata]]) -> float:
    """Measure images per second of a pool after a warm-up."""
    images, texts, lines = work
    source = source_of(reward)
    await source.pools["reward"].start()
    await drive(source, images[:64], texts[:64], lines[:64], request=16)
    began = time.perf_counter()
    await drive(source, images, texts, lines, request=32)
    rate = len(images) / (time.perf_counter() - began)
    source.pools["reward"].stop()
    return rate


def main(
    part: Annotated[
        Literal["speed", "share", "objects", "actors", "all"], typer.Argument(help="The part to measure.")
    ] = "all",
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement of `speed` and `objects`.")] = 3.0,
) -> None:
    """Measure the speed of scoring."""
    if part in ("speed", "all"):
        speed(seconds)
    if part in ("share", "all"):
        for preset in ("toy_geneval", "toy_pickscore", "toy_mix", "toy_ocr"):
            console.print(share(preset))
    if part in ("objects", "all"):
        objects(seconds)
    if part in ("actors", "all"):
        import ray

        local = {"address": "local", "num_cpus": 2, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(**local, log_to_driver=False)
        try:
            actors()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    typer.run(main)

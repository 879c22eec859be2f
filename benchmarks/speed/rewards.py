"""Speed and fault tolerance of scoring: `python -m benchmarks.speed.rewards` (`--help` lists the parts).

speed   images per second of each scorer by batch size, in this process
share   share of scoring in the CPU time of an iteration of the toy presets
objects CPU milliseconds of the detector for photographs, beside its networks
actors  images per second of each scorer by the number of reward actors on Ray
faults  throughput if one request in five fails
soak    scores of 10,000 images, each exactly once, while reward actors are killed at random
bodies  how long the reward service's event loop stands still while a thread reads a request of 60 MB
"""

import asyncio
import os
import random
import signal
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
from protocol.messages import Metadata, Prompt, Scores
from rewards.scorer import build_scorer
from rewards.scores import partly

console = Console(highlight=False, soft_wrap=True)
BATCHES = (1, 4, 16, 64)


class Numbered:
    """Scores an image by the number that its first pixel encodes; `pause_s` seconds for each image.

    `soak` and `faults` use it, since every missing, repeated or exchanged score shows. `failing` is the share of
    requests that fail.
    """

    name = "numbered"
    low = 0.0
    high = 2.0**24

    def __init__(self, *, pause_s: float = 0.001, failing: float = 0.0) -> None:
        self._pause_s, self._failing = pause_s, failing
        self._chance = random.Random(os.getpid())

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Accept any prompt."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Score B images, or raise.

        Args:
            images: uint8 [B, H, W, 3].
            prompts: not used.
            metadata: not used.

        Returns:
            B valid scores.
        """
        time.sleep(self._pause_s * len(images))
        if self._chance.random() < self._failing:
            raise ConnectionError("this request fails")
        spelled = images[:, 0, 0].astype(np.int64)
        return partly(spelled @ [1, 256, 65536], [""] * len(images))


SHAPES = {"detector": "toyworld.world.detector:ShapeDetector"}
"""Arguments of the GenEval scorer on the toy world's images."""


class Quiet:
    """A status sink that discards everything."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """Discard a condition."""

    def event(self, message: str, kind: str = "info") -> None:
        """Discard an event."""


def numbered_images(first: int, count: int) -> np.ndarray:
    """Return images [count, 4, 4, 3] whose first pixels encode the numbers from `first` on."""
    numbers = np.arange(first, first + count)
    images = np.zeros((count, 4, 4, 3), np.uint8)
    for channel in range(3):
        images[:, 0, 0, channel] = numbers >> (8 * channel) & 255
    return images


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


def source_of(reward: dict[str, Any], *, max_restarts: int = 10_000) -> Any:
    """Return the reward actors of one scorer, as a run would start them."""
    from actors.pool.nodes import NodeFailures
    from actors.rewards.pool import RewardPools

    tree = {
        "iterations": 1,
        "model": {"path": "unused"},
        "data": {"train": "unused", "heldout": "unused"},
        "rewards": {"reward": RewardConfig.model_validate(reward).model_dump()},
        "evaluation": {"component": "reward"},
        "cluster": {"max_restarts": max_restarts},
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
    parts = [(ray.put(images[s : s + request]), texts[s : s + request], lines[s : s + request]) for s in starts]
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


def faults(count: int) -> None:
    """Compare the throughput if one request in five fails with the throughput without failures."""
    images = numbered_images(0, count)
    rates = {}
    for failing in (0.0, 0.2):

        async def scenario(failing: float = failing) -> float:
            args = {"failing": failing, "pause_s": 0.002}
            source = source_of(
                {
                    "scorer": "benchmarks.speed.rewards:Numbered",
                    "args": args,
                    "actors": 2,
                    "batch": 16,
                    "tries": 12,
                    "cpus": 0.5,
                }
            )
            await source.pools["reward"].start()
            began = time.perf_counter()
            values = await drive(source, images, [""] * count, [{}] * count, request=40)
            rate = count / (time.perf_counter() - began)
            reward = source.rewards["reward"]
            source.pools["reward"].stop()
            wrong = int((values != np.arange(count)).sum())
            console.print(
                f"{failing:.0%} of requests fail: {rate:.0f} images/s, {reward.retried} tried again,"
                f" {reward.missing} missing, {wrong} wrong"
            )
            return rate

        rates[failing] = asyncio.run(scenario())
    console.print(f"if 20 % fail, the throughput is {rates[0.2] / rates[0.0]:.2f} of that without failures")


def soak(count: int, kill_every_s: float) -> None:
    """Check that every image gets its score exactly once while actors are killed at random."""

    async def scenario() -> None:
        source = source_of(
            {"scorer": "benchmarks.speed.rewards:Numbered", "actors": 3, "batch": 32, "tries": 50, "cpus": 0.3}
        )
        await source.pools["reward"].start()
        chance = random.Random(1)
        kills = 0

        async def kill() -> None:
            nonlocal kills
            while True:
                await asyncio.sleep(kill_every_s)
                if victims := reward_actor_pids():
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    kills += 1

        killer = asyncio.ensure_future(kill())
        images = numbered_images(0, count)
        began = time.perf_counter()
        values = await drive(source, images, [""] * count, [{}] * count, request=100)
        killer.cancel()
        reward = source.rewards["reward"]
        source.pools["reward"].stop()
        right = int((values == np.arange(count)).sum())
        console.print(
            f"{count} images in {time.perf_counter() - began:.0f} s, {kills} actors killed,"
            f" {reward.queue.failed_calls} calls failed, {reward.retried} images tried again: {right} right scores,"
            f" {int(np.isnan(values).sum())} missing, {count - right} wrong"
        )
        if right != count:
            raise typer.Exit(1)

    asyncio.run(scenario())


def bodies() -> None:
    """Measure the longest pause of an event loop while a thread reads large requests, honest and hostile ones."""
    import json

    import msgpack

    from protocol.errors import ContractError
    from rewards.http.wire import JSON, MOST_ITEMS, MSGPACK, Item, ScoreCall, read_message, write_message

    async def pause(body: bytes, kind: str) -> tuple[float, str]:
        longest, done = 0.0, False

        async def tick() -> None:
            nonlocal longest
            while not done:
                began = time.monotonic()
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - began)

        ticking = asyncio.ensure_future(tick())
        await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(read_message, ScoreCall, body, kind)
            answer = "read"
        except ContractError as error:
            answer = f"refused: {error}"
        done = True
        await ticking
        return longest, answer

    def wire(items: list[Any], kind: str) -> bytes:
        tree = {"scorer": "red", "items": items}
        packed: Any = json.dumps(tree).encode() if kind == JSON else msgpack.packb(tree)
        return packed

    small = {"image": "", "prompt": "", "metadata": {}}
    for kind, size, rows, lists in ((MSGPACK, 58_000, 2_000_000, 7500), (JSON, 43_500, 1_300_000, 2000)):
        full = ScoreCall(scorer="red", items=(Item(image=b"x" * size, prompt="a photo"),) * MOST_ITEMS)
        for name, body in (
            (f"{MOST_ITEMS} images", write_message(full, kind)),
            ("rows without an image", wire([small] * rows, kind)),
            ("metadata of empty maps", wire([{**small, "metadata": {"a": [[{}] * 8000] * lists}}], kind)),
        ):
            seconds, answer = asyncio.run(pause(body, kind))
            console.print(
                f"{kind:19} {name:22} {len(body) / 1e6:5.1f} MB: loop stood still for {seconds:.3f} s; {answer}"
            )


def reward_actor_pids() -> list[int]:
    """Return the process ids of the reward actors that this process has started."""
    import psutil

    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and "ray::RewardActor" in " ".join(child.cmdline())
    ]


def main(
    part: Annotated[
        Literal["speed", "share", "objects", "bodies", "actors", "faults", "soak", "all"],
        typer.Argument(help="The part to measure."),
    ] = "all",
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement of `speed` and `objects`.")] = 3.0,
    images: Annotated[int, typer.Option(help="Images of `soak`.", min=100)] = 10_000,
    kill_every_s: Annotated[float, typer.Option(help="Seconds between two kills of `soak`.")] = 1.5,
) -> None:
    """Measure the speed and fault tolerance of scoring."""
    if part in ("speed", "all"):
        speed(seconds)
    if part in ("share", "all"):
        for preset in ("toy_geneval", "toy_pickscore", "toy_mix", "toy_ocr"):
            console.print(share(preset))
    if part in ("objects", "all"):
        objects(seconds)
    if part in ("bodies", "all"):
        bodies()
    if part in ("speed", "share", "objects", "bodies"):
        return
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        if part in ("actors", "all"):
            actors()
        if part in ("faults", "all"):
            faults(2000)
        if part in ("soak", "all"):
            soak(images, kill_every_s)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    typer.run(main)

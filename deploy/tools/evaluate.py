"""Scoring held-out prompts once, in this process: the base model, a run's adapter, or both at the same noise."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from deploy.folder.gallery import write_grid
from deploy.folder.heldout import HeldoutScores, heldout_of
from deploy.folder.read import checkpoint_of, config_of, require_same
from deploy.report.paired import Difference, paired_difference
from deploy.run.inputs import check_inputs
from deploy.run.local import LocalFleet
from deploy.run.signals import run_to_end
from flow.models.folder import completed
from learner.loop.evaluate import Evaluation, evaluate
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.files import writing
from protocol.messages import Adapter, LearnerState, Prompt

BASE, ADAPTER = "base", "adapter"


@dataclass(frozen=True)
class Assessed:
    """The evaluation of one adapter."""

    name: str
    """`base` or `adapter`."""
    iteration: int
    """Of the adapter; 0 for the base model."""
    evaluation: Evaluation
    scores: HeldoutScores
    diversity: float | None
    """Mean of 1 - cosine over the pairs of a prompt's images, mean over prompts; see `Diversity`."""


class Diversity:
    """How much the images of one prompt differ: mean of 1 - cosine of CLIP's image features over their pairs.

    0 means that all images of a prompt are alike to this CLIP. Values of two CLIPs are not comparable.
    """

    def __init__(self, model: str) -> None:
        """Load a CLIP: a folder, a `pkg://` path or a hub id (ScorerError: it cannot be loaded)."""
        from rewards.clip.features import ClipFeatures

        self._clip = ClipFeatures(model)
        self._features: dict[int, np.ndarray] = {}

    def take(self, first: int, images: np.ndarray) -> None:
        """Take images uint8 [B, H, W, 3]; `first` is the number of the first one."""
        self._features |= dict(enumerate(self._clip.of_images(images), start=first))

    def settle(self, images_per_prompt: int) -> float:
        """Return the diversity of all images taken since the last call."""
        held = np.stack([self._features[number] for number in sorted(self._features)])
        self._features.clear()
        return diversity_of(held.reshape(-1, images_per_prompt, held.shape[-1]))


def diversity_of(features: np.ndarray) -> float:
    """Return the mean of 1 - cosine over pairs of a prompt's images, mean over prompts; unit features [P, N, D]."""
    count = features.shape[1]
    cosines = (np.square(features.sum(1)).sum(-1) - count) / (count * (count - 1))
    return float(1 - cosines.mean())


def assess(
    config: RunConfig,
    run: Path | None,
    *,
    iteration: int | None = None,
    has_base: bool = False,
    features: str | None = None,
) -> list[Assessed]:
    """Evaluate `config` with an adapter of a run, with the base model, or with both at the same noise.

    Args:
        config: its sections `data`, `rewards` and `evaluation` say how.
        run: the run folder; without one only the base model is evaluated.
        iteration: of the checkpoint; the newest without one.
        has_base: evaluate the base model too.
        features: a CLIP whose image features measure diversity; None leaves it out.

    Returns:
        One result, or the base model's and the adapter's.

    Raises:
        RunFolderError: `run` holds no such checkpoint, or its adapter was trained in another `model`.
        InputError: another mistake that the user can correct.
    """
    return run_to_end(assess_async(config, run, iteration=iteration, has_base=has_base, features=features))


async def assess_async(
    config: RunConfig,
    run: Path | None,
    *,
    iteration: int | None = None,
    has_base: bool = False,
    features: str | None = None,
) -> list[Assessed]:
    """Evaluate as `assess` does, without holding up the event loop.

    Args:
        config: see `assess`.
        run: see `assess`.
        iteration: see `assess`.
        has_base: see `assess`.
        features: see `assess`.

    Returns:
        See `assess`.

    Raises:
        InputError: see `assess`.
    """
    order = await asyncio.to_thread(_checked, config, run, iteration, features)
    fleet = LocalFleet(order.config)
    try:
        await fleet.start()
        adapters = [(BASE, 0, await fleet.adapter())] if has_base or order.state is None else []
        if order.state:
            await fleet.restore(order.state)
            adapter = await fleet.adapter()
            if order.state.average and order.config.evaluation.adapter == "average":
                adapter = order.state.average
            adapters.append((ADAPTER, order.state.iteration, adapter))
        return [await _one(fleet, order, each) for each in adapters]
    finally:
        fleet.stop()


@dataclass(frozen=True)
class _Order:
    """An evaluation whose inputs have been checked."""

    config: RunConfig
    heldout: Sequence[Prompt]
    state: LearnerState | None
    diversity: Diversity | None


def _checked(config: RunConfig, run: Path | None, iteration: int | None, features: str | None) -> _Order:
    config = completed(config)
    if features and config.evaluation.images_per_prompt < 2:
        raise ConfigError("diversity needs at least 2 images of a prompt, got evaluation.images_per_prompt 1: raise it")
    _, heldout = check_inputs(config, is_local=True)
    if run:
        require_same(run, config_of(run), config, section="model.", remedy="give the run's own values")
    return _Order(
        config=config,
        heldout=heldout,
        state=checkpoint_of(run, iteration)[0] if run else None,
        diversity=Diversity(features) if features else None,
    )


def differences(results: Sequence[Assessed]) -> dict[str, Difference]:
    """Return the paired difference of two results, adapter minus base, of all kinds (`all kinds`) and of each."""
    if len(results) < 2:
        return {}
    base, adapter = (each.scores for each in results)
    kinds = {"all kinds": None} | {tag: tag for tag in dict.fromkeys(base.tags)}
    found = {name: paired_difference([base], [adapter], tag=tag) for name, tag in kinds.items()}
    return {name: each for name, each in found.items() if each}


def document(results: Sequence[Assessed], features: str | None = None) -> dict[str, Any]:
    """Return everything that an evaluation found, for JSON; `features` is the CLIP behind the diversity."""
    return {
        "diversity_features": features,
        "results": [
            {
                "name": each.name,
                "iteration": each.iteration,
                "score": each.evaluation.score,
                "by_tag": dict(each.evaluation.by_tag),
                "readings": {
                    key: value if np.isfinite(value) else None for key, value in each.evaluation.readings.items()
                },
                "images": each.evaluation.images,
                "missing": each.evaluation.missing,
                "diversity": each.diversity,
                "scores": each.scores.model_dump(mode="json"),
            }
            for each in results
        ],
        "differences": {
            kind: {"value": each.value, "low": each.low, "high": each.high, "prompts": each.prompts}
            for kind, each in differences(results).items()
        },
    }


def write_images(results: Sequence[Assessed], path: Path) -> Path:
    """Draw images of some prompts, those of base and adapter side by side.

    Raises:
        RunFolderError: the PNG cannot be written.
    """
    galleries = [each.evaluation.gallery for each in results]
    cells = [
        (row[0][0].text, [image for _, image, _ in row], [reading for _, _, reading in row])
        for row in zip(*galleries, strict=True)
    ]
    with writing(path, "--grid"):
        return write_grid(path, cells, " and ".join(each.name for each in results))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


async def _one(fleet: LocalFleet, order: _Order, wanted: tuple[str, int, Adapter]) -> Assessed:
    name, iteration, adapter = wanted
    config, prompts, diversity = order.config, order.heldout, order.diversity
    settings = config.evaluation
    console = Console(stderr=True)
    await fleet.publish(adapter)
    with Progress(console=console) if console.is_terminal else nullcontext() as bar:
        task = bar.add_task(name, total=len(prompts) * settings.images_per_prompt) if bar else None

        def watch(first: int, images: np.ndarray) -> None:
            if diversity:
                diversity.take(first, images)
            if bar and task is not None:
                bar.advance(task, len(images))

        found = await evaluate(config, prompts=prompts, ports=fleet.ports, adapter=adapter, watch=watch)
    measured = diversity.settle(settings.images_per_prompt) if diversity else None
    return Assessed(name, iteration, found, heldout_of(iteration, found, settings), measured)

"""Scores held-out prompts once: with the base model, a run's adapter, or both from the same noise."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from deploy.folder.gallery import cell_of, gallery_images, write_grid
from deploy.folder.heldout import SCORE, HeldoutScores, heldout_of
from deploy.folder.paired import Difference, families_of, paired_difference, score_of
from deploy.folder.read import average_of, best_checkpoint, checkpoint_of, config_of, require_same
from deploy.folder.suites import ADAPTER, ALL_KINDS, BASE, JSON
from deploy.run.inputs import check_heldout
from deploy.tools.evaluators import evaluators
from deploy.tools.suites import SUITES
from flow.maths.hybrid import first_steps
from flow.models.completed import completed
from learner.loop.evaluate import Evaluation, evaluate
from learner.update.ema import neutral
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError
from protocol.ground.files import write_whole, writing
from protocol.messages import Adapter, Prompt


@dataclass(frozen=True)
class Assessed:
    """The evaluation of one adapter."""

    name: str
    """`base` or `adapter`."""
    iteration: int
    """Iteration of the adapter; 0 for the base model."""
    evaluation: Evaluation
    scores: HeldoutScores
    diversity: float | None
    """Diversity of the images, see `DiversityMeter`; None if it was not measured."""
    adapter_share: float | None
    """Share of the steps that the adapter takes, from the first (`flow.maths.hybrid`); None for the base model."""
    adapter_steps: int | None
    """The number of these steps."""


class DiversityMeter:
    """Diversity of the images of a prompt: mean of 1 - cosine of CLIP's image features over all pairs of images.

    0 means that this CLIP sees no difference between the images. Values of two CLIPs are not comparable.
    """

    def __init__(self, model: str) -> None:
        """Load a CLIP: a folder, a `pkg://` path or a hub id (ScorerError: it cannot be loaded)."""
        from rewards.clip.features import ClipFeatures

        self._clip = ClipFeatures(model)
        self._features: dict[int, np.ndarray] = {}

    def take(self, first: int, images: np.ndarray) -> None:
        """Take images uint8 [B, H, W, 3]; `first` is the number of the first image."""
        self._features |= dict(enumerate(self._clip.of_images(images), start=first))

    def settle(self, images_per_prompt: int) -> float:
        """Return the diversity of all images taken since the last call."""
        held = np.stack([self._features[number] for number in sorted(self._features)])
        self._features.clear()
        return diversity_of(held.reshape(-1, images_per_prompt, held.shape[-1]))


def diversity_of(features: np.ndarray) -> float:
    """Return the mean over prompts of the mean of 1 - cosine over pairs of images; unit features [P, N, D]."""
    count = features.shape[1]
    cosines = (np.square(features.sum(1)).sum(-1) - count) / (count * (count - 1))
    return float(1 - cosines.mean())


async def assess(
    config: RunConfig,
    run: Path | None,
    *,
    iteration: int | None = None,
    is_best: bool = False,
    has_base: bool = False,
    has_start: bool = False,
    adapter_share: float = 1.0,
    features: str | None = None,
    is_local: bool = False,
) -> list[Assessed]:
    """Evaluate `config` with an adapter of a run, with the base model, or with both from the same noise.

    The event loop is not blocked. Cancelling ends the actors, and the cluster if it was started for them.

    Args:
        config: config of the evaluation: sections `data`, `rewards`, `evaluation` and `cluster`.
        run: the run folder; None evaluates only the base model.
        iteration: of the checkpoint; None takes the newest, or with `is_best` the best by held-out score.
        has_base: evaluate the base model too.
        has_start: evaluate the LoRA of `model.lora.start`; then `run` is None.
        adapter_share: share of the steps that the adapter takes (`flow.maths.hybrid`).
        features: a CLIP whose image features measure diversity; None leaves it out.

    Returns:
        One result, or the base model's and the adapter's.

    Raises:
        RunFolderError: `run` holds no such checkpoint, or its adapter was trained with another `model` section.
        InputError: another mistake that the user can correct.
    """
    if is_best and (run is None or iteration is not None):
        raise ConfigError("--best takes the best checkpoint of a run: name a run, and leave --iteration out")
    if run is None and not has_start and adapter_share != 1:
        raise ConfigError("--adapter-share is the share of a run's adapter: name a run, or leave the option out")
    first = first_steps(adapter_share, config.evaluation.steps)

    def checked() -> tuple[RunConfig, list[Prompt], Adapter | None, DiversityMeter | None]:
        whole = completed(config)
        if features and whole.evaluation.images_per_prompt < 2:
            raise ConfigError(
                "diversity needs at least 2 images per prompt, got evaluation.images_per_prompt 1: raise it"
            )
        heldout = check_heldout(whole, is_local=is_local)
        adapter = None
        if run:
            require_same(run, config_of(run), whole, section="model.", remedy="give the run's own values")
            state, _ = checkpoint_of(run, best_checkpoint(run) if is_best else iteration)
            adapter = average_of(state, run) if whole.evaluation.adapter == "average" else state.adapter
        return whole, heldout, adapter, DiversityMeter(features) if features else None

    config, heldout, adapter, diversity = await asyncio.to_thread(checked)
    settings, console = config.evaluation, Console(stderr=True)
    async with evaluators(config, heldout, is_local=is_local) as fleet:
        first_one = await fleet.first_adapter()  # it may hold model.lora.start
        adapter = first_one if has_start else adapter
        adapters = {BASE: neutral(first_one)} if has_base or adapter is None else {}
        if adapter:
            adapters[ADAPTER] = adapter
        results = []
        for name, each in adapters.items():
            await fleet.ports.adapters.publish(each)
            share, taken = (adapter_share, first) if name == ADAPTER else (None, None)
            with Progress(console=console, disable=not console.is_terminal) as bar:
                task = bar.add_task(name, total=len(heldout) * settings.images_per_prompt)
                found = await evaluate(
                    config,
                    prompts=heldout,
                    ports=fleet.ports,
                    adapter=each,
                    adapter_steps=taken,
                    watch=diversity.take if diversity else None,
                    on_scored=partial(bar.advance, task),
                )
            measured = diversity.settle(settings.images_per_prompt) if diversity else None
            scores = heldout_of(each.version, found, settings)
            results.append(Assessed(name, each.version, found, scores, measured, share, taken))
        return results


def paired_differences(results: Sequence[Assessed], *, name: str = SCORE) -> dict[str, Difference]:
    """Return the paired difference of two results, adapter minus base, by kind of prompts.

    Args:
        name: of the readings.

    Returns:
        It for `all kinds`, for each family (`families_of`) and for each kind.
    """
    if len(results) < 2:
        return {}
    base, adapter = (each.scores for each in results)
    found = {kind: paired_difference([base], [adapter], tag=tag, name=name) for kind, tag in kinds_in(base).items()}
    return {name: each for name, each in found.items() if each}


def kinds_in(scores: HeldoutScores) -> dict[str, str | None]:
    """Return what has a row of its own, `all kinds` as None."""
    return {ALL_KINDS: None} | {tag: tag for tag in (*families_of(scores.tags), *dict.fromkeys(scores.tags))}


def document(results: Sequence[Assessed], features: str | None = None, suite: str | None = None) -> dict[str, Any]:
    """Return all results of an evaluation for JSON; `features` is the CLIP that measured the diversity."""
    parts = SUITES[suite].parts if suite else ()
    return {
        "suite": suite,
        "diversity_features": features,
        "results": [
            {
                "name": each.name,
                "iteration": each.iteration,
                "adapter_share": each.adapter_share,
                "adapter_steps": each.adapter_steps,
                "score": each.evaluation.score,
                "by_tag": dict(each.evaluation.by_tag),
                "by_family": {name: score_of(each.scores, name) for name in families_of(each.scores.tags)},
                "parts": {
                    part: {kind: score_of(each.scores, tag, name=part) for kind, tag in kinds_in(each.scores).items()}
                    for part in parts
                },
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
        "differences": {kind: each.model_dump() for kind, each in paired_differences(results).items()},
        "part_differences": {
            part: {kind: each.model_dump() for kind, each in paired_differences(results, name=part).items()}
            for part in parts
        },
    }


GRID = "grid.png"


def make_results_folder(out: Path) -> None:
    """Make the folder for an evaluation (RunFolderError: it cannot be made, or already holds an evaluation)."""
    for name in (JSON, GRID):
        if (out / name).exists():
            raise RunFolderError(f"--out must name a folder without an evaluation, got {out / name}: choose another")
    with writing(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)


def write_results(
    results: Sequence[Assessed], out: Path, features: str | None = None, suite: str | None = None
) -> tuple[Path, Path]:
    """Write `evaluation.json` and `grid.png`, which shows images of base and adapter side by side.

    Raises:
        RunFolderError: a file cannot be written.
    """
    galleries = [gallery_images(each.evaluation.gallery) for each in results]
    texts = [prompt.text for prompt, _, _ in results[0].evaluation.gallery]
    cells = [cell_of(text, *row) for text, row in zip(texts, zip(*galleries, strict=True), strict=True)]
    with writing(out, "--out"):
        write_whole(out / JSON, json.dumps(document(results, features, suite), indent=1))
        return out / JSON, write_grid(out / GRID, cells, " and ".join(each.name for each in results))

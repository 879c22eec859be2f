"""Score ODE images of the held-out prompts at fixed seeds; every evaluation generates them from the same noise."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from learner.loop.groups import again_if_lost
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ContractError, PromptError
from protocol.messages import Adapter, GenerateRequest, Prompt, Scores
from protocol.ports import EvaluationPorts
from protocol.prompts import check_each


@dataclass(frozen=True)
class Evaluation:
    score: float
    """Mean over the tags of `by_tag`, as GenEval defines its overall score."""
    by_tag: Mapping[str, float]
    """Mean reading of each prompt tag over its scored images; prompts without a tag have the tag `all`."""
    missing: int
    """Images without a score; the means leave them out."""
    images: int
    readings: Mapping[str, float] = field(default_factory=dict)
    """Mean of every scorer's reading over its scored images, including scorers that never train."""
    seconds: float = 0.0
    change: tuple[float, float] | None = None
    """95 % interval of the score's change since the run's first evaluation, over the held-out prompts."""
    gallery: tuple[tuple[Prompt, np.ndarray, float], ...] = field(default=(), repr=False)
    """Some prompts, the first image of each, uint8 [H, W, 3], and the mean reading of all its images (NaN: none)."""
    prompts: tuple[Prompt, ...] = field(default=(), repr=False)
    """The held-out prompts, P of them."""
    by_image: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Each image's reading by scorer and component, [P, images per prompt], NaN without one; `by_tag` is of `score`."""

    def line(self, iteration: int) -> dict[str, float]:
        change = dict(zip(("heldout_change/low", "heldout_change/high"), self.change or (), strict=False))
        return {
            "iteration": iteration,
            "evaluation/score": self.score,
            **change,
            **{f"evaluation/{tag}": value for tag, value in self.by_tag.items()},
            **{f"evaluation/reward/{name}": value for name, value in self.readings.items()},
            "evaluation/missing": self.missing,
            "seconds/evaluation": self.seconds,
        }


async def evaluate(
    config: RunConfig,
    *,
    prompts: Sequence[Prompt],
    ports: EvaluationPorts,
    adapter: Adapter,
    adapter_steps: int | None = None,
    watch: Callable[[int, np.ndarray], None] | None = None,
    on_scored: Callable[[int], object] | None = None,
) -> Evaluation:
    """Make `images_per_prompt` images of every prompt with this adapter and read `evaluation.component`.

    Args:
        config: its section `evaluation` sets the number of images, seed, steps and batch.
        adapter: an adapter that has been published, so the rollout actors hold it.
        adapter_steps: how many steps it takes, from the first; the base model takes the others. None for all steps.
        watch: called for each batch with the index of its first image, and its images, uint8 [B, H, W, 3]. The images
            of the first prompt have the first indices; batches come in any order. Without it only the images to show
            are fetched.
        on_scored: called with the number of images of each scored batch.

    Returns:
        The mean readings, and a few images to show.

    Raises:
        ConfigError: no scorer gives the wanted reading.
        ContractError: not one image of a tag has a score.
    """
    settings = config.evaluation
    wanted = [(prompt, number) for prompt in prompts for number in range(settings.images_per_prompt)]
    shown = _indices_to_show(wanted, most=settings.shown)

    async def read(start: int) -> tuple[Scores, dict[int, np.ndarray]]:
        batch = wanted[start : start + settings.batch]
        request = GenerateRequest(
            prompts=tuple(prompt for prompt, _ in batch),
            numbers=tuple(number for _, number in batch),
            seed=settings.seed,
            steps=settings.steps,
            adapter_version=adapter.version,
            adapter_digest=adapter.digest,
            size=settings.size,
            adapter_steps=adapter_steps,
        )
        receipt, handle = await ports.rollouts.generate(request)
        receipt.require_adapter_of(request)
        scores = await ports.rewards.score_for_evaluation(handle, request.prompts)
        here = [index for index in shown if start <= index < start + len(batch)]
        images = await ports.rollouts.fetch(handle) if here or watch else None
        if watch and images is not None:
            watch(start, images)
        if on_scored:
            on_scored(len(batch))
        return scores, {index: images[index - start] for index in here if images is not None}

    starts = range(0, len(wanted), settings.batch)
    parts_read = await asyncio.gather(*(again_if_lost(partial(read, start)) for start in starts))
    answers = [scores for scores, _ in parts_read]
    readings = np.concatenate([_reading(scores, settings.component) for scores in answers])
    components = _components(answers)
    images = {index: image for _, held in parts_read for index, image in held.items()}
    reasons = [reason for scores in answers for reason in scores.reasons]
    by_tag = _means([prompt for prompt, _ in wanted], readings, reasons)
    each = settings.images_per_prompt
    of_prompt = [mean_of(row) for row in readings.reshape(-1, each)]
    return Evaluation(
        score=float(np.mean(list(by_tag.values()))),
        by_tag=by_tag,
        missing=int(np.isnan(readings).sum()),
        images=len(readings),
        readings={name: mean_of(values) for name, values in components.items()},
        gallery=tuple((wanted[index][0], images[index], of_prompt[index // each]) for index in shown),
        prompts=tuple(prompts),
        by_image={
            name: values.reshape(len(prompts), each) for name, values in {"score": readings, **components}.items()
        },
    )


def tag_of(prompt: Prompt) -> str:
    """Return the tag of a prompt; `all` if it has none."""
    return str(prompt.metadata.get("tag", "all"))


def require_own_names(heldout: Sequence[Prompt]) -> None:
    """Check that the metric `evaluation/<tag>` of no held-out prompt is another number of an evaluation.

    Raises:
        PromptError: one is; the error names its line.
    """
    check_each(heldout, _require_own_name)


def _require_own_name(prompt: Prompt) -> None:
    tag = tag_of(prompt)
    if tag in ("score", "missing") or tag.startswith("reward/"):
        raise PromptError(
            "the tag of a held-out prompt must not be score or missing, nor begin with reward/, since evaluation/<tag>"
            f" would be another number of an evaluation, got {tag!r}: rename it"
        )


def _indices_to_show(wanted: Sequence[tuple[Prompt, int]], *, most: int) -> list[int]:
    """Choose the first image of at most `most` prompts, the first ones of each tag, equally many of every tag."""
    of_tag: dict[str, int] = {}
    ranked = []
    for index, (prompt, number) in enumerate(wanted):
        if number == 0:
            rank = of_tag[tag_of(prompt)] = of_tag.get(tag_of(prompt), -1) + 1
            ranked.append((rank, index))
    return sorted(index for _, index in sorted(ranked)[:most])


def _reading(scores: Scores, component: str) -> np.ndarray:
    if component == "reward":
        return np.where(scores.valid, scores.values, np.nan)
    if component not in scores.components:
        own = scores.components.get(component.partition("/")[0])  # a scorer that failed has no further readings
        if not scores.valid.any() or (own is not None and np.isnan(own).all()):
            return np.full(len(scores.reasons), np.nan)
        raise ConfigError(
            f"evaluation.component must be one of {['reward', *sorted(scores.components)]}, got {component!r}"
        )
    return scores.components[component]


def _components(answers: Sequence[Scores]) -> dict[str, np.ndarray]:
    """Join the readings of every scorer and component; NaN where an answer lacks one."""
    names = dict.fromkeys(name for scores in answers for name in scores.components)
    lacking = [np.full(len(scores.reasons), np.nan, np.float32) for scores in answers]
    return {
        name: np.concatenate([scores.components.get(name, none) for scores, none in zip(answers, lacking, strict=True)])
        for name in names
    }


def mean_of(values: np.ndarray) -> float:
    """Return the mean of the readings that exist; NaN if there are none."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _means(prompts: Sequence[Prompt], readings: np.ndarray, reasons: Sequence[str]) -> dict[str, float]:
    tags = [tag_of(prompt) for prompt in prompts]
    by_tag = {}
    for tag in dict.fromkeys(tags):
        rows = [index for index, other in enumerate(tags) if other == tag]
        values = readings[rows]
        if np.isnan(values).all():
            reason = next((reasons[row] for row in rows if reasons[row]), "the scorer gives no such component")
            raise ContractError(
                f"an evaluation needs a score for every kind of prompt, got none for the {len(rows)} images of {tag!r};"
                f" the first: {reason}"
            )
        by_tag[tag] = float(np.nanmean(values))
    return by_tag

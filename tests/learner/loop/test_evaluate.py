"""Means by tag over fixed images, from sources that answer with known numbers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from learner.loop.evaluate import Evaluation, evaluate
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ContractError
from protocol.messages import Adapter, GenerateRequest, Prompt, Receipt, Scores
from protocol.ports import Ports
from rewards.scores import mix_observed, scored

Config = Callable[..., RunConfig]

PROMPTS = (
    Prompt(index=0, text="0.2", metadata={"tag": "colors"}),
    Prompt(index=1, text="0.4", metadata={"tag": "colors"}),
    Prompt(index=2, text="0.6", metadata={"tag": "colors"}),
    Prompt(index=3, text="0.9", metadata={"tag": "counting"}),
)


class PaintedSource:
    """Draws every image in the brightness `16 * prompt index + number`; the receipt is honest unless told."""

    def __init__(self, digest: str = "abc") -> None:
        self.requests: list[GenerateRequest] = []
        self._digest = digest

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, np.ndarray]:
        self.requests.append(request)
        levels = [16 * prompt.index + number for prompt, number in zip(request.prompts, request.numbers, strict=True)]
        images = np.stack([np.full((2, 2, 3), level, np.uint8) for level in levels])
        return Receipt(adapter_version=request.adapter_version, adapter_digest=self._digest, images=len(images)), images

    async def fetch(self, images: np.ndarray) -> np.ndarray:
        return images


class ReadingScorer:
    """A prompt's score is the number that it spells, 0.05 more for odd images; `missing` levels have none."""

    def __init__(self, missing: Sequence[int] = ()) -> None:
        self._missing = missing

    async def score_for_evaluation(self, images: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        levels = images[:, 0, 0, 0]
        values = np.array([float(prompt.text) for prompt in prompts], np.float32) + 0.05 * (levels % 2)
        valid = ~np.isin(levels, self._missing)
        values = np.where(valid, values, np.nan).astype(np.float32)
        return Scores(
            values=values,
            valid=valid,
            reasons=tuple("" if ok else "blurred" for ok in valid),
            components={"brightness": (2 * values).astype(np.float32)},
        )


def assess(config: RunConfig, source: Any = None, scorer: Any = None, **options: Any) -> Evaluation:
    ports = Ports(rollouts=source or PaintedSource(), rewards=scorer or ReadingScorer(), learner=None, adapters=None)  # type: ignore[arg-type]
    return asyncio.run(
        evaluate(config, prompts=PROMPTS, ports=ports, adapter=Adapter(version=5, arrays={}, digest="abc"), **options)
    )


def test_the_score_is_the_mean_of_the_tags_means(tiny_config: Config) -> None:
    result = assess(tiny_config())
    assert result.by_tag == {"colors": pytest.approx(0.425), "counting": pytest.approx(0.925)}
    assert result.score == pytest.approx((0.425 + 0.925) / 2)
    assert (result.images, result.missing) == (8, 0)


def test_a_component_can_be_the_reading(tiny_config: Config) -> None:
    assert assess(tiny_config(evaluation={"component": "brightness"})).by_tag["counting"] == pytest.approx(1.85)


def test_an_unknown_component_is_refused_with_the_known_ones(tiny_config: Config) -> None:
    with pytest.raises(ConfigError, match=r"\['reward', 'brightness'\], got 'brightness/strict'"):
        assess(tiny_config(evaluation={"component": "brightness/strict"}))


def test_missing_scores_are_counted_and_left_out_of_the_means(tiny_config: Config) -> None:
    result = assess(tiny_config(), scorer=ReadingScorer(missing=(0, 1, 48)))
    assert result.by_tag == {"colors": pytest.approx((0.4 + 0.45 + 0.6 + 0.65) / 4), "counting": pytest.approx(0.95)}
    assert result.missing == 3
    assert np.isnan(result.gallery[0][2])


class FailingJudge(ReadingScorer):
    """Beside the reward a scorer `judge` that never trains, with a reading of its own; it fails for the first batch."""

    async def score_for_evaluation(self, images: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        reward = await super().score_for_evaluation(images, prompts)
        fails = images[0, 0, 0, 0] == 0
        judge = Scores.missing(len(images), "failed") if fails else scored(reward.values, {"strict": reward.values})
        return mix_observed({"brightness": reward, "judge": judge}, {"brightness": 1.0})


def test_a_batch_for_which_the_reported_scorer_failed_is_missing(tiny_config: Config) -> None:
    rewards = {"brightness": {"scorer": "geneval"}, "judge": {"scorer": "geneval", "use": "evaluate"}}
    config = tiny_config(rewards=rewards, evaluation={"component": "judge/strict"})
    result = assess(config, scorer=FailingJudge())
    assert result.missing == 3
    assert result.by_tag == {"colors": pytest.approx((0.45 + 0.6 + 0.65) / 3), "counting": pytest.approx(0.925)}
    with pytest.raises(ConfigError, match="got 'judge/loose'"):
        assess(tiny_config(rewards=rewards, evaluation={"component": "judge/loose"}), scorer=FailingJudge())


def test_a_tag_without_any_score_stops_the_evaluation(tiny_config: Config) -> None:
    with pytest.raises(ContractError, match="'counting'; the first: blurred"):
        assess(tiny_config(), scorer=ReadingScorer(missing=(48, 49)))


def test_requests_have_the_configured_batch_seed_and_steps(tiny_config: Config) -> None:
    source = PaintedSource()
    assess(tiny_config(evaluation={"seed": 77, "steps": 6}), source=source)
    assert [len(request.prompts) for request in source.requests] == [3, 3, 2]
    drawn = [(p.index, n) for r in source.requests for p, n in zip(r.prompts, r.numbers, strict=True)]
    assert drawn == [(index, number) for index in range(4) for number in range(2)]
    assert {(r.seed, r.steps, r.adapter_version, r.adapter_digest) for r in source.requests} == {(77, 6, 5, "abc")}
    assert {(r.size, r.adapter_steps) for r in source.requests} == {(None, None)}


def test_requests_say_how_many_steps_the_adapter_takes(tiny_config: Config) -> None:
    source = PaintedSource()
    assess(tiny_config(evaluation={"steps": 6}), source=source, adapter_steps=4)
    assert {(r.steps, r.adapter_steps) for r in source.requests} == {(6, 4)}


def test_requests_have_the_evaluation_s_own_size(tiny_config: Config) -> None:
    source = PaintedSource()
    assess(tiny_config(evaluation={"height": 12, "width": 8}), source=source)
    assert {r.size for r in source.requests} == {(12, 8)}
    with pytest.raises(
        ConfigError, match="evaluation.height and evaluation.width must be given together, got 12 and N"
    ):
        tiny_config(evaluation={"height": 12})


def test_the_gallery_shows_the_first_image_of_equally_many_prompts_of_each_tag(tiny_config: Config) -> None:
    two = assess(tiny_config(evaluation={"shown": 2})).gallery
    assert [(prompt.index, int(image[0, 0, 0])) for prompt, image, _ in two] == [(0, 0), (3, 48)]
    gallery = assess(tiny_config()).gallery
    assert [(prompt.index, int(image[0, 0, 0])) for prompt, image, _ in gallery] == [
        (0, 0),
        (1, 16),
        (2, 32),
        (3, 48),
    ]
    scores = [score for _, _, score in gallery]
    assert scores == pytest.approx([0.225, 0.425, 0.625, 0.925]), "the mean of a prompt's two images"


def test_images_of_other_weights_are_refused(tiny_config: Config) -> None:
    with pytest.raises(ContractError, match="images must come from adapter version 5"):
        assess(tiny_config(), source=PaintedSource(digest="other"))


def test_prompts_without_a_tag_stand_under_all(tiny_config: Config) -> None:
    ports = Ports(rollouts=PaintedSource(), rewards=ReadingScorer(), learner=None, adapters=None)  # type: ignore[arg-type]
    plain = [Prompt(index=0, text="0.5")]
    result = asyncio.run(
        evaluate(tiny_config(), prompts=plain, ports=ports, adapter=Adapter(version=0, arrays={}, digest="abc"))
    )
    assert result.by_tag == {"all": pytest.approx(0.525)}

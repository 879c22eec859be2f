"""Operations on `Scores`: make, split and join them, mix several scorers', and apply the failure policy.

return scored([0.2, 0.9])
return partly([0.2, nan], ["", "the engine failed"])
reward = mix({"ocr": a, "pickscore": b}, {"ocr": 0.8, "pickscore": 0.2})
shown = mix_observed({"ocr": a, "aesthetic": c}, {"ocr": 1.0})        # aesthetic is reported, but not in the reward
"""

import logging
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.errors import ContractError, RewardError
from protocol.messages import Prompt, Scores
from protocol.ports import ImagesHandle, RewardSource
from protocol.sink import StatusSink

log = logging.getLogger(__name__)

Numbers = Sequence[float] | np.ndarray


def scored(values: Numbers, components: Mapping[str, Numbers] | None = None) -> Scores:
    """Make the scores of B images that are all valid; `components` are further numbers [B] by name."""
    return partly(values, [""] * len(values), components)


def partly(values: Numbers, reasons: Sequence[str], components: Mapping[str, Numbers] | None = None) -> Scores:
    """Make the scores of B images, some of which may have none.

    Args:
        values: a number for each image; the number of an image without a score does not matter.
        reasons: why an image has no score; empty if it has one.
        components: further numbers [B] by name.

    Returns:
        The scores; all numbers of an image without a score are NaN.
    """
    valid = np.array([not reason for reason in reasons], bool)

    def kept(numbers: Numbers) -> np.ndarray:
        return np.where(valid, np.asarray(numbers, np.float32), np.float32("nan"))

    return Scores(
        values=kept(values),
        valid=valid,
        reasons=tuple(reasons),
        components={name: kept(numbers) for name, numbers in (components or {}).items()},
    )


def split(scores: Scores, sizes: Sequence[int]) -> list[Scores]:
    """Split scores among consecutive requests, whose sizes add up to all images."""
    return [_rows_of(scores, range(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _rows_of(scores: Scores, rows: Sequence[int]) -> Scores:
    size = len(scores.reasons)
    if rows == range(size):
        return scores
    index = np.asarray(rows, np.int64)
    return Scores(
        values=scores.values[index],
        valid=scores.valid[index],
        reasons=tuple(scores.reasons[row] for row in index),
        components={name: numbers[index] for name, numbers in scores.components.items()},
        voids_group=scores.voids_group,
        seconds=scores.seconds * len(index) / max(1, size),
    )


def group_ranges(reward: RewardConfig, images: int, size: int | None) -> list[range]:
    """Cut a request into the groups that a scorer compares; one that sees single images gets all of them at once.

    Args:
        images: B, the number of images of the request.
        size: images of one group; None if the request is one group.
    """
    step = size if size and reward.sees == "group" else images
    return [range(start, start + step) for start in range(0, images, step)]


def patched(scores: Scores, rows: Sequence[int], answer: Scores) -> Scores:
    """Replace the scores of some images.

    Args:
        scores: scores of B images.
        answer: the replacements, one for each of `rows`.
    """
    order = np.arange(len(scores.reasons))
    # Joined with the answer, its rows lie behind the scores.
    order[np.asarray(rows)] = len(order) + np.arange(len(rows))
    return replace(_rows_of(joined([scores, answer]), order.tolist()), seconds=scores.seconds + answer.seconds)


def joined(parts: Sequence[Scores]) -> Scores:
    """Concatenate the scores of consecutive images; a component that a part lacks is NaN there."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.components)
    return Scores(
        values=np.concatenate([part.values for part in parts]),
        valid=np.concatenate([part.valid for part in parts]),
        reasons=tuple(reason for part in parts for reason in part.reasons),
        components={
            name: np.concatenate(
                [part.components.get(name, np.full(len(part.reasons), np.nan, np.float32)) for part in parts]
            )
            for name in names
        },
        voids_group=any(part.voids_group for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def mix(scores: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """Compute the weighted sum of several scorers' scores of the same B images: value_b = sum_s weights[s] values[s]_b.

    An image is valid only if all of its scores are; otherwise its value is NaN, and its reason joins the reasons of all
    failed scorers by "; ". The components are each scorer's value under its name, and its components under
    `<scorer>/<component>`. Raw scores are summed without standardisation (Flow-GRPO's multi_score). If the scores of
    one scorer void the group, so does the mixture.

    Raises:
        ContractError: there are no scores, the weights have other names, or the scores have different lengths.
    """
    if not scores or set(scores) != set(weights):
        raise ContractError(f"weights must name the scorers {sorted(scores)}, got {sorted(weights)}")
    _require_one_length(scores)
    valid = np.logical_and.reduce([item.valid for item in scores.values()])
    total = np.sum([weights[name] * item.values.astype(np.float64) for name, item in scores.items()], axis=0)
    readings = _readings(scores)
    reasons = zip(*(item.reasons for item in scores.values()), strict=True)
    return Scores(
        values=_where_valid(valid, total),
        valid=valid,
        reasons=("",) * len(valid) if valid.all() else tuple("; ".join(filter(None, each)) for each in reasons),
        components={name: _where_valid(valid, reading) for name, reading in readings.items()},
        voids_group=any(item.voids_group for item in scores.values()),
        seconds=sum(item.seconds for item in scores.values()),
    )


def mix_observed(scores: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """Mix the scores that `weights` names, and add the scores of all other scorers as components.

    The others change neither values nor reasons; their components are NaN where they have no score.

    Raises:
        ContractError: a score that `weights` names is missing, or the scores have different lengths.
    """
    _require_one_length(scores)
    reward = mix({name: item for name, item in scores.items() if name in weights}, weights)
    observed = {name: item for name, item in scores.items() if name not in weights}
    return replace(reward, components={**reward.components, **_readings(observed)})


def _readings(scores: Mapping[str, Scores]) -> dict[str, np.ndarray]:
    readings = {name: item.values for name, item in scores.items()}
    for name, item in scores.items():
        readings |= {f"{name}/{part}": component for part, component in item.components.items()}
    return readings


def _require_one_length(scores: Mapping[str, Scores]) -> None:
    sizes = {name: len(item.reasons) for name, item in scores.items()}
    if len(set(sizes.values())) > 1:
        raise ContractError(f"scores of one mixture must have one length, got {sizes}")


def _where_valid(valid: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.where(valid, numbers, np.nan).astype(np.float32)


class Mixture(RewardSource):
    """A reward source that mixes the scores of a run's scorers; a subclass calls them."""

    _config: RunConfig

    async def score_for_training(self, images: ImagesHandle, prompts: Sequence[Prompt]) -> Scores:
        answers = await self._scores_by_name(self._config.reward_weights, images, prompts, None)
        return mix(answers, self._config.reward_weights)

    async def score_for_evaluation(self, images: ImagesHandle, prompts: Sequence[Prompt]) -> Scores:
        """Mix the scores that train, and add the readings of the scorers that only evaluate."""
        count = self._config.evaluation.images_per_prompt
        answers = await self._scores_by_name(self._config.evaluation_rewards, images, prompts, count)
        return mix_observed(answers, self._config.evaluated_weights)

    @abstractmethod
    async def _scores_by_name(
        self,
        names: Collection[str],
        images: ImagesHandle,
        prompts: Sequence[Prompt],
        group: int | None,
    ) -> dict[str, Scores]:
        """Return each scorer's scores of B images; `group` images are one group, None: all of them."""


def settle(name: str, config: RewardConfig, scores: Scores) -> Scores:
    """Apply a reward's failure policy to scores after all tries. An image without a score never gets 0.

    `missing` masks the gains that need the image's score, `drop_group` drops the scores of its whole group, and `fail`
    ends the run. Under `pause`, an image that fails although the scorer works for others is treated as `missing`.

    Args:
        config: its config with the policy `on_failure`.

    Returns:
        The scores; under `drop_group` they void their group.

    Raises:
        RewardError: a score is missing and the policy is `fail`.
    """
    if scores.valid.all():
        return scores
    count = int((~scores.valid).sum())
    reason = next(filter(None, scores.reasons))
    if config.on_failure == "fail":
        tries = "one try" if config.tries == 1 else f"{config.tries} tries"
        raise RewardError(
            f"reward {name} has no score for {count} of {len(scores.reasons)} images after {tries}: {reason};"
            f" fix the scorer, or set rewards.{name}.on_failure to missing, drop_group or pause"
        )
    log.warning("reward %s: %d of %d images without a score: %s", name, count, len(scores.reasons), reason)
    return replace(scores, voids_group=config.on_failure == "drop_group")


HEALED = 500
"""Images in a row with a score after which the condition holds again."""


class Tally:
    """Counts one reward's missing scores and reports the first reason in a condition, `ScoresComplete/<reward>`."""

    def __init__(self, name: str, sink: StatusSink) -> None:
        self._name, self._sink = name, sink
        self._images = self._missing = self._good = 0
        self._first = ""

    def add(self, scores: Scores) -> None:
        """Count these scores after all tries."""
        missing = int((~scores.valid).sum())
        self._images += len(scores.reasons)
        self._missing += missing
        self._good = 0 if missing else self._good + len(scores.reasons)
        if missing:
            self._first = self._first or next(filter(None, scores.reasons))
            self._tell("Missing", f"reward {self._name} has no score for {self._missing} of {self._images} images")
        elif self._first and self._good >= HEALED:
            self._tell("Complete", f"reward {self._name} scores again; {self._missing} images had no score", holds=True)
            self._first = ""

    def _tell(self, reason: str, message: str, *, holds: bool = False) -> None:
        self._sink.condition(f"ScoresComplete/{self._name}", holds, reason, f"{message}; the first: {self._first}")

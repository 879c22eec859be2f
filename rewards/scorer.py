"""The scorer contract, the wrapper that enforces it, and the built-in scorers by name.

check_prompts("ocr", {"min_side": 192}, prompts)      # once, before the run starts
scorer = build_scorer("ocr", min_side=192)            # or "my_package.my_module:MyScorer"
scores = scorer.score(images, texts, metadata)        # images uint8 [B, H, W, 3]
scores = score_prompts(scorer, images, prompts)       # the same, with the condition images of prompts that edit
"""

import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from traceback import format_exception
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np

from protocol.config.reward import RewardConfig
from protocol.errors import ContractError, PromptError, ScorerError, breaks_gpu, line_in, named_line, suggest
from protocol.ground.condition_images import read_condition
from protocol.ground.import_path import find_either, foreign_module, is_path
from protocol.messages import ConditionImage, Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards import loading
from rewards.function import scorer_class
from rewards.loading import build_from_path, foreign_errors, load_class
from rewards.scores import joined, split

logger = logging.getLogger(__name__)

ConditionInput = ConditionImage | np.ndarray
"""A condition image: its file, or its pixels, uint8 [H, W, 3]."""


class Scorer(Protocol):
    """Scores images. Each reward actor constructs it once; heavy imports belong in the constructor.

    A plain function is a scorer too: `rewards.function`.

    A static method `ready(**args)` is optional: with the constructor's arguments it raises ScorerError before a run if
    weights or a server are missing, and loads nothing. It runs in the run's process, but with a given cluster or a
    `runtime_env` on a node of the reward's actors.

    `components = ("strict",)`, a class attribute, names what else it reports, for `evaluation.component`.

    An image's score may depend only on the image, its prompt and its metadata. Reward actors join and split requests,
    and a run's result must not depend on how they do it. A scorer whose attribute `sees` is "group" gets all finished
    images of one group in each call and no others, in the order of members, and may compare them.

    A scorer whose `score` has a parameter `conditions` gets the condition images too: for each image a list of uint8
    [H, W, 3], read-only. If the parameter has no default, a prompt without condition images is refused before a run.
    A reward actor reads each file once a call, by path and sha256; an image whose file cannot be read has no score.

    Arguments of the built-in scorers mean the same in all of them: `device` is a torch device, by default the GPU if
    there is one; `batch` is the number of images of one forward; `parallel` bounds the requests in progress;
    `timeout_s`, `tries`, `deadline_s` and `token_env` are `HttpCaller`'s.
    """

    name: str
    """A short name for messages."""
    low: float
    """Least value of a valid score; -inf if there is no bound."""
    high: float
    """Largest value of a valid score; +inf if there is no bound."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check before a run starts that all prompts can be scored.

        If this is a static method, it is called without constructing the scorer, so that only actors load its weights.

        Raises:
            InputError: a prompt cannot be scored; the error names its line.
        """
        ...

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Score B images.

        An image that cannot be scored gets NaN, `valid` false and a reason; it never gets 0. If this method raises, it
        is called again for parts of the batch, and an image at which it still raises has no score.

        Args:
            images: uint8 [B, H, W, 3], read-only.

        Returns:
            B scores within [low, high].
        """
        ...


class Registered(NamedTuple):
    """A scorer that has a short name."""

    path: str
    """Import path `package.module:Class`."""
    extra: str | None = None
    """Optional dependency group that installs its libraries; None if the base installation holds them."""


SCORERS: dict[str, Registered] = {
    "geneval": Registered("rewards.geneval.scorer:GenEval"),
    "pickscore": Registered("rewards.clip.pickscore:PickScore"),
    "ocr": Registered("rewards.ocr.scorer:Ocr", "ocr"),
    "clipscore": Registered("rewards.clip.scores:ClipScore"),
    "hpsv2": Registered("rewards.clip.scores:HPSv2"),
    "imagereward": Registered("rewards.preference.image_reward:ImageReward"),
    "hpsv3": Registered("rewards.preference.hpsv3:HPSv3"),
    "diversity": Registered("rewards.clip.scores:Diversity"),
    "aesthetic": Registered("rewards.clip.scores:Aesthetic"),
    "remote": Registered("rewards.http.remote:RemoteScorer"),
    "flow_grpo": Registered("rewards.http.flow_grpo:FlowGrpoServer"),
    "vlm_judge": Registered("rewards.http.vlm_judge:VlmJudge"),
    "soft_tifa": Registered("rewards.questions.scorers:SoftTifa"),
    "dpg_questions": Registered("rewards.questions.scorers:DpgQuestions"),
    "win_rate": Registered("rewards.win_rate:WinRate"),
    "edit_judge": Registered("rewards.editing.judge:EditJudge"),
    "imgedit_judge": Registered("rewards.editing.judge:ImgEditJudge"),
    "consistency": Registered("rewards.editing.consistency:Consistency"),
    "masked_psnr": Registered("rewards.editing.consistency:MaskedPsnr"),
    "edit": Registered("rewards.editing.edit:EditScorer"),
}
"""The built-in scorers by short name."""


def build_scorer(spec: str, /, **args: Any) -> "CheckedScorer":
    """Construct a scorer and wrap it in `CheckedScorer`.

    Args:
        spec: a short name of `SCORERS`, or an import path (`protocol.ground.import_path`).
        args: keyword arguments of the scorer's constructor.

    Raises:
        ScorerError: unknown name, wrong path, missing library, wrong arguments, or a class that is not a scorer.
    """
    path, extra = _registered(spec)
    return CheckedScorer(build_from_path(path, args=args, extra=extra, find=_class_at))


def scorer_of(reward: RewardConfig) -> "CheckedScorer":
    """Construct the scorer of a reward.

    Raises:
        ScorerError: see `build_scorer`; or it declares another `sees` than the config.
    """
    scorer = build_scorer(reward.scorer, **reward.args)
    if scorer.sees != reward.sees:
        raise ScorerError(
            f"sees of scorer {reward.scorer} must be what it declares, {scorer.sees!r}, got {reward.sees!r}: set"
            f" rewards.NAME.sees={scorer.sees}"
        )
    return scorer


def check_prompts(spec: str, args: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    """Check that a scorer can score these prompts; it is constructed only if its `check` is not a static method.

    `spec` and `args` are as in `build_scorer`.

    Raises:
        ScorerError: see `build_scorer`; or its `check` raises something else.
        InputError: a prompt cannot be scored.
    """
    path, extra = _registered(spec)
    cls = load_class(path, args=args, extra=extra, find=_class_at)
    if _conditions_of(getattr(cls, "score", None)) == "required":
        _require_conditions(path, prompts)
    is_static = isinstance(inspect.getattr_static(cls, "check", None), staticmethod)
    checker = cls if is_static else build_scorer(spec, **args)
    with foreign_errors(f"{path} cannot check the prompts", path, extra):
        checker.check(prompts)


def require_ready(spec: str, args: Mapping[str, Any]) -> None:
    """Check that a scorer's libraries, weights and servers exist; no weights are loaded.

    Raises:
        ScorerError: one is missing; or see `build_scorer`.
    """
    path, extra = _registered(spec)
    loading.require_class_ready(path, args, extra, find=_class_at)


def components_of(spec: str, args: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the components that a scorer's class declares as `components`; None if it declares none."""
    path, extra = _registered(spec)
    return getattr(load_class(path, args=args, extra=extra, find=_class_at), "components", None)


def _class_at(path: str) -> type:
    found = find_either(path)
    return found if isinstance(found, type) else scorer_class(found)


def _registered(spec: str) -> Registered:
    if not is_path(spec) and spec not in SCORERS:
        raise ScorerError(
            f"a scorer must be a known name, folder/file.py:name or package.module:name, got {spec!r}:"
            f" {suggest(spec, SCORERS)}"
        )
    return SCORERS.get(spec, Registered(spec))


class CheckedScorer:
    """Wraps a scorer and checks every request and every answer against the contract.

    It is a `Scorer` itself, and keeps no state between calls, except for its log: each kind of exception is logged with
    its traceback once, and `failure` is the newest of these tracebacks.
    """

    def __init__(self, scorer: Scorer) -> None:
        """Raise ScorerError if `scorer` lacks a part of the contract."""
        _check_scorer(scorer)
        self._scorer = scorer
        self.name: str = scorer.name
        self.low: float = scorer.low
        self.high: float = scorer.high
        self.sees: Literal["image", "group"] = getattr(scorer, "sees", "image")
        wanted = _conditions_of(scorer.score)
        self.takes_conditions: bool = getattr(scorer, "takes_conditions", wanted != "none")
        """Whether it gets condition images."""
        self._needs_conditions = wanted == "required"
        self.failure = ""
        """Traceback of the newest kind of exception that it raised."""
        self._failures: Counter[str] = Counter()
        self._file = foreign_module(type(scorer).__module__)
        self.is_replaceable = False
        """Whether to raise what breaks the process's GPU, since another process takes over; else it costs a score."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        if self._needs_conditions:
            _require_conditions(self.name, prompts)
        self._scorer.check(prompts)

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[ConditionInput]] | None = None,
    ) -> Scores:
        """Score B images; an image at which the scorer raises has no score, with the exception as reason.

        Args:
            images: uint8 [B, H, W, 3].
            conditions: each image's condition images, read only if the scorer gets them; None if no image has any.

        Raises:
            ContractError: request or answer break the contract; the error names the scorer, the rule and the value.
        """
        shown: Sequence[Sequence[ConditionInput]] = [()] * len(images) if conditions is None else conditions
        self._check_request(images, prompts, metadata, shown)
        read_only = images.view()
        read_only.flags.writeable = False
        began = time.perf_counter()
        scores, error = self._scored_around_failures(read_only, prompts, metadata, shown)
        if error is not None:
            self._log(error, missing=int((~scores.valid).sum()), images=len(images))
        return replace(scores, seconds=time.perf_counter() - began)

    def _log(self, error: BaseException, *, missing: int, images: int) -> None:
        """Log an exception with its traceback, but one of the same type at the same line only with its number."""
        kind = type(error).__name__ + line_in(error, self._file)
        self._failures[kind] += 1
        said = f"scorer {self.name} raised {named_line(error, self._file)}: {missing} of {images} images missing"
        if self._failures[kind] > 1:
            logger.info("%s (number %d of its kind)", said, self._failures[kind])
            return
        self.failure = "".join(format_exception(error))
        logger.warning("%s", said, exc_info=error)

    def _scored_around_failures(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[ConditionInput]],
    ) -> tuple[Scores, BaseException | None]:
        """Score B images, leaving out only images at which the scorer raises; also return the first exception, or None.

        A batch that raises is halved until the failing images are alone, so whether an image has a score does not
        depend on what else was in its batch. One bad image costs about 2 log2(B) calls, a scorer that always raises
        2B - 1. The batch of a scorer that sees a whole group is never halved. A ContractError never counts as a failed
        score.
        """
        errors: list[BaseException] = []
        pixels: dict[ConditionImage, np.ndarray] = {}

        def scored(rows: slice) -> Scores:
            try:
                given = {"conditions": self._seen(conditions[rows], pixels)} if self.takes_conditions else {}
                return self._answered(images[rows], prompts[rows], metadata[rows], given)
            except ContractError:
                raise
            except (Exception, SystemExit) as error:  # any other failure means the same: no score
                if self.is_replaceable and breaks_gpu(error):
                    raise
                errors.append(error)
            size = rows.stop - rows.start
            if size == 1 or self.sees == "group":
                return Scores.missing(size, f"{self.name}: {named_line(errors[-1], self._file)}")
            middle = rows.start + size // 2
            return joined([scored(slice(rows.start, middle)), scored(slice(middle, rows.stop))])

        return scored(slice(0, len(images))), errors[0] if errors else None

    def _seen(
        self, conditions: Sequence[Sequence[ConditionInput]], pixels: dict[ConditionImage, np.ndarray]
    ) -> list[list[np.ndarray]]:
        """Return the pixels of the condition images; `pixels` keeps the files that were read."""
        if self._needs_conditions and not all(conditions):
            raise PromptError("an image without a condition image cannot be scored")
        for condition in {
            each for row in conditions for each in row if isinstance(each, ConditionImage)
        } - pixels.keys():
            pixels[condition] = read_condition(condition)
            pixels[condition].flags.writeable = False
        return [[pixels[each] if isinstance(each, ConditionImage) else each for each in row] for row in conditions]

    def _answered(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata], given: Mapping[str, Any]
    ) -> Scores:
        try:
            scores = self._scorer.score(images, prompts, metadata, **given)
        except ContractError as error:
            raise ContractError(f"scorer {self.name}: {error}") from error
        self._check_answer(scores, len(images))
        return scores

    def _check_request(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[ConditionInput]],
    ) -> None:
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
            got = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
            self._break(f"images must be a uint8 array, got {got}")
        if images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
            self._break(f"images must be [B, H, W, 3] without empty axes, got {list(images.shape)}")
        for what, items in (("prompts", prompts), ("metadata", metadata), ("conditions", conditions)):
            if isinstance(items, str | Mapping) or len(items) != len(images):
                got = f"a single {type(items).__name__}" if isinstance(items, str | Mapping) else len(items)
                self._break(f"{what} must hold one entry for each of {len(images)} images, got {got}")

    def _check_answer(self, scores: Scores, size: int) -> None:
        if not isinstance(scores, Scores):
            self._break(f"the answer must be Scores, got {type(scores).__name__}")
        if len(scores.reasons) != size:
            self._break(f"the answer must hold one score for each of {size} images, got {len(scores.reasons)}")
        if not isinstance(scores.valid, np.ndarray) or scores.valid.dtype != np.bool_:
            self._break(f"valid must be a bool array, got {_kind(scores.valid)}")
        self._check_numbers("values", scores.values, scores.valid)
        for name, component in scores.components.items():
            self._check_numbers(f"component {name}", component, scores.valid)
        is_inside = (scores.values >= self.low) & (scores.values <= self.high)
        self._check_each(
            is_inside | ~scores.valid, f"values must lie in [{self.low}, {self.high}]", scores.values.tolist()
        )
        has_reason = np.array([bool(reason) for reason in scores.reasons])
        self._check_each(has_reason | scores.valid, "reasons must say why a score is invalid", scores.reasons)
        self._check_each(~has_reason | ~scores.valid, "reasons must be empty where valid", scores.reasons)

    def _check_numbers(self, what: str, numbers: np.ndarray, valid: np.ndarray) -> None:
        if not isinstance(numbers, np.ndarray) or numbers.dtype != np.float32:
            self._break(f"{what} must be a float32 array, got {_kind(numbers)}")
        self._check_each(np.isfinite(numbers) | ~valid, f"{what} must be finite where valid", numbers.tolist())
        self._check_each(np.isnan(numbers) | valid, f"{what} must be NaN where invalid", numbers.tolist())

    def _check_each(self, holds: np.ndarray, rule: str, shown: Sequence[Any]) -> None:
        if not holds.all():
            image = int(np.argmin(holds))
            self._break(f"{rule}, got {shown[image]!r} for image {image}")

    def _break(self, message: str) -> NoReturn:
        raise ContractError(f"scorer {self.name}: {message}; fix the scorer (docs/rewards.md has the contract)")


def _conditions_of(score: Callable[..., Any] | None) -> Literal["none", "optional", "required"]:
    """Tell whether a method has a parameter `conditions`, and whether that has a default."""
    found = inspect.signature(score).parameters.get("conditions") if score else None
    if found is None:
        return "none"
    return "required" if found.default is found.empty else "optional"


def _require_conditions(scorer: str, prompts: Sequence[Prompt]) -> None:
    def require(prompt: Prompt) -> None:
        if not prompt.conditions:
            raise PromptError(f"scorer {scorer} needs an image to compare with, got none: add `image` to the line")

    check_each(prompts, require)


def _kind(value: Any) -> str:
    return f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__


def _check_scorer(scorer: Any) -> None:
    kind = type(scorer).__name__
    lacking = [name for name in ("name", "low", "high", "check", "score") if not hasattr(scorer, name)]
    if lacking:
        raise ScorerError(f"a scorer must have name, low, high, check and score, got {kind} without {lacking}")
    if not isinstance(scorer.name, str) or not scorer.name:
        raise ScorerError(f"a scorer's name must be a word, got {scorer.name!r} of {kind}")
    if not all(isinstance(bound, int | float) and not math.isnan(bound) for bound in (scorer.low, scorer.high)):
        raise ScorerError(f"the range of scorer {scorer.name} must be two numbers, got [{scorer.low}, {scorer.high}]")
    if getattr(scorer, "sees", "image") not in ("image", "group"):
        raise ScorerError(f"sees of scorer {scorer.name} must be 'image' or 'group', got {scorer.sees!r}")
    if scorer.low >= scorer.high:
        raise ScorerError(f"low of scorer {scorer.name} must be less than high, got [{scorer.low}, {scorer.high}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some images of one request, each with its prompt. The reward queue writes it, an actor reads it."""

    rows: tuple[int, ...]
    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...]
    conditions: tuple[tuple[ConditionInput, ...], ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> "Piece":
        """Make the piece of a whole request, with the prompt of each image."""
        return cls(
            rows=tuple(range(len(prompts))),
            prompts=tuple(prompt.text for prompt in prompts),
            metadata=tuple(prompt.metadata for prompt in prompts),
            conditions=tuple(prompt.conditions for prompt in prompts),
        )

    def part(self, chosen: Sequence[int]) -> "Piece":
        """Return some of the images, by their indices in this piece."""
        return Piece(**{each.name: tuple(getattr(self, each.name)[index] for index in chosen) for each in fields(self)})


def score_prompts(scorer: CheckedScorer, images: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
    """Score B images uint8 [B, H, W, 3], each with its prompt."""
    texts, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
    return scorer.score(images, texts, metadata, [prompt.conditions for prompt in prompts])


def score_pieces(scorer: CheckedScorer, pieces: Sequence[Piece], images: Sequence[np.ndarray]) -> Scores:
    """Score the pieces of several requests together; images of one size go through the scorer in one batch.

    Args:
        scorer: called once for each size of images.
        images: each piece's whole array, uint8 [I, H, W, 3].
    """
    chosen = [array[list(piece.rows)] for piece, array in zip(pieces, images, strict=True)]
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, rows in enumerate(chosen):
        by_size.setdefault(rows.shape[1:], []).append(index)
    answers: dict[int, Scores] = {}
    for indices in by_size.values():
        scores = scorer.score(
            np.concatenate([chosen[index] for index in indices]),
            [prompt for index in indices for prompt in pieces[index].prompts],
            [metadata for index in indices for metadata in pieces[index].metadata],
            [conditions for index in indices for conditions in pieces[index].conditions],
        )
        answers |= zip(indices, split(scores, [len(pieces[index].rows) for index in indices]), strict=True)
    return joined([answers[index] for index in range(len(pieces))])

"""The GenEval scorer: does the image hold the objects, counts, colours and positions that its prompt asks for?

    scorer = build_scorer("geneval", detector="toyworld.world.detector:ShapeDetector", reward="soft")
    scorer = build_scorer("geneval", detector="rewards.geneval.photo_detector:PhotoDetector")       # photographs

It looks through a detector named by import path and judges with `rewards.geneval.verdict`, or as the original code does
with `rewards.geneval.original`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from protocol.errors import ContractError, PromptError, ScorerError
from protocol.messages import Detection, Metadata, Prompt, Scores
from protocol.spelling import suggest
from rewards.geneval.clauses import read_clauses
from rewards.geneval.original import judge_original
from rewards.geneval.verdict import judge
from rewards.loading import build_from_path

JUDGES = {"sound": judge, "original": judge_original}


class Detector(Protocol):
    """Finds objects in images; made by the scorer with `detector_args`.

    It may also declare what it knows, so that prompts which ask for more are refused before a run starts: `labels` and
    `colors`, sets of names; and `counting_threshold`, the score that an object needs where a prompt asks to count.
    """

    def detect(self, images: np.ndarray) -> list[list[Detection]]:
        """For each image of uint8 [B, H, W, 3] the objects in it, in any order; an empty list if there are none."""
        ...


class GenEval:
    """Scores images by GenEval metadata (Ghosh et al. 2023, arXiv 2310.11513), in [0, 1].

    The value is the soft score (the training reward of Flow-GRPO, arXiv 2505.05470) or the strict verdict; components
    are `strict` and the official `correct`, each 1 or 0. The formulas stand in `geneval_verdict.judge`. An image in
    which nothing is found scores 0 and is valid: the detector has looked. With `compat="original"` the soft score and
    the strict verdict are the original code's, quirks included; the soft score then has no lower bound.
    """

    name = "geneval"
    high = 1.0

    def __init__(
        self,
        *,
        detector: str,
        detector_args: Mapping[str, Any] | None = None,
        reward: Literal["soft", "strict"] = "soft",
        compat: Literal["sound", "original"] = "sound",
    ) -> None:
        """Load the detector.

        Args:
            detector: import path `package.module:Class` of a `Detector`.
            detector_args: keyword arguments of its constructor.
            reward: which reading is the value.
            compat: `sound`, or `original` for the formulas of the original code.

        Raises:
            ScorerError: the detector cannot be loaded or is none, or another reward is asked for.
        """
        if reward not in ("soft", "strict"):
            raise ScorerError(f"reward of geneval must be 'soft' or 'strict', got {reward!r}")
        if compat not in JUDGES:
            raise ScorerError(f"compat of geneval must be 'sound' or 'original', got {compat!r}")
        self.low = -float("inf") if (compat, reward) == ("original", "soft") else 0.0
        self._reward = reward
        self._judge = JUDGES[compat]
        self._detector: Detector = build_from_path(detector, args=detector_args or {})
        if not callable(getattr(self._detector, "detect", None)):
            raise ScorerError(f"the detector of geneval must have a method detect(images), got {detector!r} without")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises PromptError, naming the line, for the first prompt whose metadata is not a sound GenEval line.

        Nor may it ask for a class or a colour that the detector does not know: no image could ever show it.
        """
        for prompt in prompts:
            try:
                self._require_known(prompt.metadata)
            except PromptError as error:
                raise PromptError(f"prompt line {prompt.index + 1} ({prompt.text!r}): {error}") from None

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Judge B images uint8 [B, H, W, 3], each by its own metadata; the prompts' words are not read.

        Raises:
            ContractError: the detector's answer is not one list of detections an image.
        """
        found = self._detector.detect(images)
        _check_detections(found, len(images))
        verdicts = [
            self._judge(self._sure_enough(objects, line), line) for objects, line in zip(found, metadata, strict=True)
        ]
        strict = np.array([verdict.strict for verdict in verdicts], np.float32)
        soft = np.array([verdict.soft for verdict in verdicts], np.float32)
        return Scores(
            values=soft if self._reward == "soft" else strict,
            valid=np.ones(len(images), bool),
            reasons=("",) * len(images),
            components={
                "strict": strict,
                "correct": np.array([verdict.correct for verdict in verdicts], np.float32),
            },
        )

    def _require_known(self, metadata: Metadata) -> None:
        clauses = read_clauses(metadata)
        asked = {
            "labels": [item.label for item in (*clauses.include, *clauses.exclude)],
            "colors": [item.color for item in clauses.include if item.color is not None],
        }
        for what, names in asked.items():
            known: frozenset[str] | None = getattr(self._detector, what, None)
            for name in names:
                if known is not None and name not in known:
                    kind = {"labels": "class", "colors": "colour"}[what]
                    raise PromptError(f"the detector knows no {kind} {name!r}: {suggest(name, known)}")

    def _sure_enough(self, objects: list[Detection], metadata: Metadata) -> list[Detection]:
        threshold = getattr(self._detector, "counting_threshold", None)
        if threshold is None or metadata.get("tag") != "counting":
            return objects
        return [found for found in objects if found.score > threshold]


def _check_detections(found: list[list[Detection]], size: int) -> None:
    if len(found) != size:
        raise ContractError(f"the detector must answer with one list an image, {size}, got {len(found)}")
    for image, objects in enumerate(found):
        for item in objects:
            if not isinstance(item, Detection):
                raise ContractError(f"the detector must find Detections, got {item!r} in image {image}")
            x0, y0, x1, y1 = item.box
            if not (np.isfinite((*item.box, item.score)).all() and x0 <= x1 and y0 <= y1):
                got = f"box {item.box} with score {item.score} in image {image}"
                raise ContractError(f"a box must be finite with x0 <= x1 and y0 <= y1, and so its score, got {got}")

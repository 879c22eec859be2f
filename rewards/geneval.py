"""The GenEval scorer: does the picture hold the objects, counts, colours and positions that its prompt asks for?

    scorer = build_scorer("geneval", detector="toyworld.detector:ShapeDetector", reward="soft")

It looks through a detector named by import path and judges with `rewards.geneval_verdict`.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from protocol.errors import ContractError, PromptError, ScorerError
from protocol.messages import Detection, Metadata, Prompt, Scores
from rewards.geneval_clauses import read_clauses
from rewards.geneval_verdict import judge
from rewards.loading import build_from_path


class Detector(Protocol):
    """Finds objects in pictures; made by the scorer without arguments."""

    def detect(self, images: np.ndarray) -> list[list[Detection]]:
        """For each picture of uint8 [B, H, W, 3] the objects in it, in any order; an empty list if there are none."""
        ...


class GenEval:
    """Scores pictures by GenEval metadata (Ghosh et al. 2023, arXiv 2310.11513), in [0, 1].

    The value is the soft score (the training reward of Flow-GRPO, arXiv 2505.05470) or the strict verdict; components
    are `strict` and the official `correct`, each 1 or 0. The formulas stand in `geneval_verdict.judge`. A picture in
    which nothing is found scores 0 and is valid: the detector has looked.
    """

    name = "geneval"
    low = 0.0
    high = 1.0

    def __init__(
        self, *, detector: str = "toyworld.detector:ShapeDetector", reward: Literal["soft", "strict"] = "soft"
    ) -> None:
        """Load the detector.

        Args:
            detector: import path `package.module:Class` of a `Detector` that is made without arguments.
            reward: which reading is the value.

        Raises:
            ScorerError: the detector cannot be loaded or is none, or another reward is asked for.
        """
        if reward not in ("soft", "strict"):
            raise ScorerError(f"reward of geneval must be 'soft' or 'strict', got {reward!r}")
        self._reward = reward
        self._detector: Detector = build_from_path(detector, args={})
        if not callable(getattr(self._detector, "detect", None)):
            raise ScorerError(f"the detector of geneval must have a method detect(images), got {detector!r} without")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises PromptError, naming the line, for the first prompt whose metadata is not a sound GenEval line."""
        for prompt in prompts:
            try:
                read_clauses(prompt.metadata)
            except PromptError as error:
                raise PromptError(f"prompt line {prompt.index} ({prompt.text!r}): {error}") from None

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Judge B pictures uint8 [B, H, W, 3], each by its own metadata; the prompts' words are not read.

        Raises:
            ContractError: the detector's answer is not one list of detections a picture.
        """
        found = self._detector.detect(images)
        _check_detections(found, len(images))
        verdicts = [judge(objects, line) for objects, line in zip(found, metadata, strict=True)]
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


def _check_detections(found: list[list[Detection]], size: int) -> None:
    if len(found) != size:
        raise ContractError(f"the detector must answer with one list a picture, {size}, got {len(found)}")
    for picture, objects in enumerate(found):
        for item in objects:
            if not isinstance(item, Detection):
                raise ContractError(f"the detector must find Detections, got {item!r} in picture {picture}")
            x0, y0, x1, y1 = item.box
            if not (np.isfinite((*item.box, item.score)).all() and x0 <= x1 and y0 <= y1):
                got = f"box {item.box} with score {item.score} in picture {picture}"
                raise ContractError(f"a box must be finite with x0 <= x1 and y0 <= y1, and so its score, got {got}")

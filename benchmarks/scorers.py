"""Scorers for benchmarks; any config can name them by their import path."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protocol.messages import Metadata, Prompt, Scores
from rewards.geneval.clauses import read_clauses
from rewards.geneval.scorer import GenEval
from rewards.geneval.verdict import judge
from toyworld.world.detector import ShapeDetector

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Least overlaps of a blob with an ideal shape; the detector's own is 0.8."""


class Redness:
    """The redness of an image: mean red minus the mean of green and blue, in [-1, 1]; a smooth score without ties.

    rewards.redness.scorer=benchmarks.scorers:Redness
    """

    name = "redness"
    low = -1.0
    high = 1.0

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Accept any prompt."""

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],  # noqa: ARG002
        metadata: Sequence[Metadata],  # noqa: ARG002
    ) -> Scores:
        """Score B images.

        Args:
            images: uint8 [B, H, W, 3].
            prompts: not used.
            metadata: not used.

        Returns:
            B valid scores in [-1, 1].
        """
        channels = images.astype(np.float32).mean((1, 2)) / 255
        values = channels[:, 0] - (channels[:, 1] + channels[:, 2]) / 2
        return Scores(values=values, valid=np.ones(len(images), bool), reasons=("",) * len(images))


class GradedGenEval(GenEval):
    """GenEval's soft score in the toy world, averaged over detection thresholds, so that half a shape counts partly.

    The components are GenEval's own.

    rewards.geneval.scorer=benchmarks.scorers:GradedGenEval
    """

    def __init__(self, *, detector: str = "toyworld.world.detector:ShapeDetector") -> None:
        super().__init__(detector=detector)
        self._lenient = ShapeDetector(min_score=min(THRESHOLDS))

    @staticmethod
    def ready(**_: Any) -> None:
        """The toy world's detector needs no weights, GenEval's default does."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Score B images by their metadata.

        Args:
            images: uint8 [B, H, W, 3].
            prompts: not used.
            metadata: the GenEval line of each image.

        Returns:
            B valid scores in [0, 1].
        """
        found = self._lenient.detect(images)
        values = [
            np.mean([judge([d for d in objects if d.score >= sure], read_clauses(line)).soft for sure in THRESHOLDS])
            for objects, line in zip(found, metadata, strict=True)
        ]
        return replace(super().score(images, prompts, metadata), values=np.array(values, np.float32))

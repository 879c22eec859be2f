"""Scorers for benchmarks that need no detector, usable in any config by their import path."""

from collections.abc import Sequence

import numpy as np

from protocol.messages import Metadata, Prompt, Scores


class Redness:
    """How red a picture is: mean of red minus the mean of green and blue, in [-1, 1]; a smooth score without ties.

    rewards.redness.scorer=benchmarks.scorers:Redness
    """

    name = "redness"
    low = -1.0
    high = 1.0

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Any prompt will do."""

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],  # noqa: ARG002
        metadata: Sequence[Metadata],  # noqa: ARG002
    ) -> Scores:
        """float32 [B]."""
        channels = images.astype(np.float32).mean((1, 2)) / 255
        values = channels[:, 0] - (channels[:, 1] + channels[:, 2]) / 2
        return Scores(values=values, valid=np.ones(len(images), bool), reasons=("",) * len(images))

"""Scorers of the chaos tests: quick, and different for every image."""

from collections.abc import Sequence

import numpy as np

from protocol.messages import Metadata, Prompt, Scores


class Redness:
    """Mean of the red channel."""

    name = "redness"
    low = 0.0
    high = 1.0

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Any prompt will do."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Values in [0, 1]."""
        values = (images[..., 0].mean((1, 2)) / 255).astype(np.float32)
        return Scores(values=values, valid=np.ones(len(values), bool), reasons=("",) * len(values))


class Mild(Redness):
    """The redness of an image up to `at`; what is redder loses two for one."""

    name = "mild"
    low = -2.0

    def __init__(self, at: float) -> None:
        self._at = at

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Values in [-2, at]; redness is red minus the mean of green and blue."""
        red = images[..., 0].mean((1, 2)) / 255 - images[..., 1:].mean((1, 2, 3)) / 255
        values = np.where(red < self._at, red, self._at - 2 * (red - self._at)).astype(np.float32)
        return Scores(values=values, valid=np.ones(len(values), bool), reasons=("",) * len(values))


class Mute(Redness):
    """A group's scorer that always raises."""

    name = "mute"
    sees = "group"

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Raise."""
        raise OSError("no disk")

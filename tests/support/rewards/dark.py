"""A scorer of one line: the darker the better."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.messages import Metadata, Prompt, Scores


class Dark:
    """1 minus the mean brightness."""

    name = "dark"
    low, high = 0.0, 1.0

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Every prompt will do."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Any:
        values = 1 - images.mean((1, 2, 3)) / 255
        return Scores(values=values.astype(np.float32), valid=np.ones(len(values), bool), reasons=("",) * len(values))

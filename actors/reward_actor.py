"""The Ray shell of one scorer."""

from collections.abc import Sequence

import numpy as np
import ray

from protocol.config import RewardConfig
from protocol.messages import Metadata, Scores
from rewards.scorer import build_scorer


@ray.remote
class RewardActor:
    """Scores pictures with one scorer; it holds no state, so any actor of its pool gives the same answer."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    @ray.method
    def prepare(self) -> None:
        """Load the scorer. Not in the constructor: there Ray would turn the user's mistake into a dead actor."""
        self._scorer = build_scorer(self._config.scorer, **self._config.args)

    @ray.method
    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Scores of uint8 [B, H, W, 3], one prompt and one metadata each."""
        return self._scorer.score(images, prompts, metadata)

"""The Ray shell of one scorer."""

import sys
from collections.abc import Sequence

import numpy as np
import ray

from actors.pool.heartbeat import HEARTBEAT, Alive
from protocol.config.reward import RewardConfig
from protocol.messages import Prompt, Scores
from rewards.pieces import Piece, score_pieces
from rewards.scorer import build_scorer


@ray.remote(**HEARTBEAT)
class RewardActor(Alive):
    """Scores images with one scorer; it holds no state, so any actor of its pool gives the same answer."""

    def __init__(self, config: RewardConfig, threads: int = 1) -> None:
        self._config = config
        self._threads = threads

    @ray.method
    def prepare(self) -> None:
        """Load the scorer. Not in the constructor: there Ray would turn the user's mistake into a dead actor."""
        self._scorer = build_scorer(self._config.scorer, **self._config.args)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._threads)

    @ray.method
    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises InputError for a prompt that cannot be scored."""
        self._scorer.check(prompts)

    @ray.method
    def score(self, pieces: Sequence[Piece], *images: np.ndarray) -> Scores:
        """Scores of the pieces in their order; `images` are their arrays uint8 [I, H, W, 3], from the object store."""
        return score_pieces(self._scorer, pieces, images)

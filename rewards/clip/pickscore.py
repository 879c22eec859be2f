"""PickScore: which image would people choose for this prompt? (Kirstain et al. 2023, arXiv 2305.01569)

scorer = build_scorer("pickscore")                               # the published weights
scorer = build_scorer("pickscore", model="pkg://toyworld/clip")  # any CLIP
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.messages import Metadata, Scores
from rewards.clip.features import ROUNDING, ClipFeatures, ClipScorer
from rewards.clip.openclip import LIKE
from rewards.scores import scored

MODEL = "yuvalkirstain/PickScore_v1"
DIVISOR = 26.0
"""Flow-GRPO's scale (arXiv 2505.05470): it turns PickScore's usual 18 to 24 into 0.7 to 0.9."""


class PickScore(ClipScorer):
    """PickScore: exp(logit_scale) <text, image> / 26 with float32 features of length 1.

    Weights: `yuvalkirstain/PickScore_v1` (3.9 GB) with the processor of `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`, or any
    CLIP. The range is plus or minus exp(logit_scale) / 26, which depends on the weights.
    """

    name = "pickscore"

    def __init__(
        self, *, model: str = MODEL, processor: str | None = None, device: str | None = None, batch: int = 16
    ) -> None:
        """Load the weights.

        Args:
            model: CLIP folder, `pkg://` path or hub id.
            processor: source of tokenizer and image processor; by default the model's own, and for the published
                weights the processor with which they were trained.
            batch: it can change the last bits of a score; the other images of a batch cannot.

        Raises:
            ScorerError: the weights cannot be loaded.
        """
        self._clip = ClipFeatures(model, processor=processor or _own_processor(model), device=device, batch=batch)
        self._factor = self._clip.scale / DIVISOR
        self.high = self._factor * (1 + ROUNDING)
        self.low = -self.high

    @staticmethod
    def ready(*, model: str = MODEL, processor: str | None = None, **_: Any) -> None:
        ClipFeatures.ready(model, processor or _own_processor(model))

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        return scored(self._factor * self._clip.cosines(images, prompts))


def _own_processor(model: str) -> str | None:
    return LIKE if model == MODEL else None

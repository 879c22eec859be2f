"""Both parts of an edit in one scorer: a judge's overall score and consistency."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from protocol.errors import ScorerError
from protocol.messages import Metadata, Prompt, Scores
from rewards.editing.consistency import DINO, Consistency
from rewards.editing.judge import EditJudge
from rewards.scores import mix


class EditScorer:
    """value = (1 - kept) judge / 10 + kept consistency, of `edit_judge` and `consistency`; in [-kept, 1].

    A part without a score leaves the image without one. An image that copies the condition image has a consistency of
    1, so `kept` is what it earns if the judge gives 0.
    """

    name = "edit"
    components = ("judge", "consistency", *(f"judge/{part}" for part in EditJudge.components))

    def __init__(
        self,
        *,
        judge: Mapping[str, Any] | None = None,
        template: str | None = None,
        features: str = DINO,
        device: str | None = None,
        kept: float = 0.25,
    ) -> None:
        """Make both scorers.

        Args:
            judge: as in `EditJudge`.
            template: likewise.
            features: `model` of `Consistency`.
            device: its device.
            kept: weight of the consistency, in [0, 1].

        Raises:
            ScorerError: one of them cannot be made.
        """
        if not 0 <= kept <= 1:
            raise ScorerError(f"kept of edit must lie in [0, 1], got {kept}")
        self._consistency = Consistency(model=features, device=device)
        self._judge = EditJudge(judge=judge, template=template)
        self._weights = {"judge": (1 - kept) / 10, "consistency": kept}
        self.low, self.high = -kept, 1.0

    @staticmethod
    def ready(
        *,
        judge: Mapping[str, Any] | None = None,
        template: str | None = None,
        features: str = DINO,
        **_: Any,
    ) -> None:
        Consistency.ready(model=features)
        EditJudge.ready(judge=judge, template=template)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        parts = {
            name: scorer.score(images, prompts, metadata, conditions)
            for name, scorer in (("judge", self._judge), ("consistency", self._consistency))
        }
        return mix(parts, self._weights)

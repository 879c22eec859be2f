"""Scoring around an image that makes its scorer raise: it alone is missing, the others of its batch are scored.

A batch that raises is halved; a half that raises is halved again. Where both halves raise, the scorer itself fails and
everything there is missing, so a broken scorer costs three calls and one bad image among B about 2 log2(B).
"""

from collections.abc import Callable, Sequence

import numpy as np

from protocol.errors import ContractError, one_line
from protocol.messages import Metadata, Scores
from rewards.answers import joined

Score = Callable[[np.ndarray, Sequence[str], Sequence[Metadata]], Scores]


def score_around_failures(
    score: Score, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata], *, name: str
) -> tuple[Scores, Exception | None]:
    """Scores of all B images, missing where `score` raises; and the first exception, if there was one.

    Raises:
        ContractError: `score` raised it: it is never taken for a failure.
    """
    errors: list[Exception] = []

    def attempt(rows: slice) -> Scores | None:
        try:
            return score(images[rows], prompts[rows], metadata[rows])
        except ContractError:
            raise
        except Exception as error:  # noqa: BLE001  whatever fails in an engine means the same: this image has no score
            errors.append(error)
            return None

    def divided(rows: slice) -> Scores:
        size = rows.stop - rows.start
        if size > 1:
            middle = rows.start + size // 2
            halves = [slice(rows.start, middle), slice(middle, rows.stop)]
            answers = [attempt(half) for half in halves]
            if any(answer is not None for answer in answers):
                return joined([answer or divided(half) for half, answer in zip(halves, answers, strict=True)])
        return Scores.missing(size, f"{name}: {type(errors[-1]).__name__}: {one_line(errors[-1])}")

    everything = slice(0, len(images))
    return attempt(everything) or divided(everything), errors[0] if errors else None

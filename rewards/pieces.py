"""Pieces of requests, scored together: what one call to a reward actor holds.

A piece is some images of one request. Pieces of several requests go through the scorer in one batch when their
images have one size, and the answer comes back in the order of the pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.messages import Metadata, Scores
from rewards.answers import joined, rows_of
from rewards.scorer import CheckedScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Which images of a request's array are asked for, each with its prompt and metadata.

    Written by the reward queue, read by a reward actor.
    """

    rows: tuple[int, ...]
    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...]


def score_pieces(scorer: CheckedScorer, pieces: Sequence[Piece], images: Sequence[np.ndarray]) -> Scores:
    """The scores of all pieces in their order.

    Args:
        scorer: asked once for each size of images.
        pieces: at least one.
        images: each piece's whole array, uint8 [I, H, W, 3].
    """
    chosen = [array[list(piece.rows)] for piece, array in zip(pieces, images, strict=True)]
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, rows in enumerate(chosen):
        by_size.setdefault(rows.shape[1:], []).append(index)
    answers: dict[int, Scores] = {}
    for places in by_size.values():
        scores = scorer.score(
            np.concatenate([chosen[place] for place in places]),
            [prompt for place in places for prompt in pieces[place].prompts],
            [metadata for place in places for metadata in pieces[place].metadata],
        )
        start = 0
        for place in places:
            end = start + len(pieces[place].rows)
            answers[place] = rows_of(scores, slice(start, end))
            start = end
    return joined([answers[place] for place in range(len(pieces))])

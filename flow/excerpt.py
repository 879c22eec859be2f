"""A shard's first members, small enough to show: their pictures in the order of the points."""

import numpy as np
from jaxtyping import UInt8

from protocol.messages import COMMON_PICTURE, Excerpt, Rollout

LONGEST = 128
"""Pixels of the longer side; a larger picture is thinned out."""


def excerpt_of(rollout: Rollout, pictures: UInt8[np.ndarray, "I H W 3"], *, members: int) -> Excerpt:
    """The first `members` trajectories (all, when there are fewer) of a group's first shard."""
    index = rollout.image_index[:members]
    index = np.where(index == COMMON_PICTURE, 0, index)
    stride = -(-max(pictures.shape[1:3]) // LONGEST)
    return Excerpt(
        request=rollout.request,
        steps=rollout.steps,
        pictures=np.ascontiguousarray(pictures[index][:, :, ::stride, ::stride]),
        image_index=index,
    )

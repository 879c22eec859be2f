"""A shard's first members, small enough to show: their images in the order of the points."""

import numpy as np
from jaxtyping import UInt8

from protocol.messages import COMMON_IMAGE, Excerpt, Rollout

LONGEST = 128
"""Pixels of the longer side; a larger image is thinned out."""


def excerpt_of(rollout: Rollout, images: UInt8[np.ndarray, "I H W 3"], *, members: int) -> Excerpt:
    """The first `members` trajectories (all, when there are fewer) of a group's first shard."""
    index = rollout.image_index[:members]
    index = np.where(index == COMMON_IMAGE, 0, index)
    stride = -(-max(images.shape[1:3]) // LONGEST)
    return Excerpt(
        request=rollout.request,
        steps=rollout.steps,
        images=np.ascontiguousarray(images[index][:, :, ::stride, ::stride]),
        image_index=index,
    )

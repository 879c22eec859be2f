"""A group of which one picture could not be scored, where the failure policy is `drop_group`."""

from collections.abc import Sequence
from dataclasses import replace

from protocol.messages import ScoredShard, Scores


def set_aside_if_void(shards: Sequence[ScoredShard]) -> tuple[ScoredShard, ...]:
    """The shards unchanged, or, if one of their scores voids the group, with no score at all.

    Such a group takes its place in the iteration and teaches nothing: every gain of it is masked.
    """
    if not any(shard.scores.voids_group for shard in shards):
        return tuple(shards)
    reason = next(filter(None, (reason for shard in shards for reason in shard.scores.reasons)), "no score")
    missing = f"the group is set aside: {reason}"
    return tuple(replace(s, scores=Scores.missing(len(s.scores.reasons), missing)) for s in shards)

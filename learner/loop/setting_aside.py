"""Groups that teach nothing: one image has no score where the failure policy is `drop_group`, or none has one."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from protocol.messages import ScoredShard, Scores

log = logging.getLogger(__name__)


def set_aside_if_void(shards: Sequence[ScoredShard]) -> tuple[ScoredShard, ...]:
    """The shards unchanged, or, if one of their scores voids the group, with no score at all.

    Such a group takes its place in the iteration and teaches nothing: every gain of it is masked.
    """
    if not any(shard.scores.voids_group for shard in shards):
        return tuple(shards)
    reason = next(filter(None, (reason for shard in shards for reason in shard.scores.reasons)), "no score")
    missing = f"the group is set aside: {reason}"
    return tuple(replace(s, scores=Scores.missing(len(s.scores.reasons), missing)) for s in shards)


def name_if_silent(text: str, shards: Sequence[ScoredShard]) -> None:
    """One line in the run's log for a group without a single score, `text` being its prompt."""
    if any(shard.scores.valid.any() for shard in shards):
        return
    reason = next(filter(None, (reason for shard in shards for reason in shard.scores.reasons)), "no reason given")
    log.warning(
        "a group must have a valid score to train on, got none for %r (%s): it is left out; mend the scorer, or set"
        " rewards.NAME.on_failure to pause or fail",
        text,
        reason,
    )

"""What happens to images that got no score after all tries; never do they get 0.

`missing` masks the gains that touch such an image, `drop_group` sets its whole group aside, `fail` ends the run. What
`pause` could not wait for (a single image that the scorer cannot judge while it judges others) is missing.
"""

import logging
from dataclasses import replace

from protocol.config.reward import RewardConfig
from protocol.errors import RewardError
from protocol.messages import Scores

log = logging.getLogger(__name__)


def settle(name: str, config: RewardConfig, scores: Scores) -> Scores:
    """The scores as the failure policy of reward `name` leaves them.

    Raises:
        RewardError: a score is missing and the policy is `fail`.
    """
    if scores.valid.all():
        return scores
    count = int((~scores.valid).sum())
    reason = next(filter(None, scores.reasons))
    if config.on_failure == "fail":
        raise RewardError(
            f"reward {name} has no score for {count} of {len(scores.reasons)} images after {config.tries} tries:"
            f" {reason}; mend the scorer, or set rewards.{name}.on_failure to missing, drop_group or pause"
        )
    log.warning("reward %s: %d of %d images without a score: %s", name, count, len(scores.reasons), reason)
    return replace(scores, voids_group=config.on_failure == "drop_group")

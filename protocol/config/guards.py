"""The guards' part of the config: when a run that may be silently wrong is stopped."""

from pydantic import Field

from protocol.config.section import Positive, Section


class GuardsConfig(Section):
    """Stop rules of `learner.loop.guards`. They never change a result; they only end a run."""

    zero_variance_iterations: Positive = 10
    """Iterations in a row in which no group has anything to compare."""
    idle_iterations: Positive = 3
    """Iterations in a row with something to learn after which the adapter's B may still be exactly 0."""
    max_approx_kl: float = Field(default=0.1, gt=0.0)
    """Bound of `train/approx_kl`, half the mean squared log ratio of one iteration."""
    max_ratio_deviation: float = Field(default=0.5, gt=0.0)
    """Bound of |`train/ratio_mean` - 1|."""

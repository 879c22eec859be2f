"""The section `guards`: when to stop a run that may be silently wrong."""

from typing import Annotated, Literal

from pydantic import Field

from protocol.config.section import WORD_OFF, Positive, Section


class GuardsConfig(Section):
    """Stop rules of `learner.loop.guards`. They never change a result; they only warn or end a run."""

    zero_variance_iterations: Positive = 10
    """Stop after this many iterations in a row in which every group's rewards are all equal."""
    idle_iterations: Positive = 3
    """Stop if the adapter's B is still exactly 0 after this many iterations in a row with something to learn."""
    max_approx_kl: float = Field(default=0.1, gt=0.0)
    """Upper bound of `train/approx_kl`, half the mean squared log ratio of one iteration; above it the run stops."""
    max_ratio_deviation: float = Field(default=0.5, gt=0.0)
    """Upper bound of |`train/ratio_mean` - 1|; above it the run stops."""
    hacking: Annotated[Literal["off", "warn", "stop"], WORD_OFF] = "warn"
    """What happens when a scorer with `use: evaluate` and `sees: image` falls on held-out images while the trained
    reward rises: nothing, a condition, or the end of the run. With `warn` and `stop` the checkpoint at which the scorer
    was highest is written and kept."""
    hacking_evaluations: Positive = 2
    """Evaluations in a row, at least 1, in which the scorer must be lower and the reward higher."""

"""What a step earns, in words: one text for each credit rule, which page, report and terminal show.

A *reward* scores an image. A *step reward* is what the credit rule gives to a denoising step. A *gain* is the
difference between two neighbouring points of a trajectory. An *advantage* is the normalised step reward.
"""

from protocol.config.credit import RULES, CreditConfig
from protocol.status import CreditWords

POINT = "the reward of the clean-image estimate"
VALUE = (
    "The value of a point is the final reward that its clean-image estimate predicts, relative to the mean of the"
    " prompt's group."
)


def words_of(credit: CreditConfig) -> CreditWords:
    """Return the words for the credit that runs; each example's numbers add up as its text says."""
    is_calibrated = credit.values == "calibrated"
    texts = {
        "uniform": _uniform,
        "gains": _calibrated_gains if is_calibrated else _gains,
        "gae": lambda: _decayed(credit.gae_lambda, is_calibrated=is_calibrated),
        "turning_point": _turning_points,
        "tree": _calibrated_tree if is_calibrated else _tree,
    }
    has_values = credit.rule in RULES and is_calibrated and (RULES[credit.rule].uses_values or credit.rule == "tree")
    rule, example = texts[credit.rule]() if credit.rule in texts else _own(credit.rule)
    return CreditWords(name=f"{credit.rule}, calibrated" if has_values else credit.rule, rule=rule, example=example)


def _uniform() -> tuple[str, str]:
    return (
        "Every step earns the reward of the finished image. Only finished images are scored.",
        "The finished image has a reward of 0.75: each of its steps earns 0.75.",
    )


def _gains() -> tuple[str, str]:
    return (
        f"A step earns its gain: {POINT} after the step minus the one before it. The gains of a trajectory add up to"
        " the last reward minus the first.",
        "Rewards 0.40, 0.55 and 0.75 along a trajectory: the first step earns 0.55 − 0.40 = +0.15, the second"
        " 0.75 − 0.55 = +0.20, together 0.75 − 0.40 = +0.35.",
    )


def _calibrated_gains() -> tuple[str, str]:
    return (
        f"{VALUE} A step earns its gain: the value after the step minus the value before it. The gains of a trajectory"
        " add up to the last value minus the first. The last value is the reward of the finished image minus the"
        " group's mean.",
        "Values +0.02, +0.10 and +0.25 along a trajectory: the first step earns 0.10 − 0.02 = +0.08, the second"
        " 0.25 − 0.10 = +0.15, together 0.25 − 0.02 = +0.23.",
    )


def _decayed(decay: float, *, is_calibrated: bool) -> tuple[str, str]:
    points = ["+0.02", "+0.10", "+0.25"] if is_calibrated else ["0.40", "0.55", "0.75"]
    first, middle, last = map(float, points)
    gains = middle - first, last - middle
    gain = f"{VALUE} A gain is the value" if is_calibrated else f"A gain is {POINT}"
    what = "Values" if is_calibrated else "Rewards"
    return (
        f"{gain} after a step minus the one before it. A step earns its own gain plus {decay:g} times what the next"
        " step earns.",
        f"{what} {points[0]}, {points[1]} and {points[2]} along a trajectory: the gains are {gains[0]:+.2f} and"
        f" {gains[1]:+.2f}. The last step earns {gains[1]:+.2f}; the one before it earns"
        f" {gains[0]:.2f} + {decay:g} × {gains[1]:.2f} = {gains[0] + decay * gains[1]:+.3f}.",
    )


def _turning_points() -> tuple[str, str]:
    return (
        f"A step earns its gain: {POINT} after the step minus the one before it. At a turning point, where a trajectory"
        " begins to move towards its end, the step earns the final reward minus the one before the step: all gains from"
        " there on.",
        "Rewards 0.40, 0.30, 0.50 and 0.75 along a trajectory: the gains are −0.10, +0.20 and +0.25. The second step"
        " turns the trajectory and earns 0.75 − 0.30 = +0.45, the sum of +0.20 and +0.25.",
    )


def _tree() -> tuple[str, str]:
    return (
        "Only finished images are scored. A step earns the mean reward of all images whose trajectories share it.",
        "Two images with rewards of 1 and 0 share two steps and part at the third: each shared step earns"
        " (1 + 0) / 2 = 0.5, the third step earns 1 on one side and 0 on the other.",
    )


def _calibrated_tree() -> tuple[str, str]:
    return (
        "Only finished images are scored; their rewards count relative to the mean of the prompt's group. A step earns"
        " the mean of all images whose trajectories share it, minus a fraction of the mean of the images that left the"
        " same state by other steps: these show how good the state already was. The fraction is the slope of a"
        " regression of the first mean on the second, for each step of an iteration (credit/step_K_slope).",
        "The group's mean is 0.667 and the slope is 0.559. Two trajectories part at a step; their images have rewards"
        " of 1 and 0, which is +0.333 and −0.667 relative to the group. The first step earns"
        " 0.333 − 0.559 × (−0.667) = +0.706, the second −0.667 − 0.559 × 0.333 = −0.853.",
    )


def _own(rule: str) -> tuple[str, str]:
    return f"A step earns what {rule} returns.", ""

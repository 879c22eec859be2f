"""The variants of the credit race: methods, the papers' ablations, and the changes that a page shows a figure of."""

from collections.abc import Mapping
from dataclasses import dataclass

COMMON = (
    "group.size=24",
    "learner.kl.weight=0",
    "learner.average.decay=0",
    "evaluation.adapter=trained",
    "evaluation.images_per_prompt=8",
    "learner.epochs=1",
    "cluster.learner.threads=1",
    "checkpoint.keep=1",
)
REWARDS: Mapping[str, tuple[str, ...]] = {
    # Verdicts are coarse, so there are three times as many images, for a standard error of 0.015.
    "geneval": ("evaluation.images_per_prompt=24",),
    # Training uses the detector's confidence; the evaluation uses the strict verdict.
    "graded": (
        "rewards.geneval.scorer=benchmarks.scorers:GradedGenEval",
        "evaluation.images_per_prompt=24",
    ),
    "pickscore": (
        "rewards={geneval: null, pickscore: {scorer: pickscore, args: {model: 'pkg://toyworld/clip', batch: 32}}}",
        "evaluation.component=pickscore",
        "data.tags=[single_object, colors]",
    ),
    "redness": (
        "rewards={geneval: null, redness: {scorer: 'benchmarks.scorers:Redness'}}",
        "evaluation.component=reward",
    ),
}
THREE_SEEDS = ("flow_grpo", "stepwise", "stepwise_flow_sde", "dense_grpo", "tp_grpo", "stepwise_calibrated")
METHODS = (
    *THREE_SEEDS,
    "stepwise_fast",
    "stepwise_tree",
    "flow_grpo_fast",
    "dance_grpo",
    "mix_grpo",
    "tp_grpo_plain",
    "temp_flow",
    "step_weights",
    "diffusion_nft",
    "awm",
    "e_grpo",
    "branch_grpo",
    "granular_grpo",
    "dgpo",
    "dgpo_ema",
    "elbo",
    "ram",
    "flow_dppo",
    "grpo_guard",
)

PLAIN = ("credit.rule=gains", "credit.scale=prompt")
RATES = (1e-3, 4e-3)
"""Learning rates that every method is also run with, besides the preset's 2e-3: equal tuning for each."""
LOOKS: Mapping[tuple[str, float], str] = {(name, rate): f"{name}, lr={rate}" for name in METHODS for rate in RATES}
"""Variants with these learning rates; they need no full budget and have their own table."""
FIRST_HALF = ("sampling.window={rule: random, size: 3, within: [0.0, 0.5]}",)
"""Flow-GRPO-Fast's window; with six steps it always holds the first three."""
TINY = ("model.tiny_decoder=pkg://toyworld/tiny_decoder",)
TWO_STEPS = ("sampling.window={rule: random, size: 2, within: [0.0, 0.5]}",)
SHORT_TAIL = ("sampling.tail={rule: ode, substeps: 2, spacing: schedule, solver: adams}",)
"""Two steps of second order behind the window, where with six steps the schedule has three or four."""
OWN_STD = ("credit.normalise=per_step",)
SINGLE = ("sampling.window={rule: random, size: 1, within: [0.0, 0.5]}", "sampling.shared_noise=true")
WEIGHTS = ("credit.step_weights={rule: noise, noise_power: 2.0}",)
MEAN = ("learner.average={decay: 0.8, every: 1, repeats: 1}", "evaluation.adapter=average")
SPREAD = ("sampling.window={rule: spread, size: 2, within: [0.0, 1.0]}", "completion.every=1")
SLIDING = ("sampling.window={rule: sliding, size: 3, within: [0.0, 1.0], every: 8}",)
ANYWHERE = ("sampling.window={rule: random, size: 3, within: [0.0, 1.0]}",)
TWEEDIE = ("completion.rule=tweedie",)
FOUR_UPDATES = ("learner.updates_per_iteration=4",)
JOINT = ("credit.normalise=joint", "credit.step_weights.rule=none")
STEP_CREDIT = (
    *("sampling.kernel=flow_sde", "sampling.shared_noise=true"),
    "completion={rule: ode, substeps: 2, spacing: even, solver: euler, tapers: false}",
    *("credit.rule=gae", "credit.gae_lambda=0.3", "credit.values=calibrated", "credit.normalise=per_step"),
)
"""Rollout, completion and credit of `stepwise_calibrated`, under another objective."""


@dataclass(frozen=True)
class Variant:
    """A method with config keys."""

    method: str
    keys: tuple[str, ...] = ()


VARIANTS: Mapping[str, Variant] = {
    **{name: Variant(name) for name in METHODS},
    # Stepwise-Flow-GRPO's figures 9 (normalisation) and 10 (substeps), on its SDE and on Flow-SDE.
    "stepwise, per step": Variant("stepwise", ("credit.normalise=per_step",)),
    "stepwise, centred": Variant("stepwise", ("credit.normalise=centred",)),
    "flow sde, per step": Variant("stepwise_flow_sde", ("credit.normalise=per_step",)),
    "flow sde, centred": Variant("stepwise_flow_sde", ("credit.normalise=centred",)),
    "flow sde, ema": Variant("stepwise_flow_sde", ("credit.normalise=ema",)),
    **{f"flow sde, T'={n}": Variant("stepwise_flow_sde", (f"completion.substeps={n}",)) for n in (1, 2, 8)},
    # Gains on verdicts with longer traces and with other noise.
    **{
        f"flow sde, lambda={decay}": Variant("stepwise_flow_sde", ("credit.rule=gae", f"credit.gae_lambda={decay}"))
        for decay in (0.5, 1.0)
    },
    "flow sde, noise 0.4": Variant("stepwise_flow_sde", ("sampling.noise_level=0.4",)),
    "stepwise, first step excluded": Variant("stepwise", ("sampling.first_step=exclude",)),
    # The cost of DanceGRPO's small noise and of its random 60 % of the steps.
    "dance_grpo, noise 0.7": Variant("dance_grpo", ("sampling.noise_level=0.7",)),
    "dance_grpo, all steps": Variant("dance_grpo", ("learner.step_fraction=1.0",)),
    # The kernel in TP-GRPO's paper; its released code, and therefore the method, has CPS.
    "tp_grpo, flow sde": Variant("tp_grpo", ("sampling.kernel=flow_sde", "sampling.log_prob=gaussian")),
    # stepwise_calibrated (ours) part by part: calibrated values; lambda and the iteration's std; other completions;
    # and the step weights alone with uniform credit.
    "calibrated, plain gains": Variant("stepwise_calibrated", (*PLAIN, *JOINT)),
    "calibrated, plain gains, own noise": Variant(
        "stepwise_calibrated", (*PLAIN, *JOINT, "sampling.shared_noise=false")
    ),
    "calibrated, joint": Variant("stepwise_calibrated", JOINT),
    "calibrated, tweedie": Variant("stepwise_calibrated", TWEEDIE),
    # The cheapest completed points: no forward of their own, decoded by a small decoder.
    "calibrated, tweedie, first half, tiny": Variant("stepwise_calibrated", (*TWEEDIE, *FIRST_HALF, *TINY)),
    # stepwise_fast is the variant before with one point of its window, the third, beside the one that a group shares.
    "stepwise_fast, tiny": Variant("stepwise_fast", TINY),
    # Its point completed by two Euler substeps, which takes one forward for each trajectory.
    "stepwise_fast, T'=2": Variant(
        "stepwise_fast", ("completion={rule: ode, substeps: 2, spacing: even, solver: euler, every: 2, tapers: false}",)
    ),
    # The window may lie anywhere, so the later steps are trained too.
    "stepwise_fast, any window, tiny": Variant("stepwise_fast", (*TINY, *ANYWHERE)),
    # Two steps of the first half, each with the point before it; and fewer ODE steps behind the window.
    "stepwise_fast, two steps": Variant("stepwise_fast", (*TWO_STEPS, "completion.every=1")),
    "stepwise_fast, two steps, short tail": Variant("stepwise_fast", (*TWO_STEPS, *SHORT_TAIL, "completion.every=1")),
    "stepwise_fast, short tail": Variant("stepwise_fast", SHORT_TAIL),
    # Each step divided by its own std; with that, a short tail, and trees of four, which split at the last two steps.
    "stepwise_tree, per step": Variant("stepwise_tree", OWN_STD),
    "stepwise_tree, per step, short tail": Variant("stepwise_tree", (*OWN_STD, *SHORT_TAIL)),
    "stepwise_tree, per step, two splits": Variant("stepwise_tree", (*OWN_STD, "sampling.splits=[0.3,0.6]")),
    "stepwise_tree, groups of 32": Variant("stepwise_tree", ("group.size=32",)),
    "stepwise_tree, groups of 36": Variant("stepwise_tree", ("group.size=36",)),  # as the demo
    "stepwise_tree, groups of 36, short tail": Variant("stepwise_tree", ("group.size=36", *SHORT_TAIL)),
    "stepwise_tree, groups of 36, short tail, lr=0.003, decay": Variant(  # as toy_pickscore
        "stepwise_tree",
        ("group.size=36", *SHORT_TAIL, "learner.learning_rate=3e-3", "learner.decay={iterations: 45, to: 5e-4}"),
    ),
    # About as many images as twelve groups of 24, from fewer prompts.
    "stepwise_tree, 8 groups of 32": Variant("stepwise_tree", ("group.size=32", "group.per_iteration=8")),
    "stepwise_tree, 6 groups of 48": Variant("stepwise_tree", ("group.size=48", "group.per_iteration=6")),
    "stepwise_tree, average": Variant("stepwise_tree", MEAN),
    # Windows that reach every step: in each update, or one after the other.
    "stepwise_tree, spread": Variant("stepwise_tree", (SPREAD[0], "sampling.splits=[0.5]")),
    "stepwise_tree, spread, short tail": Variant(
        "stepwise_tree", (SPREAD[0], *SHORT_TAIL, "sampling.splits=[0.5]")
    ),
    "stepwise_tree, spread, lr=0.004": Variant(
        "stepwise_tree", (SPREAD[0], "sampling.splits=[0.5]", "learner.learning_rate=4e-3")
    ),
    "stepwise_tree, spread, lr=0.004, average": Variant(
        "stepwise_tree", (SPREAD[0], "sampling.splits=[0.5]", "learner.learning_rate=4e-3", *MEAN)
    ),
    "stepwise_fast, spread": Variant("stepwise_fast", SPREAD),
    "stepwise_fast, sliding": Variant("stepwise_fast", SLIDING),
    # More noise; other windows; a running mean, which allows a higher learning rate.
    **{
        f"stepwise_fast, noise {level}": Variant("stepwise_fast", (f"sampling.noise_level={level}",))
        for level in (1.0, 1.4)
    },
    "stepwise_fast, two thirds": Variant(
        "stepwise_fast", ("sampling.window={rule: random, size: 3, within: [0.0, 0.67]}",)
    ),
    "stepwise_fast, four steps": Variant(
        "stepwise_fast", ("sampling.window={rule: random, size: 4, within: [0.0, 0.67]}",)
    ),
    "stepwise_fast, any window": Variant("stepwise_fast", ANYWHERE),
    "stepwise_fast, average": Variant("stepwise_fast", MEAN),
    "stepwise_fast, lr=0.004, average": Variant("stepwise_fast", ("learner.learning_rate=4e-3", *MEAN)),
    # One stochastic step from one state for all members: their ranking is that step's own, and all share its velocity.
    **{
        f"one step, noise {level}": Variant("flow_grpo", (*SINGLE, *WEIGHTS, f"sampling.noise_level={level}"))
        for level in (0.7, 1.0, 1.4)
    },
    **{
        f"one step, noise 1.0, {name}": Variant("flow_grpo", (*SINGLE, *WEIGHTS, "sampling.noise_level=1.0", *keys))
        for name, keys in {
            "groups of 12": ("group.size=12", "group.per_iteration=24"),
            "24 groups": ("group.per_iteration=24",),
            "lr=0.001": ("learner.learning_rate=1e-3",),
        }.items()
    },
    "two steps, uniform, noise 1.0": Variant(
        "flow_grpo", (*TWO_STEPS, *WEIGHTS, "sampling.shared_noise=true", "sampling.noise_level=1.0")
    ),
    # Two noise levels of each image instead of five.
    "diffusion_nft, two levels": Variant("diffusion_nft", ("learner.step_fraction=0.4",)),
    # Four optimizer steps in an iteration where the preset has two, at the same cost.
    "flow_grpo_fast, 4 updates": Variant("flow_grpo_fast", FOUR_UPDATES),
    "calibrated, tweedie, first half, tiny, 4 updates": Variant(
        "stepwise_calibrated", (*TWEEDIE, *FIRST_HALF, *TINY, *FOUR_UPDATES)
    ),
    # Every second point only; its steps share what they earned.
    "calibrated, every 2": Variant("stepwise_calibrated", ("completion.every=2",)),
    # The other ELBO policy gradients, and NormGuard on the demo's method.
    "elbo, EPG": Variant("elbo", ("learner.forward.loss=epg",)),
    "elbo, PAR": Variant("elbo", ("learner.forward.loss=par",)),
    "elbo, no ratio": Variant("elbo", ("learner.forward.has_ratio=false",)),
    # The first weight only shows the ratio of the norms.
    **{
        f"stepwise_tree, NormGuard {weight}": Variant("stepwise_tree", (f"learner.norm_guard={weight}",))
        for weight in (1e-9, 0.03, 0.1, 0.3)
    },
    # What could make it unsteady: two updates with one rollout, few pairs, the last step of the walk.
    "stepwise_tree, one update": Variant("stepwise_tree", ("learner.updates_per_iteration=1",)),
    # Credit of single steps in the forward process: the step's own advantage at its noise level.
    "diffusion_nft, step credit": Variant("diffusion_nft", STEP_CREDIT),
    "calibrated, first half": Variant("stepwise_calibrated", FIRST_HALF),
    "calibrated, first half, cps": Variant(
        "stepwise_calibrated",
        (
            *FIRST_HALF,
            *("sampling.kernel=cps", "sampling.noise_level=0.8", "sampling.log_prob=squared"),
            "credit.step_weights.rule=none",
        ),
    ),
    "flow_grpo, weights, first half": Variant(
        "flow_grpo", (*WEIGHTS, *FIRST_HALF)
    ),
    "flow_grpo, weights": Variant("flow_grpo", WEIGHTS),
    **{look: Variant(name, (f"learner.learning_rate={rate}",)) for (name, rate), look in LOOKS.items()},
}  # fmt: skip

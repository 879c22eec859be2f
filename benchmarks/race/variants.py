"""The variants of the race: every method, and the changes that a page shows a figure of."""

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
    # The preset `toy_ocr`.
    "ocr": (
        "model.path=pkg://toyworld/sign_model",
        "data.train=pkg://toyworld/prompts/signs_train.jsonl",
        "data.heldout=pkg://toyworld/prompts/signs_heldout.jsonl",
        "data.tags=[]",
        "group.per_iteration=8",
        "rewards={geneval: null, ocr: {scorer: ocr, batch: 16, args: {engine_args: {line_width: 96}}}}",
        "evaluation.component=ocr",
        "evaluation.images_per_prompt=4",
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

FIRST_HALF = ("sampling.window={rule: random, size: 3, within: [0.0, 0.5]}",)
"""Flow-GRPO-Fast's window; with six steps it always holds the first three."""
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


@dataclass(frozen=True)
class Variant:
    """A method with config keys."""

    method: str
    keys: tuple[str, ...] = ()


VARIANTS: Mapping[str, Variant] = {
    **{name: Variant(name) for name in METHODS},
    "dance_grpo, noise 0.7": Variant("dance_grpo", ("sampling.noise_level=0.7",)),
    # The parts of stepwise_calibrated: without weights, lambda and the iteration's std; Tweedie's estimate; the weights
    # alone with uniform credit.
    "calibrated, plain gains": Variant(
        "stepwise_calibrated",
        ("credit.rule=gains", "credit.scale=prompt", "credit.normalise=joint", "credit.step_weights.rule=none"),
    ),
    "calibrated, tweedie": Variant("stepwise_calibrated", ("completion.rule=tweedie",)),
    "calibrated, first half": Variant("stepwise_calibrated", FIRST_HALF),
    "flow_grpo, weights": Variant("flow_grpo", WEIGHTS),
    "flow_grpo, weights, first half": Variant("flow_grpo", (*WEIGHTS, *FIRST_HALF)),
    "flow_grpo, lr=0.004": Variant("flow_grpo", ("learner.learning_rate=4e-3",)),
    # The point decoded by a small decoder.
    "stepwise_fast, tiny": Variant("stepwise_fast", ("model.tiny_decoder=pkg://toyworld/tiny_decoder",)),
    # The scored point completed by two Euler substeps, which takes one forward for each trajectory.
    "stepwise_fast, T'=2": Variant(
        "stepwise_fast", ("completion={rule: ode, substeps: 2, spacing: even, solver: euler, every: 2, tapers: false}",)
    ),
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
    "stepwise_fast, groups of 36": Variant("stepwise_fast", ("group.size=36",)),
    "stepwise_fast, lr=0.004, decay": Variant(
        "stepwise_fast", ("learner.learning_rate=4e-3", "learner.decay={iterations: 30, to: 1e-3}")
    ),
    # More noise; other windows; a running mean; a higher learning rate.
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
    "stepwise_fast, lr=0.004": Variant("stepwise_fast", ("learner.learning_rate=4e-3",)),
    # One stochastic step from one state for all members: their ranking is that step's own, and all share its velocity.
    "one step, noise 1.0": Variant("flow_grpo", (*SINGLE, *WEIGHTS, "sampling.noise_level=1.0")),
    "elbo, no ratio": Variant("elbo", ("learner.forward.has_ratio=false",)),
}  # fmt: skip

"""The variants of the races: methods, and changes of them that a page shows a figure of."""

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
    # The task of the preset `toy_ocr`.
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
METHODS = (
    *("flow_grpo", "stepwise", "stepwise_flow_sde", "dense_grpo", "tp_grpo", "stepwise_calibrated", "stepwise_fast"),
    *("stepwise_tree", "flow_grpo_fast", "tp_grpo_plain", "diffusion_nft", "awm", "dgpo", "elbo", "ram"),
)

FIRST_HALF = ("sampling.window={rule: random, size: 3, within: [0.0, 0.5]}",)
"""Flow-GRPO-Fast's window; with six steps it always holds the first three."""
TWO_STEPS = ("sampling.window={rule: random, size: 2, within: [0.0, 0.5]}",)
SHORT_TAIL = ("sampling.tail={rule: ode, substeps: 2, spacing: schedule, solver: adams}",)
"""Two steps of second order behind the window, where with six steps the schedule has three or four."""
SPREAD = "sampling.window={rule: spread, size: 2, within: [0.0, 1.0]}"
WEIGHTS = ("credit.step_weights={rule: noise, noise_power: 2.0}",)
MEAN = ("learner.average={decay: 0.8, every: 1, repeats: 1}", "evaluation.adapter=average")


@dataclass(frozen=True)
class Variant:
    """A method with config keys."""

    method: str
    keys: tuple[str, ...] = ()


VARIANTS: Mapping[str, Variant] = {
    **{name: Variant(name) for name in METHODS},
    "dance_grpo, noise 0.7": Variant("dance_grpo", ("sampling.noise_level=0.7",)),
    "calibrated, plain gains": Variant(  # without weights, lambda and the iteration's std
        "stepwise_calibrated",
        ("credit.rule=gains", "credit.scale=prompt", "credit.normalise=joint", "credit.step_weights.rule=none"),
    ),
    "calibrated, first half": Variant("stepwise_calibrated", FIRST_HALF),
    "flow_grpo, weights": Variant("flow_grpo", WEIGHTS),
    "flow_grpo, weights, first half": Variant("flow_grpo", (*WEIGHTS, *FIRST_HALF)),
    "stepwise_tree, groups of 36": Variant("stepwise_tree", ("group.size=36",)),  # as the demo
    "stepwise_tree, groups of 36, short tail, lr=0.003, decay": Variant(  # as toy_pickscore
        "stepwise_tree",
        ("group.size=36", *SHORT_TAIL, "learner.learning_rate=3e-3", "learner.decay={iterations: 45, to: 5e-4}"),
    ),
    **{  # lower rates: more diverse
        f"stepwise_tree, groups of 36, short tail, lr={rate}, decay": Variant(
            "stepwise_tree",
            ("group.size=36", *SHORT_TAIL, f"learner.learning_rate={rate}", "learner.decay={iterations: 45, to: 5e-4}"),
        )
        for rate in (0.0015, 0.001, 0.0008)
    },
    "stepwise_tree, groups of 36, short tail, lr=0.001": Variant(
        "stepwise_tree", ("group.size=36", *SHORT_TAIL, "learner.learning_rate=1e-3")
    ),
    **{f"{name}, groups of 36": Variant(name, ("group.size=36",)) for name in ("awm", "dgpo")},  # does it help rivals?
    "awm, decay": Variant("awm", ("learner.decay={iterations: 35, to: 5e-4}",)),
    "dgpo, decay": Variant("dgpo", ("learner.decay={iterations: 15, to: 5e-4}",)),
    "stepwise_tree, noise 0.7": Variant("stepwise_tree", ("sampling.noise_level=0.7",)),
    "stepwise_tree, noise 0.7, lr=0.003, decay": Variant(
        "stepwise_tree",
        ("sampling.noise_level=0.7", "learner.learning_rate=3e-3", "learner.decay={iterations: 30, to: 5e-4}"),
    ),
    "awm, groups of 36, decay": Variant("awm", ("group.size=36", "learner.decay={iterations: 25, to: 5e-4}")),
    "dgpo, groups of 36, decay": Variant("dgpo", ("group.size=36", "learner.decay={iterations: 10, to: 5e-4}")),
    "stepwise_tree, groups of 32": Variant("stepwise_tree", ("group.size=32",)),
    # About as many images as twelve groups of 24, from fewer prompts.
    "stepwise_tree, 8 groups of 32": Variant("stepwise_tree", ("group.size=32", "group.per_iteration=8")),
    "stepwise_tree, 6 groups of 48": Variant("stepwise_tree", ("group.size=48", "group.per_iteration=6")),
    "stepwise_tree, per step": Variant("stepwise_tree", ("credit.normalise=per_step",)),
    "stepwise_tree, per step, two splits": Variant(  # trees of four, which split at the last two steps
        "stepwise_tree", ("credit.normalise=per_step", "sampling.splits=[0.3,0.6]")
    ),
    "stepwise_tree, average": Variant("stepwise_tree", MEAN),
    "stepwise_fast, groups of 36": Variant("stepwise_fast", ("group.size=36",)),
    "stepwise_fast, lr=0.004": Variant("stepwise_fast", ("learner.learning_rate=4e-3",)),
    "stepwise_fast, lr=0.004, decay": Variant(
        "stepwise_fast", ("learner.learning_rate=4e-3", "learner.decay={iterations: 30, to: 1e-3}")
    ),
    "stepwise_fast, noise 1.0": Variant("stepwise_fast", ("sampling.noise_level=1.0",)),
    "stepwise_fast, noise 1.4": Variant("stepwise_fast", ("sampling.noise_level=1.4",)),
    "stepwise_fast, average": Variant("stepwise_fast", MEAN),
    "stepwise_fast, short tail": Variant("stepwise_fast", SHORT_TAIL),
    "stepwise_fast, two steps": Variant("stepwise_fast", (*TWO_STEPS, "completion.every=1")),
    "stepwise_fast, two steps, short tail": Variant("stepwise_fast", (*TWO_STEPS, *SHORT_TAIL, "completion.every=1")),
    "stepwise_fast, four steps": Variant(
        "stepwise_fast", ("sampling.window={rule: random, size: 4, within: [0.0, 0.67]}",)
    ),
    "stepwise_fast, any window": Variant(
        "stepwise_fast", ("sampling.window={rule: random, size: 3, within: [0.0, 1.0]}",)
    ),
    # Two steps of every level in each update.
    "stepwise_fast, spread": Variant("stepwise_fast", (SPREAD, "completion.every=1")),
    "stepwise_tree, spread": Variant("stepwise_tree", (SPREAD, "sampling.splits=[0.5]")),
}
"""The methods as they are, and changes of them by what differs; a name is that of its run folder too."""

"""The config refuses what it does not know, with the remedy in one line."""

import copy
import math
import re
from datetime import date
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.support.paths import ROOT

TREE: dict[str, Any] = {
    "iterations": 3,
    "model": {"path": "models/sd3"},
    "data": {"train": "a.txt", "heldout": "b.txt"},
    "rewards": {"geneval": {"scorer": "geneval"}},
}
ODE = {"kernel": "ode", "shared_noise": False}


def with_value(key: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(TREE)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return tree


def sections(model: type[BaseModel], seen: list[type[BaseModel]]) -> list[type[BaseModel]]:
    """The model and all models among its fields."""
    if model not in seen:
        seen.append(model)
        for field in model.model_fields.values():
            for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    sections(part, seen)
    return seen


def test_defaults_are_the_papers() -> None:
    config = parse_config(TREE)
    assert (config.sampling.steps, config.sampling.noise_level, config.group.size) == (10, 0.7, 24)
    assert (config.learner.learning_rate, config.learner.clip_range, config.learner.weight_decay) == (3e-4, 1e-4, 1e-4)
    assert (config.credit.epsilon, config.credit.advantage_clip) == (1e-4, 5.0)
    assert config.scores_points


def test_the_learning_rate_falls_in_a_straight_line_and_stays() -> None:
    learner = parse_config(
        with_value("learner", {"learning_rate": 3e-3, "decay": {"iterations": 5, "to": 5e-4}})
    ).learner
    assert [learner.rate(done) for done in (0, 1, 2, 5, 99)] == pytest.approx([3e-3, 2.5e-3, 2e-3, 5e-4, 5e-4])
    assert parse_config(TREE).learner.rate(99) == 3e-4


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        ({}, 10),
        ({"completion": {"every": 3}}, 4),
        ({"completion": {"every": 9}}, 2),
        ({"credit": {"rule": "uniform"}}, 1),
    ],
)
def test_images_of_a_trajectory_are_counted(tree: dict[str, Any], count: int) -> None:
    assert parse_config(TREE | tree).images_per_member == count


def test_a_shard_that_is_left_out_is_the_whole_group() -> None:
    assert parse_config(with_value("group.size", 16)).group.shard == 16
    assert parse_config(with_value("group", {"size": 16, "shard": 4})).group.shard == 4


def test_the_default_completion_is_the_one_that_the_fidelity_table_favours() -> None:
    completion = parse_config(TREE).completion
    keys = (completion.rule, completion.solver, completion.spacing, completion.substeps, completion.tapers)
    assert keys == ("ode", "adams", "schedule", 5, True)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("iteration", "'iteration': .*'iterations'"),
        ("group.sise", "'group.sise': .*'size'"),
        ("model.lora.rnk", "'model.lora.rnk': .*'rank'"),
        ("cluster.rollout.thread", "'cluster.rollout.thread': .*'threads'"),
        ("learning_rate", "'learning_rate': .*'learner.learning_rate'"),
        ("group.learnin_rate", "'group.learnin_rate': .*'learner.learning_rate'"),
        ("rewards.geneval.wieght", "'rewards.geneval.wieght': .*'weight'"),
        ("completion.zzz", "'completion.zzz': .*every, .*tapers"),
        ("lr", "'lr': .*learner.learning_rate"),
        ("batch_size", "'batch_size': .*group.per_iteration.*group.size"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(with_value(key, 1))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("iterations", "many", "iterations: .*got 'many'"),
        ("iterations", 0, "iterations: .*greater than or equal to 1, got 0"),
        ("group.size", 1, "group.size must be at least 2, got 1"),
        ("group", {"size": 25, "shard": 24}, "group.shard must divide group.size 25, got 24"),
        ("group", {"size": 8, "shard": 3}, "group.shard must divide group.size 8, got 3"),
        ("learner.updates_per_iteration", 5, "must divide group.per_iteration 12, got 5"),
        (
            "sampling.kernel",
            "ddim",
            "sampling.kernel: .*'flow_sde', .*got 'ddim'",
        ),
        ("sampling", {"kernel": "ddim_sde", "noise_level": 1.5}, "at most 1 for ddim_sde, got 1.5"),
        ("sampling", {"kernel": "cps", "noise_level": 1.1}, "at most 1 for cps, got 1.1"),
        (
            "sampling",
            {"steps": 3, "noise_levels": [0.5, -1.0]},
            r"noise_levels\[1\] must be above 0, got -1.0",
        ),
        ("credit.step_weights", {"rule": "table", "table": [0.0] * 10}, "must hold a weight above 0, got "),
        ("sampling.noise_level", 0.0, "must be above 0, got 0.0"),
        ("sampling.noise_levels", [0.5, 0.5], "each of 9 steps .*, got 2"),
        ("sampling.log_prob", "squared", "must be `gaussian` for flow_sde, got 'squared'"),
        ("sampling.window", {"rule": "fixed", "first": 9, "size": 2}, "steps 0 to 9, got 9 to 10"),
        ("sampling.window", {"rule": "fixed", "first": -1}, "steps 0 to 9, got -1 to 0"),
        ("sampling.window", {"rule": "random", "size": 3, "within": [0.0, 0.2]}, "3 of 10 steps, got 2"),
        ("sampling.window", {"rule": "sliding", "size": 11}, "11 of 10 steps, got 10"),
        ("sampling.window.within", [0.0, 1.5], "sampling.window.within.1: .*got 1.5"),
        ("data.tags", "x", r"data.tags must be a list .*got 'x'"),
        ("completion.substeps", 0, "completion.substeps: .*equal to 1, got 0"),
        ("sampling.splits", [0.5, 0.2], r"sampling.splits must ascend, got \[0.5, 0.2\]"),
        ("sampling.tail.substeps", 0, "sampling.tail.substeps: .*equal to 1, got 0"),
        ("credit.rule", "gain", "credit.rule must be one of .*got 'gain': .*'gains'"),
        ("credit.step_weights", {"rule": "table", "table": [1.0]}, "a weight for each of 10 steps, got 1"),
        ("evaluation.adapter", "average", "needs a running mean, got learner.average.decay 0"),
        ("credit.gae_lambda", 1.5, "credit.gae_lambda: .*got 1.5"),
        ("model.guidance", 0.5, "model.guidance: .*got 0.5"),
        ("seed", -1, "seed: .*got -1"),
        ("rewards", {}, "rewards: "),
        ("rewards.geneval", {"weight": 2.0}, "rewards.geneval.scorer must be given"),
        ("evaluation.component", "genval/strict", r"\['geneval'\], got 'genval'"),
        ("model", "sd3", "model is a section, got 'sd3': write model.path=sd3"),
        ("learner.learning_rate", float("nan"), "learner.learning_rate: "),
        ("learner.decay", {"iterations": 5, "to": 1e-3}, r"0.0003.*got 0.001"),
        ("learner.decay", {"iterations": 5}, "learner.decay.to"),
        ("learner.decay", {"iterations": 0, "to": 1e-5}, "learner.decay.iterations: .*got 0"),
        ("learner.learning_rate", float("inf"), "learner.learning_rate: "),
    ],
)
def test_a_wrong_value_is_refused_with_rule_and_value(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(with_value(key, value))


@pytest.mark.parametrize("key", ["iterations", "model", "model.path", "data.train", "rewards"])
def test_what_has_no_default_must_be_given(key: str) -> None:
    tree = copy.deepcopy(TREE)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    del node[last]
    with pytest.raises(ConfigError, match=f"{key} must be given"):
        parse_config(tree)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"sampling": {"kernel": "ddim_sde"}, "learner": {"kl": {"weight": 0.1, "rule": "no_dt"}}},
            "'dance_sde'], got 'ddim_sde'",
        ),
        (
            {"sampling": {"kernel": "cps"}, "learner": {"objective": "guarded"}},
            "'dance_sde'], got 'cps'",
        ),
        (
            {"group": {"size": 8, "shard": 4}, "learner": {"objective": "dgpo"}},
            "group.shard must be group.size 8 for objective dgpo, got 4",
        ),
        (
            {"rewards": {"a": {"scorer": "ocr", "weight": 0}, "b": {"scorer": "ocr", "use": "evaluate"}}},
            "other than 0, got 0 for ['a']",
        ),
        (
            {"sampling": {"granularities": [1, 2], "tail": {"substeps": 2}}, "credit": {"rule": "uniform"}},
            "got rule ode and solver adams",
        ),
        (
            {
                "sampling": {"kernel": "ode", "shared_noise": False, "tail": {"rule": "tweedie"}},
                "learner": {"objective": "nft"},
            },
            "`schedule` for kernel ode, got 'tweedie'",
        ),
        (
            {"learner": {"objective": "elbo", "old": {"rolls_out_after": 500}}},
            "objective elbo, got 500",
        ),
        (
            {"learner": {"objective": "elbo", "old": {"weight": 1.0}}},
            "learner.old.weight must be left out for objective elbo, got 1.0: only awm uses it",
        ),
        ({"learner": {"forward": {"loss": "epg"}}}, "objective clipped, got 'epg': only elbo"),
        ({"credit": {"scale": 0}}, "a number above 0, got 0"),
        ({"credit": {"scale": 10.0}}, "as credit.scale, got 'per_step'"),
        ({"sampling": {"granularities": [2, 1]}}, "sampling.granularities must ascend from 1, got [2, 1]"),
        (
            {"sampling": {"granularities": [1, 2]}, "credit": {"rule": "gains"}},
            "sampling.granularities beyond [1] needs credit.rule uniform",
        ),
        (
            {"completion": {"every": 2}, "credit": {"rule": "turning_point"}},
            "completion.every must be 1 for credit.rule turning_point",
        ),
        (
            {"sampling": {"kernel": "ode"}},
            "sampling.shared_noise must be false for kernel ode, got true",
        ),
        (
            {"sampling": {**ODE, "noise_levels": [0.5] * 9}},
            "sampling.noise_levels must be empty for kernel ode, got 9",
        ),
        (
            {"sampling": ODE},
            "['nft', 'awm', 'dgpo', 'elbo', 'ram'], got learner.objective 'clipped'",
        ),
        (
            {"sampling": ODE, "learner": {"objective": "nft"}},
            "credit.rule must be `uniform` for sampling.kernel ode, got 'gae'",
        ),
        (
            {"sampling": ODE, "learner": {"objective": "awm"}, "credit": {"rule": "uniform"}},
            "credit.step_weights.rule must not be `noise` for sampling.kernel ode",
        ),
        (
            {"learner": {"objective": "awm", "kl": {"weight": 0.1}}},
            "learner.kl.rule must be `velocity` for objective awm, got 'full'",
        ),
        (
            {"sampling": {"splits": [0.5]}, "credit": {"rule": "tree"}, "group": {"size": 4, "shard": 1}},
            "group.shard must be at least 2 with sampling.splits, got 1",
        ),
        (
            {"sampling": {"window": {"rule": "branch"}}, "group": {"size": 4, "shard": 1}},
            "group.shard must be at least 2 with sampling.window.rule branch, got 1",
        ),
    ],
)
def test_parts_of_a_method_that_do_not_fit_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(TREE | sections)


def test_rollout_actors_keep_the_adapters_of_rollouts_and_of_evaluations() -> None:
    """Two for each iteration in flight where evaluations use another adapter than the rollouts."""

    def held(**learner: Any) -> int:
        return parse_config(TREE | {"learner": learner, "group": {"size": 4, "max_lag": 1}}).held_adapters

    assert held() == 2
    assert held(objective="awm") == 2
    assert held(objective="nft") == 4
    assert held(objective="awm", old={"rolls_out_after": 500}) == 4


def test_the_tree_is_frozen() -> None:
    config = parse_config(TREE)
    with pytest.raises(ValidationError, match="frozen"):
        config.iterations = 4
    with pytest.raises(ValidationError, match="frozen"):
        config.group.size = 4


def test_the_whole_tree_survives_yaml() -> None:
    config = parse_config(with_value("rewards.geneval.args", {"reward": "soft"}))
    assert parse_config(yaml.safe_load(config.to_yaml())) == config


def test_only_what_may_change_a_result_counts_in_the_outcome_fields() -> None:
    base = parse_config(TREE).outcome_fields()
    for key, value in (
        ("iterations", 9),
        ("cluster.rollout_actors", 7),
        ("cluster.rollout.cpus", 0.5),
        ("rewards.geneval.actors", 3),
        ("rewards.geneval.gpus", 0.0),
        ("checkpoint.every", 1),
    ):
        assert parse_config(with_value(key, value)).outcome_fields() == base, key
    for key, value in (
        ("seed", 1),
        ("cluster.rollout.threads", 2),
        ("rewards.geneval.args", {"actors": 2}),
        ("rewards.geneval.weight", 2.0),
        ("rewards.geneval.gpus", 0.5),
        ("group.shard", 12),
        ("learner.clip_range", 1e-5),
    ):
        assert parse_config(with_value(key, value)).outcome_fields() != base, key


def test_every_field_is_read_somewhere() -> None:
    packages = ("protocol", "flow", "rewards", "toyworld", "learner", "actors", "deploy")
    sources = "\n".join(
        path.read_text() for name in packages for path in (ROOT / name).rglob("*.py") if path.name != "config.py"
    )
    names = {name for section in sections(RunConfig, []) for name in section.model_fields}
    unread = sorted(name for name in names if not re.search(rf"\.{name}\b", sources))
    assert not unread


def test_every_field_says_what_it_means() -> None:
    known = sections(RunConfig, [])
    silent = [
        f"{section.__name__}.{name}"
        for section in known
        for name, field in section.model_fields.items()
        if not field.description and field.annotation not in known
    ]
    assert not silent


@pytest.mark.parametrize(
    ("credit", "is_alone"),
    [
        ({"rule": "uniform", "normalise": "joint", "scale": "prompt"}, True),
        ({"rule": "uniform", "normalise": "joint", "scale": "iteration"}, False),
        ({"rule": "uniform", "normalise": "ema", "scale": "prompt"}, False),
        ({"rule": "gains", "values": "raw", "scale": "prompt"}, True),
        ({"rule": "gains", "values": "calibrated", "scale": "prompt"}, False),
        ({"rule": "turning_point", "scale": "prompt"}, False),
    ],
)
def test_credit_says_whether_it_needs_more_than_a_group(credit, is_alone):
    assert parse_config({**TREE, "credit": credit}).credits_groups_alone is is_alone


@pytest.mark.parametrize("workers", [3, 16])
def test_workers_that_do_not_divide_the_lanes_are_refused(workers):
    rule = f"cluster.learner.workers must divide learner.lanes 8, got {workers}"
    with pytest.raises(ConfigError, match=rule):
        parse_config({**TREE, "cluster": {"learner": {"workers": workers}}})


def test_lanes_are_a_power_of_two():
    with pytest.raises(ConfigError, match="learner.lanes must be a power of two, got 6"):
        parse_config({**TREE, "learner": {"lanes": 6}})


def test_lanes_belong_to_a_run_and_workers_do_not():
    fields = parse_config(TREE).outcome_fields()
    assert "learner.lanes" in fields
    assert "cluster.learner.workers" not in fields


PAIRS: dict[str, Any] = {"layout": "colocated", "rollout_actors": 2, "learner": {"workers": 2}}
JOINT: dict[str, Any] = {**PAIRS, "layout": "joint"}


@pytest.mark.parametrize(
    ("sections", "rule"),
    [
        (
            {"group": {"max_lag": 1}, "cluster": PAIRS},
            "group.max_lag must be 0 with cluster.layout colocated, got 1",
        ),
        (
            {"cluster": {**PAIRS, "rollout_actors": 3}},
            "got cluster.rollout_actors 3 and cluster.learner.workers 2",
        ),
        (
            {"cluster": {**PAIRS, "rollout": {"gpus": 1}, "learner": {"workers": 2, "gpus": 0.5}}},
            "at most 1, got 1 and 0.5",
        ),
        (
            {"cluster": {**PAIRS, "rollout": {"cpus": 0}, "learner": {"workers": 2, "cpus": 0}}},
            "got no cpus, gpus or resources",
        ),
        (
            {"cluster": {**PAIRS, "rollout": {"labels": {"pool": "a"}}}},
            "got {'pool': 'a'}, default and {}, default",
        ),
        ({"cluster": {"offload": True}}, "cluster.offload needs cluster.layout colocated, got separate"),
        ({"cluster": {**JOINT, "offload": True}}, "cluster.offload needs cluster.layout colocated, got joint"),
        ({"cluster": {**JOINT, "rollout": {"threads": 2}}}, "equal threads and gpus .* got 2, 0 and 1, 0"),
        (
            {"cluster": {**JOINT, "rollout": {"gpus": 0.75}, "learner": {"workers": 2, "gpus": 0.75}}},
            "must be a whole number above 1, got 1.5",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(sections: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as refused:
        parse_config({**TREE, **sections})
    assert "\n" not in str(refused.value)


def test_a_layout_changes_no_result_and_its_sides_take_turns() -> None:
    alone = {"rule": "gains", "values": "raw", "scale": "prompt"}
    separate, *others = (
        parse_config({**TREE, "credit": alone, "cluster": each}) for each in ({}, {**PAIRS, "offload": True}, JOINT)
    )
    assert (separate.trains_early, separate.overlaps) == (True, True)
    for other in others:
        assert (other.trains_early, other.overlaps) == (False, False)
        assert separate.outcome_fields() == other.outcome_fields()


def test_a_joint_process_may_have_several_gpus() -> None:
    sides = {"rollout": {"gpus": 1}, "learner": {"workers": 2, "gpus": 1}}
    assert parse_config({**TREE, "cluster": {**JOINT, **sides}}).cluster.joint_role.gpus == 2


@pytest.mark.parametrize("key", ["iterations", "group.max_lag", "learner.kl.weight", "model.guidance", "learner.lanes"])
def test_a_truth_value_is_no_number(key: str) -> None:
    """YAML reads `yes` as true, and pydantic would take it as 1."""
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: input should be a number, got True$"):
        parse_config(with_value(key, True))
    for switch in ("model.gradient_checkpointing", "cluster.offload"):
        parse_config(with_value(switch, False))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learner.betas", [0.9, False]),
        ("sampling.window.within", [False, True]),
        ("sampling.granularities", [True]),
        ("cluster.rollout.resources", {"slot": True}),
    ],
)
def test_a_truth_value_is_no_number_in_a_list_or_a_mapping_either(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key}: input should hold numbers, got {value}')}$"):
        parse_config(with_value(key, value))
    parse_config(with_value("rewards.geneval.args", {"switch": True, "switches": [True]}))


def test_an_adapter_needs_a_target() -> None:
    """PEFT takes an empty list as modules of its own choice."""
    parse_config(with_value("model.lora.targets", ["attn.to_q"]))
    parse_config(with_value("model.lora.targets", None))
    with pytest.raises(ConfigError, match="^model.lora.targets: .* at least 1 item"):
        parse_config(with_value("model.lora.targets", []))


def test_a_board_keeps_a_run_for_a_number_of_days_that_redis_can_hold() -> None:
    parse_config(with_value("status.keep_days", 36500))
    with pytest.raises(ConfigError, match="^status.keep_days: input should be less than or equal to 36500"):
        parse_config(with_value("status.keep_days", 1e300))


@pytest.mark.parametrize("key", ["guards.hacking", "status.board"])
def test_off_may_be_written_without_quotes(key: str) -> None:
    """YAML reads `off` as false."""
    assert parse_config(with_value(key, False)) == parse_config(with_value(key, "off"))
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: input should be .*, got True$"):
        parse_config(with_value(key, True))


@pytest.mark.parametrize("key", ["rewards.geneval.args", "rewards.geneval.runtime_env"])
def test_what_a_run_folder_would_give_back_as_something_else_is_refused(key: str) -> None:
    """A resumed run reads its config from YAML, where the key 1 would be the text '1', and a date a text."""
    kept = {"a": "x", "b": [1, 2.5, None], "c": {"d": True, "e": []}}
    config = parse_config(with_value(key, kept | {"f": (1, 2)}))
    assert parse_config(yaml.safe_load(config.to_yaml())) == config
    itself: dict[str, Any] = {}
    itself["x"] = itself
    for odd in ({"x": {1: 2}}, {"x": [date(2020, 1, 1)]}, {"x": {"a"}}, {"x": b"a"}, {"x": math.inf}, {1: 2}, itself):
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}[^:]*: input should ") as refused:
            parse_config(with_value(key, odd))
        assert "\n" not in str(refused.value)


def test_a_config_that_is_no_mapping_is_named_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="^the config: input should be a valid dictionary.*got None"):
        parse_config(None)  # type: ignore[arg-type]

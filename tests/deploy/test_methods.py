"""Named methods: each can be laid over any preset, means the same everywhere, and yields to the user's own keys."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import presets
from deploy.presets import load_config, merge, method_names, method_of, read_method
from flow.maths.windows import splits_of
from protocol.config.credit import needs_of
from protocol.config.run import RunConfig, flatten
from protocol.errors import ConfigError
from tests.support.paths import ROOT

PRESETS = sorted((ROOT / "deploy" / "presets").glob("*.yaml"))
METHODS = {
    "awm", "branch_grpo", "dance_grpo", "dense_grpo", "dgpo", "dgpo_ema", "diffusion_nft", "e_grpo", "elbo",
    "flow_dppo", "flow_grpo", "flow_grpo_fast", "granular_grpo", "grpo_guard", "mix_grpo", "ram", "step_weights",
    "stepwise", "stepwise_calibrated", "stepwise_fast", "stepwise_flow_sde", "stepwise_tree", "temp_flow", "tp_grpo",
    "tp_grpo_plain",
}  # fmt: skip
WINDOWS = {
    "all": set(),
    "fixed": {"first", "size"},
    "random": {"size", "within"},
    "sliding": {"size", "within", "every", "shrinks"},
    "branch": {"within"},
}
"""The keys that each window rule reads; a method says these too."""


def test_the_methods_of_the_papers_and_our_own_are_there() -> None:
    assert set(method_names()) == METHODS


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_file_states_only_what_it_changes_and_all_that_its_window_and_points_need(name: str) -> None:
    written = yaml.safe_load((presets.METHODS / f"{name}.yaml").read_text())
    assert isinstance(written["about"], str)
    assert written.keys() <= {"about", "base", "identity", "settings"}
    under = read_method(written["base"]) if "base" in written else base()
    for part in ("identity", "settings"):
        above = flatten(under[part])
        repeated = [key for key, value in flatten(written.get(part, {})).items() if above.get(key, ...) == value]
        assert not repeated, f"{part}: the base says these too"
    identity = read_method(name)["identity"]
    assert flatten(base()["identity"]).keys() <= flatten(identity).keys()
    window = identity["sampling"]["window"]
    scale = read_method(name)["settings"].get("sampling", {}).get("window", {})
    assert WINDOWS[window["rule"]] <= window.keys() | scale.keys()
    if needs_of(identity["credit"]["rule"]).needs_points:
        assert {"rule", "solver", "every"} <= identity["completion"].keys()


def test_the_docs_say_of_every_paper_what_differs_from_its_release() -> None:
    page = (ROOT / "docs" / "method" / "methods.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(\w+)`", page.partition("## What differs from the sources")[2].partition("\n## ")[0]))
    methods: dict[str, set[str]] = {}
    for name in METHODS:
        for paper in re.findall(
            r"arXiv (\d{4}\.\d{5})", yaml.safe_load((presets.METHODS / f"{name}.yaml").read_text())["about"]
        ):
            methods.setdefault(paper, set()).add(name)
    assert len(methods) > 15
    assert {paper for paper, names in methods.items() if not names & told} == set()


def test_a_method_resets_every_key_of_the_base_and_keeps_the_rest_of_a_preset(tmp_path: Path) -> None:
    other = {
        "sampling": {
            "kernel": "cps",
            "noise_level": 0.3,
            "log_prob": "squared",
            "std_min": 0.01,
            "window": {"size": 5},
        },
        "credit": {"rule": "gains", "ddof": 1, "step_weights": {"rule": "noise", "noise_constant": 9.0}},
        "learner": {"objective": "masked", "step_fraction": 0.3, "max_grad_norm": 7.0},
    }
    config = load_config(bare(tmp_path, **other), overrides=["method=flow_grpo"]).flat_fields()
    expected = flatten(base()["identity"]) | {"sampling.shared_noise": False, "credit.scale": "iteration"}
    assert {key: config[key] for key in expected} == expected
    assert (config["sampling.window.size"], config["learner.max_grad_norm"]) == (5, 7.0)


@pytest.mark.parametrize(("index", "name"), list(enumerate(sorted(METHODS))))
def test_every_method_can_be_laid_over_presets_and_keeps_their_model(index: int, name: str) -> None:
    """Over two presets each, so that every preset meets four methods."""
    identity = read_method(name)["identity"]
    for path in (PRESETS[index % len(PRESETS)], PRESETS[(3 * index + 1) % len(PRESETS)]):
        config = load_config(path, overrides=[f"method={name}"])
        assert config.sampling.kernel == identity["sampling"]["kernel"]
        assert (config.credit.rule, config.credit.normalise) == tuple(
            identity["credit"][key] for key in ("rule", "normalise")
        )
        assert config.model.path == yaml.safe_load(path.read_text())["model"]["path"]


def base() -> dict[str, Any]:
    return yaml.safe_load((presets.METHODS / "base.yaml").read_text())


def bare(tmp_path: Path, **sections: Any) -> Path:
    tree = {
        "iterations": 3,
        "model": {"path": "models/sd3"},
        "data": {"train": "a.txt", "heldout": "b.txt"},
        "rewards": {"geneval": {"scorer": "geneval"}},
        **sections,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_settings_stand_where_a_preset_is_silent_and_identity_over_it(tmp_path: Path) -> None:
    path = bare(tmp_path, sampling={"kernel": "ddim_sde", "steps": 6}, credit={"rule": "gains"})
    config = load_config(path, overrides=["method=flow_grpo"])
    assert (config.sampling.kernel, config.credit.rule) == ("flow_sde", "uniform"), "identity"
    assert config.sampling.steps == 6, "the preset's own"
    assert (config.learner.kl.weight, config.learner.kl.rule) == (0.04, "no_dt"), "settings"
    assert config.evaluation.adapter == "average"


def test_the_running_mean_moves_twice_at_each_turn_but_in_one_method() -> None:
    averages = {name: read_method(name)["settings"].get("learner", {}).get("average", {}) for name in METHODS}
    turns = {name: average.get("repeats", 1) for name, average in averages.items() if average.get("every") == 8}
    assert len(turns) > 8
    assert {name for name, repeats in turns.items() if repeats != 2} == {"grpo_guard"}


def test_the_user_s_own_keys_win_whatever_their_order(tmp_path: Path) -> None:
    for overrides in (["method=flow_grpo", "credit.rule=gains"], ["credit.rule=gains", "method=flow_grpo"]):
        config = load_config(bare(tmp_path), overrides=overrides)
        assert config.credit.rule == "gains"
        assert config.credit.scale == "iteration"


def test_a_file_may_name_its_method_and_is_stronger_than_it(tmp_path: Path) -> None:
    config = load_config(bare(tmp_path, method="tp_grpo", credit={"normalise": "joint"}))
    assert (config.credit.rule, config.credit.normalise) == ("turning_point", "joint")
    assert config.completion.rule == "schedule"
    other = load_config(bare(tmp_path, method="tp_grpo"), overrides=["method=dance_grpo"])
    assert other.learner.clip_range == 1e-4, "nothing of the file's own method remains"
    assert (other.credit.rule, other.sampling.kernel, other.credit.ddof) == ("uniform", "dance_sde", 1)


def test_a_calibrated_table_does_not_leak_into_another_method(tmp_path: Path) -> None:
    path = bare(tmp_path, sampling={"steps": 3, "kernel": "dance_sde", "noise_levels": [0.9, 0.5]})
    assert load_config(path).sampling.noise_levels == (0.9, 0.5)
    assert load_config(path, overrides=["method=stepwise"]).sampling.noise_levels == ()


def test_a_preset_s_mixture_and_smallest_std_do_not_leak_into_a_method_that_has_its_own(tmp_path: Path) -> None:
    path = bare(tmp_path, credit={"mixture": "advantages"}, sampling={"std_min": 0.0})
    found = {name: load_config(path, overrides=[f"method={name}"]) for name in METHODS}
    mixed = {name for name, config in found.items() if config.credit.mixture == "advantages"}
    assert mixed == {"mix_grpo", "dance_grpo", "granular_grpo", "stepwise_calibrated", "stepwise_fast", "stepwise_tree"}
    assert {name for name, config in found.items() if config.sampling.std_min == 0.0} == {"tp_grpo", "tp_grpo_plain"}


@pytest.mark.parametrize(("name", "hint"), [("flow_gpro", "did you mean 'flow_grpo'"), ("zzz", "known: awm, ")])
def test_an_unknown_method_is_refused_with_a_suggestion(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown method '{name}': {hint}"):
        load_config(bare(tmp_path), overrides=[f"method={name}"])
    with pytest.raises(ConfigError, match="unknown method"):
        load_config(bare(tmp_path, method=name))


def test_a_file_is_no_method_and_the_line_says_where_it_goes(tmp_path: Path) -> None:
    told = r"^method must be a name, got the file \./mine\.yaml: give a file with `method: NAME` as the preset$"
    with pytest.raises(ConfigError, match=told):
        load_config(bare(tmp_path), overrides=["method=./mine.yaml"])


def test_merging_keeps_what_only_one_tree_has() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": {"f": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": 3,
        "e": {"f": 5},
    }


def test_the_published_numbers_stand_in_the_files(tmp_path: Path) -> None:
    def laid(name: str) -> RunConfig:
        return load_config(bare(tmp_path), overrides=[f"method={name}"])

    fast = laid("flow_grpo_fast")
    assert (fast.sampling.kernel, fast.sampling.noise_level, fast.sampling.window.size) == ("cps", 0.8, 3)
    assert fast.sampling.window.bounds(10) == (0, 5)
    assert (fast.learner.clip_range, fast.group.size, fast.group.per_iteration) == (1e-5, 18, 64)
    mix = laid("mix_grpo")
    assert (mix.sampling.steps, mix.sampling.window.size, mix.sampling.window.every) == (25, 4, 25)
    assert (mix.credit.ddof, mix.credit.epsilon, mix.credit.scale) == (1, 1e-8, "prompt")
    assert mix.learner.updates_per_iteration == 4
    dance = laid("dance_grpo")
    assert (dance.sampling.noise_level, dance.learner.step_fraction, dance.credit.epsilon) == (0.3, 0.6, 1e-8)
    assert dance.learner.updates_per_iteration == 3
    turning = laid("tp_grpo")
    assert turning.credit.turning_point.is_consistent
    assert (turning.sampling.kernel, turning.sampling.noise_level, turning.sampling.log_prob) == ("cps", 0.7, "squared")
    assert (turning.learner.clip_range, turning.learner.kl.weight, turning.learner.kl.rule) == (1e-5, 1e-4, "full")
    assert not laid("tp_grpo_plain").credit.turning_point.is_consistent
    own = laid("temp_flow").credit.step_weights
    assert (own.rule, own.noise_power, own.noise_constant) == ("noise", 1.0, None)
    nft = laid("diffusion_nft")
    assert (nft.group.size, nft.group.per_iteration, nft.sampling.steps, nft.credit.advantage_clip) == (24, 48, 10, 5.0)
    assert (nft.learner.forward.beta, nft.learner.kl.weight, nft.learner.step_fraction) == (1.0, 1e-4, 0.99)
    assert (nft.learner.old.rate, nft.learner.old.flat, nft.learner.old.most) == (0.001, 0, 0.5)
    awm = laid("awm")
    assert (awm.sampling.steps, awm.learner.forward.power, awm.learner.kl.weight) == (14, 0.25, 0.001)
    assert (awm.learner.old.most, awm.learner.old.weight, awm.learner.average.decay) == (0.3, 1.0, 0.99)
    branch = laid("branch_grpo")
    assert (branch.sampling.steps, branch.group.size) == (20, 16)
    assert splits_of(branch.sampling.splits, range(19)) == (0, 3, 6, 9)
    assert (branch.sampling.noise_level, branch.learner.step_fraction, branch.learner.clip_range) == (0.3, 1.0, 1e-3)
    assert branch.credit.ddof == 1
    merged = laid("e_grpo")
    assert (merged.sampling.steps, merged.sampling.schedule, merged.sampling.merge_std) == (16, "shifted", 0.6)
    assert (merged.group.shard, merged.learner.learning_rate, merged.credit.ddof) == (12, 1e-5, 1)
    for name, compared, preference, clip, kl in (
        ("dgpo", "base", 100.0, 1e-2, 0.02),
        ("dgpo_ema", "old", 2e3, 1e-5, 1e-3),
    ):
        groups = laid(name)
        assert (groups.group.size, groups.group.shard, groups.group.per_iteration) == (16, 16, 8)
        assert (groups.sampling.window.size, groups.learner.step_fraction, groups.sampling.tail.solver) == (
            5,
            0.8,
            "dpm",
        )
        own, old = groups.learner.forward, groups.learner.old
        assert (own.compared, own.preference, own.clip_range, groups.learner.kl.weight) == (
            compared,
            preference,
            clip,
            kl,
        )
        assert (old.rate, old.flat, old.most, old.rolls_out_after) == (0.001, 1, 0.3, 500)
        assert (groups.learner.average.decay, groups.learner.average.every) == (0.9, 8)
    bound = laid("flow_dppo")
    assert (bound.group.size, bound.group.per_iteration, bound.sampling.window.size) == (16, 48, 3)
    assert bound.sampling.window.bounds(10) == (0, 5)
    assert (bound.credit.normalise, bound.credit.scale, bound.credit.ddof) == ("per_step", "iteration", 1)
    assert bound.learner.kl.weight == 0.0
    assert (bound.learner.divergence_bound, bound.learner.average.decay) == (1e-5, 0.0)
    elbo = laid("elbo")
    assert (elbo.group.size, elbo.group.per_iteration, elbo.sampling.steps, elbo.sampling.tail.solver) == (
        24,
        48,
        10,
        "dpm",
    )
    assert (elbo.credit.scale, elbo.learner.max_grad_norm, elbo.learner.kl.weight) == (10.0, 5.0, 1e-4)
    assert (elbo.learner.updates_per_iteration, elbo.learner.step_fraction, elbo.learner.old.most) == (1, 0.99, 0.5)
    assert (laid("ram").learner.objective, laid("ram").learner.forward.multiplier) == ("ram", 1.0)
    granular = laid("granular_grpo")
    assert (granular.sampling.steps, granular.sampling.granularities, granular.group.shard) == (16, (1, 2), 12)
    assert granular.sampling.window.bounds(16) == (0, 8)
    assert (granular.learner.learning_rate, granular.credit.ddof, granular.credit.mixture) == (2e-6, 1, "advantages")
    weights = laid("step_weights").credit.step_weights
    assert (weights.early, weights.middle, weights.late) == (1.8, 1.0, 1.3)


@pytest.mark.parametrize("name", ["stepwise_tree", "flow_grpo", "tp_grpo", "stepwise_calibrated"])
def test_the_method_of_a_config_is_the_one_whose_identity_it_has(name: str) -> None:
    assert method_of(load_config("toy_geneval", overrides=[f"method={name}"])) == name
    assert method_of(load_config("toy_geneval", overrides=[f"method={name}", "credit.ddof=1"])) == ""


def test_the_demo_has_the_identity_of_stepwise_tree() -> None:
    assert method_of(load_config("toy_geneval")) == "stepwise_tree"

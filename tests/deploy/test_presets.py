"""The presets are valid and hold what their papers state; files and overrides are read as a user means them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from deploy.presets import load_config, preset_names, sources
from deploy.tools.estimate import Estimate, count_evaluations, count_shard
from deploy.tools.measure import assumed_tflops
from deploy.tools.planning.plan import plan_of
from flow.models.families import FLUX, FLUX2_KLEIN, FLUX_KONTEXT, QWEN_IMAGE, QWEN_IMAGE_21, SD3, Z_IMAGE
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.prompts import read_prompts

FAMILY = {
    "flux_pickscore": FLUX,
    "kontext_edit": FLUX_KONTEXT,
    "flux2_klein_pickscore": FLUX2_KLEIN,
    "qwen_image_ocr": QWEN_IMAGE,
    "qwen_image_21_pickscore": QWEN_IMAGE_21,
    "sd35_geneval": SD3,
    "sd35_ocr": SD3,
    "sd35_pickscore": SD3,
    "z_image_pickscore": Z_IMAGE,
}
REAL = tuple(FAMILY)


TREE: dict[str, Any] = {
    "iterations": 3,
    "model": {"path": "models/sd3"},
    "data": {"train": "a.txt", "heldout": "b.txt"},
    "rewards": {"geneval": {"scorer": "geneval"}},
}


def written(folder: Path, tree: Any = TREE) -> Path:
    path = folder / "run.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def loaded(folder: Path, *overrides: str) -> RunConfig:
    return load_config(written(folder), overrides=overrides)


def test_every_preset_is_a_valid_config() -> None:
    assert set(REAL) | {"toy_geneval"} <= set(preset_names())
    for name in preset_names():
        assert isinstance(load_config(name), RunConfig)


RECIPES = {
    # T, window: size and steps, guidance, noise, members, groups, text tokens, rank
    "sd35_geneval": (10, 3, (0, 5), 1.0, 0.7, 24, 48, 128, 32),
    "sd35_ocr": (10, 3, (0, 5), 1.0, 0.7, 24, 48, 128, 32),
    "sd35_pickscore": (10, 3, (0, 5), 1.0, 0.7, 18, 64, 128, 32),
    "flux_pickscore": (6, 3, (0, 3), 1.0, 0.7, 24, 48, 128, 64),
    "kontext_edit": (6, 3, (0, 3), 1.0, 0.7, 21, 48, 128, 64),
    "flux2_klein_pickscore": (8, 2, (1, 4), 4.0, 0.7, 16, 48, 512, 64),
    "z_image_pickscore": (10, 2, (1, 4), 5.0, 0.7, 16, 48, 512, 64),
    "qwen_image_ocr": (10, 2, (0, 5), 4.0, 1.2, 16, 32, 256, 64),
    "qwen_image_21_pickscore": (10, 2, (3, 5), 1.0, 1.2, 16, 16, 256, 64),
}
"""By the released configs of Flow-GRPO (fast), Flow-Factory, verl-omni and miles-diffusion."""
TFLOPS = {
    SD3: 2.24,
    FLUX: 15.97,
    FLUX_KONTEXT: 31.66,
    FLUX2_KLEIN: 10.19,
    Z_IMAGE: 18.74,
    QWEN_IMAGE: 18.9,
    QWEN_IMAGE_21: 18.6,
}
"""10^12 operations of a forward of the preset, by its dry run."""


@pytest.mark.parametrize("name", REAL)
def test_real_models_follow_the_fast_recipe_of_their_model(name: str) -> None:
    config = load_config(name)
    steps, size, bounds, guidance, noise, members, groups, tokens, rank = RECIPES[name]
    sampling, learner, model = config.sampling, config.learner, config.model
    assert (sampling.steps, sampling.window.size, sampling.window.bounds(steps)) == (steps, size, bounds)
    assert (model.guidance, model.max_sequence_length, model.lora.rank, model.lora.alpha) == (
        guidance,
        tokens,
        rank,
        2 * rank,
    )
    assert (sampling.kernel, sampling.noise_level) == ("flow_sde", noise)
    assert (config.group.size, config.group.per_iteration) == (members, groups)
    rate = 1e-4 if name == "qwen_image_21_pickscore" else 3e-4
    assert (learner.learning_rate, learner.kl.weight, learner.updates_per_iteration) == (rate, 0.0, 2), name
    assert config.evaluation.adapter == ("trained" if name.startswith("qwen") else "average")
    assert (model.height, model.width, model.dtype, bool(model.embedding_cache)) == (512, 512, "bfloat16", True)
    family = FAMILY[name]
    adapter = family.adapter(model.lora)
    assert (adapter.rank, adapter.alpha, adapter.targets) == (family.rank, family.alpha, family.targets)


@pytest.mark.parametrize("name", REAL)
def test_8_to_64_workers_have_shards_in_every_optimizer_step(name: str) -> None:
    config = load_config(name)
    step = config.group.shards // config.learner.updates_per_iteration
    assert config.learner.lanes == 64 <= step
    for workers in (8, 16, 32, 64):
        load_config(name, overrides=[f"cluster.learner.workers={workers}", f"cluster.rollout_actors={workers}"])


@pytest.mark.parametrize("name", REAL)
def test_the_published_baseline_and_the_paper_s_method_run_at_the_same_scale(name: str) -> None:
    def scale(config: RunConfig) -> dict[str, Any]:
        keys = ("sampling.steps", "learner.learning_rate", "learner.kl.weight", "learner.lanes", "iterations")
        flat = config.flat_fields()
        return {key: flat[key] for key in keys} | {"group": config.group, "data": config.data, "model": config.model}

    config = load_config(name)
    baseline, paper = (load_config(name, overrides=[f"method={method}"]) for method in ("flow_grpo_fast", "stepwise"))
    assert scale(baseline) == scale(paper) == scale(config)
    assert baseline.sampling.window.size == config.sampling.window.size
    assert (baseline.sampling.kernel, baseline.credit.rule, baseline.learner.clip_range) == ("cps", "uniform", 1e-5)
    assert (paper.sampling.kernel, paper.sampling.window.rule, paper.completion.substeps) == ("ddim_sde", "all", 5)


@pytest.mark.parametrize("name", REAL)
def test_a_run_of_a_preset_is_affordable(name: str) -> None:
    """At most 100 GPU-hours on H100 for SD3.5-Medium and 150 for the others, by the counts of the dry run."""
    config = load_config(name)

    def sigmas(steps: int) -> torch.Tensor:
        even = torch.linspace(1, 1e-3, steps)
        return torch.cat([3 * even / (1 + 2 * even), torch.zeros(1)])

    shapes: Any = SimpleNamespace(latent_shape=(16, 64, 64), sigmas=sigmas, tiny_decoder=None)
    gradient = 3.2 if config.model.gradient_checkpointing else 2.2
    forward = TFLOPS[FAMILY[name]] * 1e12
    counts = count_evaluations(config, count_shard(config, shapes), forward=forward, gradient=gradient, image=2.5e12)
    evaluated = config.evaluation.steps * config.model.rows * forward
    found = Estimate(
        evaluations=counts, rollout={}, learner={}, trained=0, image=512 * 512 * 3, evaluation_flops=evaluated
    )
    plan = plan_of(config, found, heldout=72, tflops=assumed_tflops("H100"))
    assert plan.gpus == 8
    assert 10 < plan.gpu_hours < (100 if FAMILY[name] is SD3 else 150)


@pytest.mark.parametrize("name", REAL)
def test_their_prompts_ship_and_eight_gpus_are_enough(name: str) -> None:
    config = load_config(name)
    for path in (config.data.train, config.data.heldout):
        assert len(read_prompts(config.data, path)) >= 10
    cluster = config.cluster
    judges = sum(reward.actors * (reward.gpus or cluster.reward.gpus) for reward in config.rewards.values())
    bundle = cluster.rollout.gpus + cluster.learner.gpus
    assert cluster.layout == "colocated"
    assert cluster.rollout_actors == cluster.learner.workers == 8
    assert 8 * bundle + judges <= 8, "the scorers fit beside the eight bundles"
    assert 2 * bundle > 1, "no two bundles fit on one GPU"


def test_what_differs_between_them() -> None:
    flux, klein, qwen, z_image = (
        load_config(name) for name in ("flux_pickscore", "flux2_klein_pickscore", "qwen_image_ocr", "z_image_pickscore")
    )
    assert (flux.model.embedded_guidance, flux.evaluation.steps) == (3.5, 28)
    assert klein.rewards == z_image.rewards == flux.rewards
    assert qwen.rewards == load_config("sd35_ocr").rewards
    assert qwen.cluster.offload
    assert {name: reward.weight for name, reward in load_config("sd35_ocr").rewards.items()} == {
        "ocr": 0.8,
        "pickscore": 0.2,
    }


def test_overrides_reach_every_depth_and_read_numbers_as_a_user_means_them(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        "learner.learning_rate=1e-4",
        "sampling.kernel=ddim_sde",
        "model.lora.rank=8",
        "sampling.shared_noise=false",
        "data.tags=[colors, counting]",
        "rewards.geneval.args={reward: soft}",
        "cluster.address=null",
    )
    assert config.learner.learning_rate == 1e-4
    assert config.sampling.kernel == "ddim_sde"
    assert config.model.lora.rank == 8
    assert config.sampling.shared_noise is False
    assert config.data.tags == ("colors", "counting")
    assert config.rewards["geneval"].args == {"reward": "soft"}
    assert config.cluster.address is None


def test_the_last_of_two_overrides_counts_and_a_value_may_hold_an_equals_sign(tmp_path: Path) -> None:
    config = loaded(tmp_path, "seed=1", "seed=2", "model.path=a=b")
    assert (config.seed, config.model.path) == (2, "a=b")


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("model.revision=7e10", lambda config: config.model.revision, "7e10"),
        ("model.revision=1234567", lambda config: config.model.revision, "1234567"),
        ("model.revision=2026-11-22", lambda config: config.model.revision, "2026-11-22"),
        ("model.revision=null", lambda config: config.model.revision, None),
        ("data.train=nan", lambda config: config.data.train, "nan"),
        ("data.tags=[1e5, off]", lambda config: config.data.tags, ("1e5", "off")),
        ("rewards.geneval.scorer=1e5", lambda config: config.rewards["geneval"].scorer, "1e5"),
        ("rewards.geneval.args.level=1e-3", lambda config: config.rewards["geneval"].args, {"level": 1e-3}),
    ],
)
def test_a_text_that_looks_like_a_number_stays_a_text_where_the_config_wants_one(
    tmp_path: Path, override: str, read: Callable[[RunConfig], Any], value: Any
) -> None:
    assert read(loaded(tmp_path, override)) == value


def test_a_section_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, yaml.safe_dump(TREE) + "\ngroup: {size: 8}\ngroup: {per_iteration: 2}\n")
    with pytest.raises(ConfigError, match="the key 'group' is repeated in one section: join the two"):
        load_config(path)


@pytest.mark.parametrize("key", ["[a, b]", "{a: b}"])
def test_a_key_that_is_no_text_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="found unhashable key"):
        load_config(written(tmp_path, f"{yaml.safe_dump(TREE)}{key}: 2\n"))


def test_every_preset_takes_another_method() -> None:
    for name in preset_names():
        assert load_config(name, overrides=["method=flow_grpo"]).learner.objective == "clipped"


def test_every_preset_takes_another_group_size() -> None:
    for name in preset_names():
        words = ["group.shard=null"] if name in REAL else []
        assert load_config(name, overrides=["group.size=16", *words]).group.shard == 16


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "an override must read key=value, got 'seed'"),
        ("=3", "an override must read key=value, got '=3'"),
        ("seed=[1", "the value of seed is not YAML"),
        ("iterations.x=1", "iterations.x is unknown: iterations is a value, not a section"),
        ("sede=1", "did you mean 'seed'"),
        ("group..size=4", "unknown key 'group."),
    ],
)
def test_a_broken_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded(tmp_path, override)


def test_an_override_may_fill_a_section_that_the_file_leaves_empty(tmp_path: Path) -> None:
    path = written(tmp_path, yaml.safe_dump(TREE) + "\ngroup:\n")
    assert load_config(path, overrides=["group.size=48"]).group.size == 48


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "is not YAML"), ("- 1\n- 2", "must hold keys and values, got list"), ("", "got NoneType")],
)
def test_a_file_that_is_no_tree_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, text))


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.yaml does not exist"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.yaml")


def test_every_message_is_one_line(tmp_path: Path) -> None:
    for tree in ("a: [1\nb: {", "a: 'x\n\ny: \"", "\t", "seed: 2001-13-45", "[" * 5000):
        with pytest.raises(ConfigError) as caught:
            load_config(written(tmp_path, tree))
        assert "\n" not in str(caught.value)


def extending(folder: Path, name: str, tree: dict[str, Any]) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_file_that_extends_a_preset_holds_only_what_differs(tmp_path: Path) -> None:
    shared = extending(tmp_path, "shared.yaml", {"base": "toy_geneval", "group": {"size": 8}, "seed": 3})
    path = extending(tmp_path / "below", "own.yaml", {"base": "../shared.yaml", "seed": 4})
    assert load_config(path) == load_config("toy_geneval", overrides=["group.size=8", "seed=4"])
    assert load_config(path, overrides=["seed=5"]).seed == 5
    found = sources(path)
    assert (found["group.size"], found["seed"]) == (f"file {path.parent / '../shared.yaml'}", f"file {path}")
    assert found["sampling.steps"] == "preset toy_geneval"
    assert shared.exists()


def test_the_method_of_the_last_file_replaces_those_of_files_below(tmp_path: Path) -> None:
    """It wins over the files below with what defines it, and gives way to its own file."""
    base = extending(tmp_path, "base.yaml", TREE | {"method": "stepwise", "sampling": {"kernel": "flow_sde"}})
    path = extending(tmp_path, "own.yaml", {"base": "base.yaml", "method": "tp_grpo"})
    assert load_config(path) == load_config(base, overrides=["method=tp_grpo"])
    own = extending(tmp_path, "own.yaml", {"base": "base.yaml", "method": "tp_grpo", "credit": {"ddof": 1}})
    assert load_config(own).credit.ddof == 1
    alone = extending(tmp_path, "own.yaml", {"base": "base.yaml"})
    assert load_config(alone) == load_config(base)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"base": "own.yaml"}, "base in {folder}/own.yaml must lead to a preset that extends none, got a circle at"),
        ({"base": "toy_genval"}, "unknown preset 'toy_genval': did you mean 'toy_geneval'?"),
        ({"base": "absent.yaml"}, "config file {folder}/absent.yaml does not exist"),
        (
            {"base": ["toy_geneval"]},
            "base in {folder}/own.yaml must be the name of a preset or the path of a .yaml file",
        ),
        ({"base": "toy_mix", "rewards": {"picscore": None}}, "no such reward to remove: did you mean 'pickscore'?"),
        ({"base": "toy_mix", "rewards": {1: None}}, "rewards.1 is null and there is no such reward to remove"),
    ],
)
def test_a_wrong_base_is_one_line(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    path = extending(tmp_path, "own.yaml", tree)
    with pytest.raises(ConfigError, match=re.escape(message.format(folder=tmp_path))):
        load_config(path)


def test_null_removes_a_reward(tmp_path: Path) -> None:
    assert set(load_config("toy_mix").rewards) == {"geneval", "pickscore"}
    assert set(load_config("toy_mix", overrides=["rewards.pickscore=null"]).rewards) == {"geneval"}
    path = extending(tmp_path, "own.yaml", {"base": "toy_mix", "rewards": {"pickscore": None}})
    assert load_config(path) == load_config("toy_mix", overrides=["rewards.pickscore=null"])
    with pytest.raises(ConfigError, match=r"^rewards.ocr is null .*geneval"):
        load_config("toy_mix", overrides=["rewards.ocr=null"])


def test_rewards_mean_the_same_in_a_file_that_extends_a_preset_and_on_the_command_line(tmp_path: Path) -> None:
    red = {"red": {"scorer": "./mine.py:red"}}
    for given, mixture in (
        (red, "reward = 1.0 geneval + 1.0 red"),
        ({"geneval": None, **red}, "reward = 1.0 red"),
        ({"geneval": {"weight": 0.5}}, "reward = 0.5 geneval"),
    ):
        path = extending(tmp_path, "own.yaml", {"base": "toy_geneval", "rewards": given})
        words = [f"rewards={json.dumps(given)}", "evaluation.component=reward"]
        config = load_config("toy_geneval", overrides=words)
        assert config == load_config(path, overrides=words[1:])
        assert config.mixture == mixture
        assert sources("toy_geneval", overrides=words).keys() == sources(path, overrides=words[1:]).keys()


def test_overrides_may_be_values_by_dotted_key() -> None:
    given = {"method": "tp_grpo", "learner.learning_rate": 1e-5, "data.tags": ["colors"], "rewards.geneval.weight": 2}
    texts = ["method=tp_grpo", "learner.learning_rate=1e-5", "data.tags=[colors]", "rewards.geneval.weight=2"]
    assert load_config("toy_geneval", overrides=given) == load_config("toy_geneval", overrides=texts)
    assert sources("toy_geneval", overrides=given) == sources("toy_geneval", overrides=texts)


def test_a_section_that_is_overridden_leaves_no_source_of_what_it_replaces() -> None:
    given = ["group.per_iteration=24", "group={size: 8}"]
    config, found = load_config("toy_geneval", overrides=given), sources("toy_geneval", overrides=given)
    assert (found["group.size"], "group.per_iteration" in found) == ("override", False)
    assert config.group.per_iteration == RunConfig.model_fields["group"].annotation().per_iteration
    later = sources("toy_geneval", overrides=[*reversed(given)])
    assert later["group.per_iteration"] == "override"


@pytest.mark.parametrize("given", [{1: 2}, [("seed", 3)], [b"seed=3"]], ids=str)
def test_an_override_that_is_no_text_is_one_line(given: Any) -> None:
    with pytest.raises(ConfigError, match="^an override must be a text .*got "):
        load_config("toy_geneval", overrides=given)


def test_an_override_may_be_a_path(tmp_path: Path) -> None:
    assert load_config("toy_geneval", overrides={"data.train": tmp_path}).data.train == str(tmp_path)

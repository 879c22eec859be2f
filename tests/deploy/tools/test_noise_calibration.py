"""Noise calibration: which way a level moves, when it stops, and what is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deploy.presets import load_config
from deploy.tools.noise_calibration import calibrate, first_levels, is_balanced
from flow.models.load import load_backbone
from flow.policy import policy_of
from protocol.errors import ContractError
from tests.support.paths import ROOT


def test_counts_balance_when_they_differ_by_less_than_the_tolerance():
    gains = np.array([[0.1, 0.1, 0.0, -0.1]] * 13 + [[-0.1, 0.1, 0.0, -0.1]] * 11)
    assert is_balanced(gains, 2.0).tolist() == [False, False, True, False]
    assert is_balanced(gains, 2.1).tolist() == [True, False, True, False]
    assert is_balanced(np.repeat(gains, 4, axis=0), 4.1).tolist() == [True, False, True, False]


def walk(threshold: float, start: float, highest: float = 1.0, rounds: int = 30) -> list[float]:
    """A step whose signs balance while its level is below the threshold."""

    def measure(levels: Any, number: int) -> np.ndarray:
        signs = np.where(np.arange(24) % 2, 1.0, -1.0)[:, None]
        return np.where(np.array(levels) < threshold, signs, -1.0)

    return calibrate([start], measure, lambda text: None, rounds=rounds, highest=highest)


def test_a_level_rises_while_signs_balance_falls_when_they_do_not_and_settles_between():
    assert walk(0.5, 0.45)[0] == pytest.approx(0.5, abs=0.011)
    assert walk(0.5, 0.55)[0] == pytest.approx(0.5, abs=0.011)


def test_a_step_without_a_valid_gain_stays_where_it_is():
    said: list[str] = []

    def measure(levels: Any, number: int) -> np.ndarray:
        signs = np.where(np.arange(24) % 2, 1.0, -1.0)
        balanced = np.where(levels[0] < 0.5, signs, -1.0)
        return np.stack([balanced, np.full(24, np.nan)], axis=1)

    first, second = calibrate([0.48, 0.7], measure, said.append, rounds=8)
    assert first == pytest.approx(0.5, abs=0.011)
    assert second == 0.7
    assert said[-1] == "steps [1] never had a gain and keep their first level"


def test_the_tolerance_counts_only_the_gains_that_a_step_has():
    gains = np.full((96, 2), np.nan)
    gains[:24, 0] = gains[:, 1] = 1.0
    gains[:11, 0] = gains[:46, 1] = -1.0
    assert is_balanced(gains, 2.1).tolist() == [True, True]
    assert is_balanced(gains, 2.0).tolist() == [False, False]


def test_levels_stay_above_zero_and_below_what_the_kernel_takes():
    assert walk(-1.0, 0.03, rounds=10) == [0.01]
    assert walk(2.0, 0.97, rounds=10) == [1.0]
    assert walk(2.0, 0.97, highest=5.0, rounds=10) == [pytest.approx(1.07)]


def test_rounds_end_early_once_every_level_has_turned_twice():
    rounds = []

    def measure(levels: Any, number: int) -> np.ndarray:
        rounds.append(number)
        signs = np.where(np.arange(24) % 2, 1.0, -1.0)[:, None]
        return np.where(np.array(levels) < 0.5, signs, -1.0)

    calibrate([0.48], measure, lambda text: None, rounds=30)
    assert len(rounds) < 10


def test_scores_that_are_all_missing_end_it():
    with pytest.raises(ContractError, match="needs at least one valid score, got none"):
        calibrate([0.5], lambda levels, number: np.full((4, 1), np.nan), lambda text: None, rounds=30)


def test_a_level_at_its_limit_and_a_step_that_never_gains_hold_up_nothing():
    rounds, said = [], []

    def measure(levels: Any, number: int) -> np.ndarray:
        rounds.append(number)
        signs = np.where(np.arange(24) % 2, 1.0, -1.0)
        return np.stack([np.where(levels[0] < 0.5, signs, -1.0), np.full(24, np.nan), np.full(24, -1.0)], axis=1)

    levels = calibrate([0.48, 0.7, 0.03], measure, said.append, rounds=30)
    assert len(rounds) < 10
    assert levels[1:] == [0.7, 0.01]
    assert said[-1] == "steps [1] never had a gain and keep their first level"
    assert not any("raise --rounds" in line for line in said)


@pytest.fixture
def preset(tmp_path: Path, tiny_sd3: Path) -> Path:
    prompts = tmp_path / "train.jsonl"
    line = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}], "prompt": "a red circle"}
    prompts.write_text(json.dumps(line) + "\n")
    tree = {
        "iterations": 1,
        "model": {"path": str(tiny_sd3), "max_sequence_length": 1},
        "data": {"train": str(prompts), "heldout": str(prompts)},
        "sampling": {"steps": 4, "schedule": "linear"},
        "group": {"size": 2, "shard": 2, "per_iteration": 2},
        "rewards": {"geneval": {"scorer": "geneval", "args": {"detector": "toyworld.world.detector:ShapeDetector"}}},
    }
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("merge_std", [0.0, 0.75])
def test_the_first_round_draws_as_flow_sde_does(preset, merge_std):
    config = load_config(preset, overrides=["method=dense_grpo", f"sampling.merge_std={merge_std}"])
    backbone = load_backbone(config.model)
    kernel, levels = first_levels(config, backbone)
    assert kernel == "dance_sde"
    before = policy_of(backbone, config)
    tree = yaml.safe_load(config.to_yaml())
    tree["sampling"] |= {"kernel": kernel, "noise_levels": levels}
    after = policy_of(backbone, load_config(_written(preset.parent, tree)))
    spans = [before.span(k) for k in range(3)]
    assert (max(spans) > 1) == bool(merge_std)
    assert [after.span(k) for k in range(3)] == spans
    for k in range(3):
        assert after.std(k) == pytest.approx(before.std(k), rel=1e-5)


def _written(folder: Path, tree: Any) -> Path:
    path = folder / "other.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_the_command_writes_a_config_that_trains_as_it_is(preset, tmp_path, cli):
    out = tmp_path / "calibrated.yaml"
    words = ("calibrate-noise", str(preset), "method=dense_grpo", "--rounds", "2", "--prompts", "1", "--out", str(out))
    said = cli.done(*words)
    config = load_config(out)
    assert config.sampling.kernel == "dance_sde"
    assert len(config.sampling.noise_levels) == 3
    assert config.credit.normalise == "per_step"
    assert f"flowcredit train {out}" in said


@pytest.mark.parametrize(
    ("name", "rule"), [("mine", "--out must end in .yaml or .yml"), ("no/such/x.yaml", "cannot be written: no folder")]
)
def test_a_path_that_cannot_take_the_table_is_refused_before_the_work(preset, tmp_path, cli, name, rule):
    out = tmp_path / name
    out_said, err = cli.ended("calibrate-noise", str(preset), "method=dense_grpo", "--out", str(out), code=2)
    assert rule in err and len(err.splitlines()) == 1 and "round" not in out_said
    assert not out.exists()


def test_prompts_are_encoded_ahead_of_the_model(preset, tmp_path, cli):
    cache = tmp_path / "cache"
    words = ("method=dense_grpo", f"model.embedding_cache={cache}", "--rounds", "1", "--prompts", "1")
    said = cli.done("calibrate-noise", str(preset), *words, "--out", str(tmp_path / "mine.yaml"))
    assert said.index("encoded 1 new prompts") < said.index("round 1/1")


def test_a_method_that_scores_no_points_is_refused(preset, tmp_path, cli):
    out = tmp_path / "calibrated.yaml"
    line = cli.refused("calibrate-noise", str(preset), "method=flow_grpo", "--out", str(out))
    assert "needs credit.rule gains, gae or turning_point" in line
    assert "set method=dense_grpo" in line
    assert not out.exists()


def test_the_methods_are_listed_with_their_source(cli):
    lines = cli.done("methods").splitlines()
    names = {path.stem for path in (ROOT / "deploy" / "methods").glob("*.yaml")} - {"base"}
    assert {line.split()[0] for line in lines} == names
    assert any(line.startswith("stepwise ") and "arXiv 2603.28718" in line for line in lines)

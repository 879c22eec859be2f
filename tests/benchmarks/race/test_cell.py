"""A cell of a race: whole configs, what counts as training time, and the figures of its curve."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race.cell import (
    Cell,
    arrival,
    cell_config,
    cells_in,
    deepest_fall,
    mean_curve,
    read_cell,
    score_at,
    seconds_an_iteration,
)
from benchmarks.race.variants import REWARDS, VARIANTS
from rewards.scorer import require_ready


def written(folder: Path, seconds: list[float], scores: dict[int, float]) -> None:
    """A run folder whose last line is cut."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"iteration": index, "seconds/iteration": spent} for index, spent in enumerate(seconds, start=1)
    ]
    lines += [{"iteration": index, "evaluation/score": score} for index, score in scores.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')


def test_every_variant_is_a_whole_config_on_the_toy_world() -> None:
    for variant in VARIANTS:
        for reward in REWARDS:
            cell = Cell(variant, 1, reward)
            config = cell_config(cell, iterations=60, every=10, extra=["group.per_iteration=4"])
            assert (config.group.per_iteration, config.iterations, config.evaluation.every) == (4, 60, 10)
            rate = float(variant.partition("lr=")[2].partition(",")[0] or 2e-3)
            assert (config.learner.learning_rate, config.learner.kl.weight, config.seed) == (rate, 0.0, 1)
            assert set(config.rewards) == {"geneval" if reward == "graded" else reward}


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_can_be_scored(reward: str) -> None:
    config = cell_config(Cell("flow_grpo", 0, reward), iterations=2, every=1)
    for each in config.rewards.values():
        require_ready(each.scorer, each.args)


def test_a_cell_is_found_by_its_folder(tmp_path: Path) -> None:
    cells = [Cell(name, 1, "geneval") for name in VARIANTS]
    for cell in cells:
        (tmp_path / cell.folder).mkdir(parents=True)
    (tmp_path / "geneval" / "unknown" / "seed_0").mkdir(parents=True)
    assert sorted(cells_in(tmp_path), key=cells.index) == cells


def test_every_iteration_counts_as_a_quick_one(tmp_path: Path) -> None:
    written(tmp_path / "run", [10.0, 30.0, *[30.0] * 4], {0: 0.4})
    assert seconds_an_iteration(tmp_path / "run") == pytest.approx(20), "the mean or median would be slower"


def test_the_mean_curve_has_the_evaluations_of_all_seeds(tmp_path: Path) -> None:
    for seed, end in ((0, 0.6), (1, 0.7)):
        written(tmp_path / Cell("flow_grpo", seed, "geneval").folder, [2.0] * 4, {4: end, 0: 0.4, 2: 0.5, 6: 1.0})
    written(tmp_path / Cell("flow_grpo", 2, "geneval").folder, [2.0] * 4, {0: 0.4, 4: 0.65})
    curves = [read_cell(Cell("flow_grpo", seed, "geneval"), tmp_path) for seed in range(3)]
    assert curves[0]["iterations"] == [0, 2, 4, 6]
    assert curves[2] == {"variant": "flow_grpo", "seed": 2, "reward": "geneval"} | {
        "iterations": [0, 4],
        "scores": [0.4, 0.65],
    }
    assert mean_curve(curves, ["scores"]) == {"iterations": [0, 4], "scores": [pytest.approx(0.4), pytest.approx(0.65)]}


def test_figures_of_a_curve_are_linear_between_its_evaluations() -> None:
    curve = {"iterations": [0, 2, 4], "scores": [0.4, 0.66, 0.8]}
    assert arrival(curve["iterations"], curve["scores"], 0.65) == pytest.approx(2 * 25 / 26)
    assert arrival(curve["iterations"], curve["scores"], 0.9) is None
    assert score_at(curve, "iterations", 3) == pytest.approx(0.73)
    assert score_at(curve, "iterations", 5) is None, "the curve ends before"
    assert deepest_fall([0.4, 0.7, 0.5, 0.8, 0.65]) == pytest.approx(0.2)

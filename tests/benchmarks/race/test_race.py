"""The race's accounting: which cells there are, what counts as training time, who arrives when."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from benchmarks.race.plots import SHOWN, write_plot
from benchmarks.race.race import (
    PUBLISHED,
    RUNS,
    Cell,
    app,
    cell_config,
    known_cells,
    planned,
    reached,
    read_cell,
    summarise,
)
from benchmarks.race.variants import REWARDS, THREE_SEEDS, VARIANTS
from benchmarks.scorers import GradedGenEval, Redness
from rewards.scorer import require_ready
from tests.support.worlds.shapes import one_shape
from toyworld.world.scenes import render
from toyworld.world.vocabulary import GROUND


def written(folder: Path, seconds: list[float], scores: dict[int, float]) -> None:
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"iteration": index, "seconds/iteration": spent, "reward/mean": 0.5}
        | {f"step_reward/step_{k}_abs_mean": 0.1 * index for k in (0, 1)}
        for index, spent in enumerate(seconds, start=1)
    ]
    lines += [{"iteration": index, "evaluation/score": score} for index, score in scores.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')


def found(runs: Path, *cells: Cell) -> list[dict[str, Any]]:
    """The results of these cells in their order, without those that have none."""
    known = {Cell(each["variant"], each["seed"], each["reward"]): each for each in known_cells(runs, runs / "none")}
    return [known[cell] for cell in cells if cell in known]


def test_every_variant_is_a_whole_config_on_the_toy_world() -> None:
    for cell in planned([], [], seeds=1):
        config = cell_config("toy_geneval", cell, iterations=60, every=10, extra=["group.per_iteration=4"])
        assert (config.group.per_iteration, config.iterations, config.evaluation.every) == (4, 60, 10)
        rate = float(cell.variant.partition("lr=")[2].partition(",")[0] or 2e-3)
        assert (config.learner.learning_rate, config.learner.kl.weight) == (rate, 0.0)
        assert set(config.rewards) == {"geneval" if cell.reward == "graded" else cell.reward}


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_of_the_race_can_be_scored(reward: str) -> None:
    config = cell_config("toy_geneval", Cell("flow_grpo", 0, reward), iterations=2, every=1, extra=())
    for each in config.rewards.values():
        require_ready(each.scorer, each.args)


def test_the_main_five_get_three_seeds_and_every_reward() -> None:
    cells = planned([], [], seeds=None)
    assert len(cells) == len(REWARDS) * (len(VARIANTS) + 2 * len(THREE_SEEDS))
    assert len({cell.folder for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert set(SHOWN) <= set(VARIANTS)


def test_every_iteration_counts_as_a_quick_one(tmp_path: Path) -> None:
    written(tmp_path / "cell", [10.0, 30.0, *[30.0] * 4], {0: 0.4, 2: 0.5, 6: 0.6})
    assert reached(tmp_path / "cell") == (6, pytest.approx(6 * 20)), (
        "a tenth are quicker; the mean or median would be slower"
    )
    assert reached(tmp_path / "absent") == (0, 0)


def test_all_seeds_of_a_variant_count_the_seconds_of_the_quickest(tmp_path: Path) -> None:
    for seed, pace in ((0, 4.0), (1, 2.0)):
        written(tmp_path / Cell("stepwise", seed, "geneval").folder, [pace] * 4, {0: 0.4, 2: 0.5, 4: 0.6})
    written(tmp_path / Cell("dense_grpo", 0, "geneval").folder, [9.0] * 4, {0: 0.4, 4: 0.6})
    written(tmp_path / Cell("stepwise", 2, "geneval").folder, [], {0: 0.4})
    cells = known_cells(tmp_path, tmp_path / "none")
    seconds = {(cell["variant"], cell["seed"]): cell["seconds"] for cell in cells}
    assert seconds["stepwise", 0] == seconds["stepwise", 1] == pytest.approx([0, 4, 8])
    assert seconds["stepwise", 2] == [0]
    assert seconds["dense_grpo", 0] == pytest.approx([0, 36]), "another variant does other work"


def test_arrival_is_where_the_mean_curve_crosses_flow_grpo_s_end_score(tmp_path: Path) -> None:
    for seed, end in ((0, 0.6), (1, 0.7)):
        written(tmp_path / Cell("flow_grpo", seed, "geneval").folder, [2.0] * 4, {0: 0.4, 2: 0.5, 4: end})
    written(tmp_path / Cell("stepwise", 0, "geneval").folder, [3.0] * 4, {0: 0.4, 2: 0.66, 4: 0.8})
    kept = (("flow_grpo", 0), ("flow_grpo", 1), ("stepwise", 0))
    cells = found(tmp_path, *(Cell(name, seed, "geneval") for name, seed in kept))
    basis, stepwise = summarise(cells, "geneval")
    assert basis["goal"] == stepwise["goal"] == pytest.approx(0.65)
    assert (basis["goal_iterations"], basis["share_of_seconds"], basis["seeds"]) == (4, 1, 2)
    # From 0.4 at 0 to 0.66 at 2: 0.65 is 25/26 of the way; its iterations last 3 s, Flow-GRPO's 2 s.
    assert stepwise["goal_iterations"] == pytest.approx(2 * 25 / 26)
    earlier, soon = summarise(cells, "geneval", until=2)
    assert (earlier["goal"], earlier["goal_iterations"], earlier["share_of_seconds"]) == (0.5, 2, 1)
    assert soon["share_of_iterations"] == pytest.approx(0.1 / 0.26), "of two iterations"
    assert summarise(cells, "geneval", until=3) == []
    assert stepwise["share_of_iterations"] == pytest.approx(25 / 52)
    assert (stepwise["goal_seconds"], stepwise["share_of_seconds"]) == (
        pytest.approx(150 / 26),
        pytest.approx(75 / 104),
    )
    # Equal budgets: four iterations, and Flow-GRPO's eight seconds, between 0.66 after six and 0.8 after twelve.
    assert (basis["at_iteration_4"], stepwise["at_iteration_4"]) == (pytest.approx(0.65), pytest.approx(0.8))
    assert (basis["at_8_s"], stepwise["at_8_s"]) == (pytest.approx(0.65), pytest.approx(0.66 + 0.14 / 3))
    assert read_cell(Cell("tp_grpo", 0, "geneval"), tmp_path) is None
    write_plot(cells, tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 3_000


def test_equal_seconds_are_those_that_every_method_has(tmp_path: Path) -> None:
    written(tmp_path / Cell("flow_grpo", 0, "geneval").folder, [2.0] * 4, {0: 0.4, 2: 0.5, 4: 0.7})
    written(tmp_path / Cell("dance_grpo", 0, "geneval").folder, [1.0] * 4, {0: 0.4, 4: 0.6})
    written(tmp_path / Cell("dance_grpo, noise 0.7", 0, "geneval").folder, [1.0] * 2, {0: 0.4, 2: 0.5})
    names = ("flow_grpo", "dance_grpo", "dance_grpo, noise 0.7")
    cells = found(tmp_path, *(Cell(name, 0, "geneval") for name in names))
    rows = summarise(cells, "geneval")
    assert [row["at_4_s"] for row in rows] == [pytest.approx(0.5), pytest.approx(0.6), None]
    assert [row["at_8_s"] for row in rows] == [pytest.approx(0.7), None, None]
    assert [row["at_iteration_4"] for row in rows] == [pytest.approx(0.7), pytest.approx(0.6), None], (
        "an ablation is shorter"
    )


def test_redness_is_red_minus_the_rest() -> None:
    images = np.zeros((3, 2, 2, 3), np.uint8)
    images[0, ..., 0] = 255
    images[1, ..., 1:] = 255
    scores = Redness().score(images, ["a"] * 3, [{}] * 3)
    assert scores.values.tolist() == [1.0, -1.0, 0.0]
    assert scores.valid.all()


def test_graded_geneval_fades_with_the_shape_where_the_verdict_falls_at_once() -> None:
    images = np.stack([render(one_shape("circle", "red", radius=6.0))] * 4)
    for cut, image in enumerate(images):
        image[:, 22 - 2 * cut :] = GROUND  # Overlaps 1.00, 0.87, 0.75, 0.65 with a circle.
    line = {"tag": "single_object", "include": [{"class": "circle", "count": 1}], "prompt": "a circle"}
    scores = GradedGenEval().score(images, ["a circle"] * 4, [line] * 4)
    assert scores.values.tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert scores.components["strict"].tolist() == [1, 1, 0, 0]


def test_an_own_cell_replaces_the_published_one_and_the_others_stay(tmp_path: Path) -> None:
    published, runs = tmp_path / "race.json", tmp_path / "runs"
    for seed, end in ((0, 0.5), (1, 0.7)):
        written(tmp_path / "before" / Cell("flow_grpo", seed, "geneval").folder, [2.0] * 4, {0: 0.4, 4: end})
    published.write_text(json.dumps({"cells": known_cells(tmp_path / "before", published=published)}))
    written(runs / Cell("flow_grpo", 1, "geneval").folder, [1.0] * 4, {0: 0.4, 4: 0.9})
    cells = known_cells(runs, published=published)
    assert [(cell["seed"], cell["measured"], cell["scores"][-1]) for cell in cells] == [
        (0, "published", 0.5),
        (1, "here", 0.9),
    ]
    assert summarise(cells, "geneval")[0]["measured"] == "here and published"


@pytest.mark.parametrize("file", ["race.json", "race_graded.json"])
def test_a_fresh_clone_reports_the_published_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert not RUNS.exists()
    figures: dict[Path, Figure] = {}
    draw = Figure.savefig

    def save(figure: Figure, path: Path, **_: Any) -> None:
        figures[path] = figure
        if file == "race.json":
            draw(figure, path, dpi=25)

    monkeypatch.setattr(Figure, "savefig", save)
    source = PUBLISHED.parent / file
    answer = CliRunner().invoke(app, ["report", "--published", str(source), "--out", f"report/{file}"])
    assert answer.exit_code == 0, answer.output
    published = json.loads(source.read_text())["cells"]
    again = json.loads((tmp_path / "report" / file).read_text())
    assert {**again["cells"][0], "measured": None} == {**published[0], "measured": None}
    assert len(again["cells"]) == len(published), "none is of a variant that no longer exists"
    variants = {cell["variant"] for cell in published}
    if file == "race.json":
        assert variants >= {"diffusion_nft", "flow_grpo", "stepwise_fast"}
    for reward, rows in again["tables"].items():
        assert all(f"{row['end']:.3f}" in answer.output for row in rows), reward
    if "flow_grpo" in variants:
        assert figures
        assert all(axes.lines for figure in figures.values() for axes in figure.axes)
    if file == "race.json":
        assert all((tmp_path / path).stat().st_size > 3_000 for path in figures)

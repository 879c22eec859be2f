"""The race of tuned methods: every cell is a whole config, and the table's figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.race import finals
from benchmarks.race.cell import Cell, cell_config
from benchmarks.race.finals import DIVERSITY, PUBLISHED, SECOND, SETTINGS, all_cells, app, folder_of, rows_of
from benchmarks.race.tune import KNOBS
from benchmarks.race.variants import VARIANTS
from rewards.scorer import require_ready


def written(runs: Path, cell: Cell, scores: list[float], pace: float) -> None:
    """A run folder with an evaluation after each two iterations."""
    folder = folder_of("tuned", runs) / "0.002_0.7" / cell.folder
    folder.mkdir(parents=True)
    lines = [{"iteration": at, "seconds/iteration": pace} for at in range(1, 2 * len(scores) - 1)]
    for number, score in enumerate(scores):
        readings = {
            f"evaluation/reward/{SECOND[cell.reward][1]}": 0.3,
            "evaluation/reward/diversity": 0.2 - number / 100,
        }
        lines.append({"iteration": 2 * number, "evaluation/score": score} | readings)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "final.json").write_text(
        json.dumps({"setting": "tuned", "tuned": "learner.learning_rate=0.002", "pace": pace})
    )


@pytest.mark.parametrize("reward", SECOND)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_watches_a_second_scorer_and_diversity(setting: str, reward: str) -> None:
    extra = (*SECOND[reward][0], DIVERSITY, *SETTINGS[setting])
    config = cell_config(Cell("stepwise_tree", 0, reward), iterations=2, every=1, extra=extra)
    uses = {name: each.use for name, each in config.rewards.items()}
    watching = {"second", "diversity"} if SECOND[reward][0] else {"diversity"}
    assert {name for name, use in uses.items() if use == "evaluate"} == watching
    assert len(uses) == len(watching) + 1
    for each in config.rewards.values():
        require_ready(each.scorer, each.args)


@pytest.mark.parametrize("method", KNOBS)
def test_every_method_runs_in_the_settings_that_nobody_was_tuned_on(method: str) -> None:
    for keys in SETTINGS.values():
        cell_config(Cell(method, 0, "geneval"), iterations=2, every=1, extra=keys)


def test_the_table_has_the_quickest_first_and_the_score_after_equal_seconds(tmp_path: Path) -> None:
    for seed, last in ((0, 0.6), (1, 0.7)):
        written(tmp_path, Cell("elbo", seed, "geneval"), [0.4, 0.5, last], pace=4.0)
    written(tmp_path, Cell("stepwise_tree", 0, "geneval"), [0.4, 0.66, 0.64], pace=2.0)
    written(tmp_path, Cell("flow_grpo", 0, "geneval"), [0.4, 0.5, 0.608], pace=5.0)
    tree, elbo, _ = rows_of(all_cells(tmp_path, tmp_path / "none"), "tuned", "geneval")
    assert (tree["variant"], elbo["variant"], elbo["seeds"]) == ("stepwise_tree", "elbo", 2)
    # Flow-GRPO's end, 0.608, is 0.8 of the way from 0.4 to 0.66, and 0.72 of that from 0.5 to 0.65.
    assert (tree["seconds to the goal"], tree["iterations to it"]) == (pytest.approx(3.2), pytest.approx(1.6))
    assert elbo["seconds to the goal"] == pytest.approx(8 + 8 * 0.72)
    assert (tree["score after equal seconds"], elbo["score after equal seconds"]) == (0.64, pytest.approx(0.5))
    assert (tree["deepest fall"], elbo["deepest fall"]) == (pytest.approx(0.02), 0)
    assert (tree["diversity"], tree["second scorer"]) == (pytest.approx(0.18), 0.3)
    # The best rival ends at 0.65, where the tree is after 25 / 26 of its first two iterations.
    assert tree["diversity at the best rival's end"] == pytest.approx(0.2 - 0.01 * 25 / 26)
    assert elbo["diversity at the best rival's end"] == elbo["diversity"]


def test_three_equal_seeds_have_a_score_after_equal_seconds(tmp_path: Path) -> None:
    for seed in range(3):
        written(tmp_path, Cell("elbo", seed, "geneval"), [0.4] * 10 + [0.5], pace=5.56288)  # rounds down in a mean of 3
    (row,) = rows_of(all_cells(tmp_path, tmp_path / "none"), "tuned", "geneval")
    assert row["score after equal seconds"] == row["end"] == 0.5


def test_an_own_cell_replaces_the_published_one(tmp_path: Path) -> None:
    out = tmp_path / "report" / "race.json"
    written(tmp_path / "old", Cell("elbo", 0, "geneval"), [0.4, 0.5], pace=4.0)
    written(tmp_path / "old", Cell("elbo", 0, "pickscore"), [0.4, 0.5], pace=4.0)
    written(tmp_path / "new", Cell("elbo", 0, "geneval"), [0.4, 0.9], pace=4.0)
    for name in ("old", "new"):
        options = ["--runs", str(tmp_path / name), "--published", str(out), "--out", str(out)]
        answer = CliRunner().invoke(app, ["report", *options])
        assert answer.exit_code == 0, answer.output
    ends = {cell["reward"]: cell["scores"][-1] for cell in json.loads(out.read_text())["cells"]}
    assert ends == {"geneval": 0.9, "pickscore": 0.5}
    assert out.with_suffix(".png").stat().st_size > 3_000


def test_the_published_cells_are_of_variants_and_settings_that_exist() -> None:
    for cell in all_cells(Path("none"), PUBLISHED):
        assert cell["variant"] in VARIANTS
        assert cell["setting"] in SETTINGS


@pytest.mark.parametrize("option", ["--only=x", "--reward=x", "--setting=x"])
def test_an_unknown_name_is_refused(option: str) -> None:
    answer = CliRunner().invoke(finals.app, ["run", option])
    assert answer.exit_code == 2
    assert "got 'x'" in answer.output

"""Variants without tuning: the table of a run folder, and unknown names."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.race.cell import Cell
from benchmarks.race.race import app


def written(folder: Path, pace: float, scores: list[float]) -> None:
    """A run folder with an evaluation after each two iterations."""
    folder.mkdir(parents=True)
    lines = [{"iteration": at, "seconds/iteration": pace} for at in range(1, 2 * len(scores) - 1)]
    lines += [{"iteration": 2 * number, "evaluation/score": score} for number, score in enumerate(scores)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_has_a_row_for_each_trained_variant(tmp_path: Path) -> None:
    for seed, (pace, end) in enumerate(((4.0, 0.6), (3.0, 0.7))):
        written(tmp_path / Cell("flow_grpo", seed, "geneval").folder, pace, [0.4, 0.5, end])
    written(tmp_path / Cell("stepwise_fast, spread", 0, "geneval").folder, 2.0, [0.4, 0.75, 0.7])
    written(tmp_path / Cell("elbo", 0, "redness").folder, 2.0, [0.1, 0.2])
    written(tmp_path / Cell("awm", 0, "redness").folder, 2.0, [0.1])
    answer = CliRunner().invoke(app, ["report", "--runs", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in answer.output.splitlines() if "0:" in line
    ]
    assert rows == [
        ["flow_grpo", "2", "3.000", "0: 0.400, 2: 0.500, 4: 0.650", "4.000", "0.000"],
        ["stepwise_fast, spread", "1", "2.000", "0: 0.400, 2: 0.750, 4: 0.700", f"{2 * 25 / 35:.3f}", "0.050"],
        ["elbo", "1", "2.000", "0: 0.100, 2: 0.200", "–", "0.000"],
    ]


def test_without_a_cell_there_is_no_report(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["report", "--runs", str(tmp_path)])
    assert answer.exit_code == 2


@pytest.mark.parametrize("option", ["--only=x", "--reward=x"])
def test_an_unknown_name_is_refused(option: str) -> None:
    answer = CliRunner().invoke(app, ["run", option])
    assert answer.exit_code == 2
    assert "got 'x'" in answer.output

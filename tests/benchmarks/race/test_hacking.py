"""The benchmark of measures against reward hacking: every variant is a valid config, and a report reads the runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.race.cell import cell_config
from benchmarks.race.hacking import CELL, REWARDS, TRAINED, VARIANTS, WATCHED, app


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_trains_redness_and_watches_the_other_scores(variant: str) -> None:
    config = cell_config(CELL, iterations=1, every=1, extra=(REWARDS, *VARIANTS[variant]))
    weights = {name: reward.weight for name, reward in config.rewards.items()}
    is_mixed = variant == "GenEval is half of the reward"
    assert weights == {"redness": 0.5 if is_mixed else 1.0, "geneval": 0.5 if is_mixed else 0.0}
    assert ("KL" in variant and "no" not in variant) == (config.learner.kl.weight > 0)


def test_the_report_has_a_row_and_a_curve_for_each_variant(tmp_path: Path) -> None:
    for number in range(len(VARIANTS)):
        folder = tmp_path / "runs" / str(number) / CELL.folder
        folder.mkdir(parents=True)
        lines = [{"iteration": at, "evaluation/score": 0.0, TRAINED: at / 10, WATCHED: number / 10} for at in (0, 5)]
        lines.insert(1, {"iteration": 1, "reward/mean": 0.5})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "hacking.json"
    result = CliRunner().invoke(app, ["report", "--out", str(out), "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    curves = json.loads(out.read_text())
    assert list(curves) == list(VARIANTS)
    assert [curve["watched"] for curve in curves.values()] == [[n / 10, n / 10] for n in range(len(VARIANTS))]
    assert all((curve["iteration"], curve["trained"]) == ([0, 5], [0.0, 0.5]) for curve in curves.values())
    assert "0.500 / 0.300" in result.output
    assert out.with_suffix(".png").stat().st_size > 10_000

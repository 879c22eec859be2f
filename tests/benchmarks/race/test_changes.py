"""Changes of one method: every variant is a whole config, and what a change owes to the policy."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.race.cell import cell_config
from benchmarks.race.changes import CELL, VARIANTS, app, row_of
from deploy.folder.heldout import HeldoutScores


def evaluation(iteration: int, *rows: list[float]) -> HeldoutScores:
    """An evaluation of one prompt of each kind."""
    return HeldoutScores(
        iteration=iteration,
        component="geneval/strict",
        seed=1,
        steps=8,
        prompts=["a", "b"],
        tags=["one", "two"],
        scores={"score": [*rows]},
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_a_whole_config(variant: str) -> None:
    config = cell_config(CELL, iterations=2, every=1, extra=VARIANTS[variant])
    assert (config.learner.norm_guard > 0) == any(word in variant for word in ("as raced", "NormGuard", "watched"))
    assert config.sampling.splits == (() if "stepwise_fast" in variant else (0.6,))


def test_a_change_that_both_halves_show_is_no_noise(tmp_path: Path) -> None:
    both = [evaluation(0, [1, 1], [0, 0]), evaluation(2, [1, 1], [1, 1]), evaluation(24, [0, 0], [1, 1])]
    row = row_of(both)
    assert row["scores"] == [0.5, 1.0, 0.5]
    assert (row["deepest_fall"], row["in_each_half"], row["std_of_their_noise"]) == (0.5, [0.5, 0.5], 0.0)
    # The first half falls by 1/2, the second not at all: the score by 1/4, and its noise has that size too.
    row = row_of([evaluation(0, [1, 1], [1, 1]), evaluation(2, [0, 1], [1, 1])])
    assert (row["deepest_fall"], row["in_each_half"], row["std_of_their_noise"]) == (0.25, [0.5, 0.0], 0.25)
    for number in range(2):
        folder = tmp_path / "runs" / str(number) / CELL.folder / "gallery"
        folder.mkdir(parents=True)
        for each in both:
            (folder / f"iteration_{each.iteration:06}.json").write_text(each.model_dump_json())
    out = tmp_path / "steadiness.json"
    answer = CliRunner().invoke(app, ["report", "--out", str(out), "--runs", str(tmp_path / "runs")])
    assert answer.exit_code == 0, answer.output
    assert list(json.loads(out.read_text())) == list(VARIANTS)[:2]
    assert "0.500, 0.500" in answer.output

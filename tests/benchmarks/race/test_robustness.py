"""The race under other settings: every cell is a whole config, and a table compares variants of one setting alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.race.race import Cell, cell_config
from benchmarks.race.robustness import (
    HELD_OUT,
    OTHER_KINDS,
    SETTINGS,
    VARIANTS,
    app,
    folder_of,
    overrides_of,
    results,
    table_of,
)


def written(folder: Path, scores: dict[int, float]) -> None:
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"iteration": k, "seconds/iteration": 1.0} for k in range(1, max(scores) + 1)]
    lines += [{"iteration": k, "evaluation/score": score} for k, score in scores.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_setting_is_a_whole_config_for_every_variant_and_keeps_the_images_of_an_iteration(tmp_path: Path) -> None:
    for setting in SETTINGS:
        extra = overrides_of(setting, tmp_path)
        for variant in VARIANTS:
            config = cell_config("toy_geneval", Cell(variant, 0, "geneval"), iterations=9, every=3, extra=extra)
            assert config.group.size * config.group.per_iteration == 288


def test_other_kinds_of_prompts_are_those_that_no_training_prompt_has(tmp_path: Path) -> None:
    config = cell_config(
        "toy_geneval", Cell("flow_grpo", 0, "geneval"), iterations=1, every=1, extra=overrides_of(OTHER_KINDS, tmp_path)
    )
    lines = [json.loads(line) for line in Path(config.data.heldout).read_text().splitlines()]
    assert len(lines) == 48
    assert {line["tag"] for line in lines} <= set(config.data.tags), "all of them are used"
    assert not set(HELD_OUT) & set(config.data.tags)


def test_a_row_has_the_variants_mean_scores_at_the_last_evaluation_that_all_its_cells_have(tmp_path: Path) -> None:
    for variant, seed, scores in (
        ("flow_grpo", 0, {0: 0.1, 3: 0.2, 6: 0.3}),
        ("flow_grpo", 1, {0: 0.1, 3: 0.4}),
        (VARIANTS[2], 0, {0: 0.1, 3: 0.5, 6: 0.6}),
    ):
        written(folder_of("T = 10", tmp_path) / Cell(variant, seed, "redness").folder, scores)
    written(folder_of("preset", tmp_path) / Cell("flow_grpo", 0, "geneval").folder, {0: 0.1, 3: 0.9})
    none = tmp_path / "none.json"
    none.write_text('{"cells": []}')
    [row] = table_of(results(tmp_path, none), "redness")
    assert (row["setting"], row["iteration"], row["start"]) == ("T = 10", 3, 0.1)
    assert row["flow_grpo"] == pytest.approx(0.3)
    assert (row[VARIANTS[2]], row["flow_grpo_fast"]) == (0.5, None)
    out = tmp_path / "out" / "robustness.json"
    done = CliRunner().invoke(app, ["report", "--runs", str(tmp_path), "--published", str(none), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "| T = 10 | 3 " in " ".join(done.output.split())
    assert len(json.loads(out.read_text())["cells"]) == 4


def test_a_cell_of_ones_own_replaces_the_published_one_and_the_others_stay(tmp_path: Path) -> None:
    published = results(tmp_path)
    first = published[0]
    cell = Cell(first["variant"], first["seed"], first["reward"])
    written(folder_of(first["setting"], tmp_path) / cell.folder, {0: 0.1, 3: 0.9})
    own, *others = results(tmp_path)
    assert own["scores"] == [0.1, 0.9]
    assert others == published[1:]
    assert others


def test_an_unknown_setting_and_an_empty_folder_get_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"cells": []}')
    for arguments, said in (
        (["run", "--setting", "T = 7"], "'T = 7'"),
        (["report", "--published", str(empty)], "holds no finished cell"),
        (["report", "--published", str(tmp_path / "none.json")], "does not exist"),
    ):
        done = CliRunner().invoke(app, [*arguments, "--runs", str(tmp_path / "none")])
        assert done.exit_code == 2
        assert said in " ".join(done.output.replace("│", " ").split())

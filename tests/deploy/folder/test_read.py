"""Reading run folders."""

import pytest

from deploy.folder.metric_file import outline_of, page_of
from deploy.folder.names import METRICS
from deploy.folder.read import best_checkpoint, config_of, lines_of
from protocol.errors import RunFolderError


def test_a_folder_without_a_config_holds_no_run(tmp_path):
    with pytest.raises(RunFolderError, match=r"must hold config\.yaml, got none"):
        config_of(tmp_path)


def test_damaged_lines_are_named_by_their_number_or_skipped(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(b'{"iteration": 1}\n\xff\n[]\n{"iteration": 2}\n{"iteration": 3')
    with pytest.raises(RunFolderError, match="holds a damaged metrics.jsonl: line 2: "):
        lines_of(tmp_path)
    assert [line["iteration"] for _, line in page_of(path, outline_of(path), since=0, limit=9)] == [1, 2]


@pytest.mark.parametrize("value", ['"x"', "[1]", '{"a": 1}'])
def test_a_line_that_holds_something_else_than_numbers_is_damaged(tmp_path, value):
    """A report adds up the seconds."""
    (tmp_path / METRICS).write_text(f'{{"iteration": 1, "seconds/iteration": {value}}}\n')
    with pytest.raises(RunFolderError, match="damaged metrics.jsonl: line 1: seconds/iteration must be a number, got"):
        lines_of(tmp_path)


def test_a_number_without_end_is_no_iteration_and_not_finite_elsewhere(tmp_path):
    path, endless = tmp_path / METRICS, "9" * 400
    path.write_text(f'{{"iteration": 1, "reward/mean": {endless}}}\n{{"iteration": {endless}}}\n')
    ((_, line),) = page_of(path, outline_of(path), since=0, limit=9)
    assert line == {"iteration": 1, "reward/mean": float("inf")}


def test_the_best_checkpoint_is_among_those_that_are_there(tmp_path):
    scores = {0: 0.9, 1: 0.4, 2: 0.8, 3: 0.5, 4: 0.5}
    (tmp_path / METRICS).write_text(
        "".join(f'{{"iteration": {i}, "evaluation/score": {score}}}\n' for i, score in scores.items())
    )
    for iteration in (1, 3, 4, 5):
        (tmp_path / "checkpoints" / f"iteration_{iteration:06d}").mkdir(parents=True)
    assert best_checkpoint(tmp_path) == 3
    (tmp_path / METRICS).write_text("")
    with pytest.raises(RunFolderError, match=r"with a held-out score, got checkpoints of iterations \[.*5.*\] without"):
        best_checkpoint(tmp_path)

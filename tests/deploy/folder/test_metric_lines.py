"""Reading the metrics of a long run."""

import json
import tracemalloc
from pathlib import Path

from deploy.folder.names import METRICS
from deploy.folder.read import evaluation_scores, lines_of


def test_the_scores_of_a_long_run_are_found_with_few_lines_in_memory(tmp_path: Path) -> None:
    """A checkpoint asks for them. What it takes for a moment stays with the process in part."""
    numbers = {f"metric/{name}": name + 0.5 for name in range(60)}
    lines = [{"iteration": n} | numbers | ({"evaluation/score": n / 1000} if n % 500 == 0 else {}) for n in range(2001)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 2001')
    tracemalloc.start()
    try:
        assert evaluation_scores(tmp_path) == {0: 0.0, 500: 0.5, 1000: 1.0, 1500: 1.5, 2000: 2.0}
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    assert lines_of(tmp_path) == lines


def test_lines_share_the_names_of_their_numbers(tmp_path):
    (tmp_path / METRICS).write_text('{"iteration": 1, "step_reward/step_0": 0.5}\n' * 2)
    (_, first), (_, second) = lines_of(tmp_path)
    assert first is second

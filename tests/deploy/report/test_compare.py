"""Two runs side by side, as a table and as JSON."""

import json

import pytest

from deploy.report.compare import compare
from protocol.errors import RunFolderError
from tests.support.commands import run_cli
from tests.support.runs.ended import an_ended_run


def test_the_numbers_of_both_runs_and_their_difference(tmp_path, tiny_config):
    one = an_ended_run(tmp_path / "one", tiny_config(seed=0), lift=0.1)
    other = an_ended_run(tmp_path / "other", tiny_config(seed=1, sampling={"noise_level": 0.9}), lift=0.3)
    found = compare(one, other)
    facts = {fact.name: (fact.first, fact.second) for fact in found.facts}
    assert facts["iterations"] == (5, 5)
    assert facts["training seconds"] == (20, 20)
    assert facts["reward, last"] == pytest.approx((0.6, 0.8))
    assert facts["seconds/update, mean"] == (1, 1)
    assert found.differences == {"seed": (0, 1), "sampling.noise_level": (0.7, 0.9)}
    everything, colors, counting = found.heldout
    assert [row.kind for row in found.heldout] == ["all kinds", "colors", "counting"]
    assert everything.second - everything.first == pytest.approx(0.2)
    for row in (everything, colors, counting):
        assert row.difference is not None
        assert (row.difference.low, row.difference.high) == pytest.approx((0.2, 0.2), abs=1e-5)
        assert row.second_change is not None
        assert row.second_change.value == pytest.approx(0.3, abs=1e-5)
    assert found.notes == []


def test_evaluations_with_other_noise_are_shown_without_an_interval(tmp_path, tiny_config):
    one = an_ended_run(tmp_path / "one", tiny_config())
    other = an_ended_run(tmp_path / "other", tiny_config(evaluation={"seed": 5}))
    found = compare(one, other)
    assert found.heldout[0].difference is None
    assert found.heldout[0].first_change is not None
    assert found.notes == ["held-out scores are not paired: the evaluations differ in their seed"]


def test_a_run_without_scores_by_prompt_is_compared_without_them(tmp_path, tiny_config):
    one, other = (an_ended_run(tmp_path / name, tiny_config()) for name in ("one", "other"))
    for path in (other / "gallery").glob("*.json"):
        path.unlink()
    found = compare(one, other)
    assert found.heldout == []
    assert found.notes == ["other has no held-out scores by prompt, so there is no interval"]


def test_the_same_run_twice_and_a_run_without_metrics_are_refused(tmp_path, tiny_config):
    one, other = (an_ended_run(tmp_path / name, tiny_config()) for name in ("one", "other"))
    with pytest.raises(RunFolderError, match="two different runs must be given"):
        compare(one, tmp_path / "other" / ".." / "one")
    (other / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="must have metrics to be compared, got none in .*other"):
        compare(one, other)


def test_the_commands_find_runs_by_name_and_write_json(tmp_path, tiny_config, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, lift in (("one", 0.1), ("other", 0.2)):
        an_ended_run(tmp_path / "runs" / name, tiny_config(), lift=lift)

    def run(*words: str) -> str:
        assert run_cli(monkeypatch, *words) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    assert json.loads(run("compare", "one", "runs/other", "--json"))["heldout"][0]["difference"]["low"] > 0.09
    table = run("compare", "one", "other")
    assert "+0.100 [+0.100, +0.100]" in table
    assert max(map(len, table.splitlines())) <= 80
    assert run("report", "one", "other", "--out", "mine.html").strip() == "mine.html"
    assert (tmp_path / "mine.html").is_file()


def test_a_run_that_is_not_there_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, "report", "nothing") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no run folder nothing and no runs/nothing" in line
    assert list(tmp_path.iterdir()) == []

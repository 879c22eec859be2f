"""Two runs side by side, as a table and as JSON."""

import json

import pytest

from deploy.folder.read import Origin
from deploy.report.compare import compare
from deploy.report.page import report_of
from deploy.report.runs import read_runs
from protocol.errors import RunFolderError
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


def test_the_commands_find_runs_by_name_and_write_json(tmp_path, tiny_config, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    for name, lift in (("one", 0.1), ("other", 0.2)):
        an_ended_run(tmp_path / "runs" / name, tiny_config(), lift=lift)

    assert json.loads(cli.done("compare", "one", "runs/other", "--json"))["heldout"][0]["difference"]["low"] > 0.09
    table = cli.done("compare", "one", "other")
    assert "+0.100 [+0.100, +0.100]" in table
    assert max(map(len, table.splitlines())) <= 80
    assert cli.done("report", "one", "other", "--out", "mine.html").strip() == "mine.html"
    assert (tmp_path / "mine.html").is_file()


def test_a_run_that_is_not_there_is_one_line(monkeypatch, tmp_path, cli):
    monkeypatch.chdir(tmp_path)
    line = cli.refused("report", "nothing")
    assert "there is no run folder nothing and no runs/nothing" in line
    assert list(tmp_path.iterdir()) == []


def test_groups_of_seeds_are_compared_with_an_interval_over_seeds_and_the_cost(tmp_path, tiny_config, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        an_ended_run(tmp_path / f"runs/flow_{seed}", tiny_config(seed=seed), lift=0.1 + 0.01 * seed)
        tree = tiny_config(seed=seed, sampling={"noise_level": 0.9})
        an_ended_run(tmp_path / f"runs/tree_{seed}", tree, lift=0.2 + 0.01 * seed)
    words = [*sorted(map(str, tmp_path.glob("runs/flow_*"))), "--", *sorted(map(str, tmp_path.glob("runs/tree_*")))]
    found = json.loads(cli.done("compare", *words, "--json"))
    assert (found["first"], found["second"]) == ("flow (3 seeds)", "tree (3 seeds)")
    assert found["heldout"][0]["difference"]["has_seeds"]
    assert found["heldout"][0]["difference"]["value"] == pytest.approx(0.1, abs=1e-5)
    assert "tree is better than flow (+0.100, 95 % interval" in found["verdict"]
    assert "over seeds and prompts" in found["verdict"]
    there = compare(*([tmp_path / f"runs/{name}_{seed}" for seed in range(3)] for name in ("tree", "flow"))).verdict
    assert there.partition("). ")[0] == found["verdict"].partition("). ")[0], "the same whichever comes first"
    assert "20 s of training each" in found["verdict"]
    page = report_of(read_runs([tmp_path / "runs" / name for name in ("flow_0", "flow_1", "tree_0", "tree_1")]))
    assert "tree is better" in page[page.index("<main>") : page.index("<h2>")]


def test_a_difference_within_chance_is_said_to_be_chance(tmp_path, tiny_config):
    paths = [an_ended_run(tmp_path / f"a_{seed}", tiny_config(seed=seed), lift=0.1 * seed) for seed in range(4)]
    found = compare(paths[::2], paths[1::2])
    assert "is within chance" in found.verdict
    assert "better" not in found.verdict


def test_more_than_two_runs_need_their_two_groups(cli):
    for words in (["a", "b", "c"], ["a"], ["a", "--"], ["a", "--", "b", "--", "c"]):
        line = cli.refused("compare", *words)
        assert "two groups with -- between them" in line


def test_runs_of_other_code_are_told_apart(tmp_path, tiny_config):
    one, other = (an_ended_run(tmp_path / name, tiny_config()) for name in ("one", "other"))
    for path, code in ((one, "aaa"), (other, "bbb")):
        origin = Origin(versions={"code": code, "commit": "123456789abc, changed"})
        (path / "origin.json").write_text(origin.model_dump_json())
    assert compare(one, other).differences["code"] == (
        "aaa (commit 123456789abc, changed)",
        "bbb (commit 123456789abc, changed)",
    )
    assert "code aaa (commit 123456789abc, changed)" in report_of(read_runs([one]))

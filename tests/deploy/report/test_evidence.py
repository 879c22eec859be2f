"""`flowcredit evidence`: what a folder to publish holds, and that nothing half written is left."""

import json

import pytest

from deploy.report.evidence import commit
from protocol.ground.files import sha256_of
from tests.support.paths import ROOT
from tests.support.runs.ended import an_ended_run


def test_a_folder_to_publish_has_config_curves_images_scores_and_their_hashes(tmp_path, tiny_config, cli):
    run, out = an_ended_run(tmp_path / "run", tiny_config()), tmp_path / "evidence"
    assert cli.done("evidence", str(run), "--out", str(out), "--device", "8 x H100").strip() == str(out)
    facts = json.loads((out / "evidence.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    iterations = [line for line in metrics if "reward/mean" in line]
    scores = [line["evaluation/score"] for line in metrics if "evaluation/score" in line]
    assert (facts["device"], facts["commit"], facts["iterations"]) == ("8 x H100", commit(), len(iterations))
    assert [each["score"] for each in facts["heldout"]] == scores
    assert facts["seconds"]["iteration"] > 0
    held = {
        str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file() and path.name != "evidence.json"
    }
    assert {"config.yaml", "metrics.jsonl", "report.html"} < held.keys()
    assert {part for name in held if "/" in name for part in [name.split("/")[0]]} == {"gallery", "charts"}
    assert facts["sha256"] == {name: sha256_of(path) for name, path in held.items()}
    assert "--out must be a new or empty folder" in cli.refused("evidence", str(run), "--out", str(out))


def test_without_a_run_nothing_is_written(tmp_path, cli):
    (tmp_path / "run").mkdir()
    assert "must hold config.yaml" in cli.refused("evidence", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_commit_is_that_of_this_checkout():
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    assert len((commit() or "").rstrip("+")) == 40

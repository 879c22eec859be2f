"""The dashboard against what a living run really exports: every query finds something, and nothing is drawn twice."""

import asyncio
import json
import re
import subprocess
from itertools import combinations
from pathlib import Path

import httpx2
import pytest

from deploy.presets import load_config
from protocol.status import Usage
from tests.support.paths import ROOT
from tests.support.programs import need
from tests.support.runs.scene import preset
from tests.support.runs.watched import Scene, comes_to, go
from tests.support.services.serving import Serve
from tests.support.waiting import until

DASHBOARD = json.loads((ROOT / "deploy/grafana/flowcredit.json").read_text())
SELECTOR = re.compile(r"(flowcredit_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
Samples = list[tuple[str, dict[str, str]]]


@pytest.fixture(scope="module")
def exported(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    """`/metrics` of a server over a run that is paused after some iterations."""
    folder, texts = tmp_path_factory.mktemp("grafana"), []
    path = preset(folder, tiny_sd3, iterations=6, status={"heartbeat_s": 0.05})

    async def look(scene: Scene) -> None:
        await until(lambda: comes_to(scene, 3))
        await scene.outcome(await scene.ask("pause"))
        process, address = await asyncio.to_thread(serve, str(folder / "run"))
        texts.append(await asyncio.to_thread(lambda: httpx2.get(f"{address}/metrics").text))
        process.terminate()
        await scene.outcome(await scene.ask("resume"))

    used = Usage(memory_bytes=2**30, gpu_memory_bytes=2**33, gpu_share=0.875)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.run.local.usage", lambda: used)
        go(load_config(path), folder / "run", beside=look, slow_s=0.1)
    return texts[0]


@pytest.fixture(scope="module")
def trajectories(exported: str) -> Samples:
    from prometheus_client.parser import text_string_to_metric_families

    return [
        (record.name, record.labels) for family in text_string_to_metric_families(exported) for record in family.samples
    ]


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def finds(name: str, matchers: str, trajectories: Samples) -> bool:
    """Whether a selector finds a record, by Prometheus' rules: expressions are anchored, an absent label is empty."""
    tests = {
        "=": lambda held, wanted: held == wanted,
        "!=": lambda held, wanted: held != wanted,
        "=~": lambda held, wanted: re.fullmatch(wanted, held) is not None,
        "!~": lambda held, wanted: re.fullmatch(wanted, held) is None,
    }
    found = MATCHER.findall(matchers)
    assert len(found) == matchers.count('"') // 2, matchers
    return any(
        record == name and all(tests[sign](labels.get(label, ""), wanted) for label, sign, wanted in found)
        for record, labels in trajectories
    )


def test_every_query_finds_what_a_living_run_exports(trajectories):
    assert queries()
    for query in queries():
        selectors = SELECTOR.findall(query)
        assert selectors, query
        for name, matchers in selectors:
            assert 'run=~"$run"' in matchers, query
            assert finds(name, matchers.replace("$run", "run"), trajectories), query


def test_a_query_for_what_is_not_exported_is_found_out(trajectories):
    assert not finds("flowcredit_iterationz", 'run=~"run"', trajectories)
    assert not finds("flowcredit_metric", 'run=~"run",name="reward/men"', trajectories)
    assert not finds("flowcredit_pool_actors", 'run=~"run",state=~"desire"', trajectories)


def test_every_name_that_a_legend_shows_is_a_label_of_its_query(trajectories):
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            ((name, _), *_) = SELECTOR.findall(target["expr"])
            labels = next(labels for record, labels in trajectories if record == name)
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(labels), target


def test_the_dashboard_is_bound_to_its_variables_and_nothing_overlaps():
    assert DASHBOARD["uid"] == "flowcredit"
    assert DASHBOARD["schemaVersion"] >= 36, "since Grafana 9 a datasource is named by type and uid"
    assert "id" not in DASHBOARD, "Grafana gives it when the dashboard is imported"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["source"]["type"] == "datasource"
    assert variables["source"]["query"] == "prometheus"
    bound = {"type": "prometheus", "uid": "${source}"}
    assert variables["run"]["datasource"] == bound
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["datasource"] != bound] == []
    assert {name for query in queries() for name in re.findall(r"\$(\w+)", query)} == {"run"}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)


def test_promtool_finds_nothing_wrong_with_the_exposition(exported):
    words = [need("promtool"), "check", "metrics"]
    checked = subprocess.run(words, input=exported, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")

"""Curves, configs, evaluations and files of runs: over a real server, from run folders."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from deploy.api.folder_source import FolderSource
from deploy.api.history import curves as curves_module
from deploy.api.history.curves import CurveCache
from deploy.api.history.evaluations import MOST_EVALUATIONS, images_of, scores
from deploy.api.history.routes import newest_adapter
from protocol.config.run import RunConfig
from protocol.ground.files import ADAPTER_FILE
from protocol.status import MetricLine, RunStatus
from tests.support.runs.ended import an_ended_run
from tests.support.runs.long import a_long_run
from tests.support.runs.played import played_run
from tests.support.runs.statuses import a_status
from tests.support.services.serving import Serve
from tests.support.waiting import PATIENCE_S

STEPS, ITERATIONS = 4, 1000


@pytest.fixture(scope="module")
def folder(tiny_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        config = tiny_config(seed=seed, status={"heartbeat_s": float(seed)})
        a_long_run(root / f"mine_{seed}", config, iterations=30, steps=STEPS, evaluations=3)
    a_long_run(root / "other", tiny_config(seed=3, group={"size": 8, "shard": 2}), iterations=30, steps=STEPS)
    a_long_run(root / "long", tiny_config(seed=4), iterations=ITERATIONS, steps=STEPS, evaluations=5)
    return root


@pytest.fixture(scope="module")
def client(folder: Path, serve: Serve) -> Iterator[httpx2.Client]:
    _, address = serve(str(folder))
    with httpx2.Client(base_url=address, timeout=PATIENCE_S) as opened:
        yield opened


def curves(client: httpx2.Client, run: str, names: str, **asked: Any) -> dict[str, Any]:
    answer = client.get(f"/runs/{run}/curves", params={"names": names, **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines_of(folder: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def test_a_short_run_has_a_point_for_every_iteration(client, folder):
    found = curves(client, "mine_1", "reward/mean,evaluation/score")
    rewards = [(line["iteration"], line["reward/mean"]) for line in lines_of(folder, "mine_1") if "reward/mean" in line]
    series = found["series"]["reward/mean"]
    assert found["width"] == 0
    assert "low" not in series
    assert list(zip(found["x"][series["x"]], series["y"], strict=True)) == [
        (at, pytest.approx(value, rel=1e-5)) for at, value in rewards
    ]
    assert found["x"][found["series"]["evaluation/score"]["x"]] == [0, 15, 30]


def test_a_long_run_is_thinned_to_means_with_their_ranges(client, folder):
    found = curves(client, "long", "reward/mean,step_reward/step_*_abs_mean", points=50)
    assert found["width"] == 20
    assert set(found["series"]) == {"reward/mean", *(f"step_reward/step_{step}_abs_mean" for step in range(STEPS))}
    assert len({series["x"] for series in found["series"].values()}) == 1, "they share their points"
    series = found["series"]["reward/mean"]
    held = [line["reward/mean"] for line in lines_of(folder, "long") if 20 <= line["iteration"] < 40]
    held = held[:20]
    assert found["x"][0][1] == pytest.approx(29.5)
    assert (series["y"][1], series["low"][1], series["high"][1]) == (
        pytest.approx(np.mean(held), rel=1e-5),
        pytest.approx(min(held), rel=1e-5),
        pytest.approx(max(held), rel=1e-5),
    )
    assert len(series["y"]) == 51
    assert series["each"] == pytest.approx(ITERATIONS / 51)


def test_a_part_of_a_long_run_is_shown_whole(client):
    found = curves(client, "long", "reward/mean", points=100, start=500, end=540)
    assert found["x"][0] == list(range(500, 541))
    assert (found["first"], found["last"], found["width"]) == (0, ITERATIONS, 0)


def test_the_axis_may_be_training_seconds_without_evaluations(client, folder):
    found = curves(client, "mine_1", "reward/mean,evaluation/score", by="seconds")
    spent = math.fsum(line.get("seconds/iteration", 0) for line in lines_of(folder, "mine_1"))
    assert found["x"][found["series"]["reward/mean"]["x"]][-1] == pytest.approx(spent, rel=1e-5)
    assert found["last"] == pytest.approx(spent)
    assert found["x"][found["series"]["evaluation/score"]["x"]][0] == 0


async def test_an_answer_of_28_steps_and_5000_iterations_is_small_and_reads_each_line_once():
    asked = []
    values = {f"step_reward/step_{step}_abs_mean": 0.123456789 for step in range(28)} | {"reward/mean": 0.5}
    lines = [MetricLine(seq=n, values={"iteration": n, **values}) for n in range(1, 5001)]

    class Source(FolderSource):
        async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
            asked.append(since)
            return lines[since : since + limit]

    cache = CurveCache(Source(Path()))
    sizes = []
    for known in (4999, 4999, 5000):
        status = a_status("one", lines=known)
        sizes.append(len((await cache.curves(status, ["*"])).model_dump_json(exclude_none=True)))
    again = a_status("one", session="another", lines=3)
    assert (await cache.curves(again, ["reward/mean"])).lines == 3, "another session begins again"
    assert max(sizes) < 300_000
    assert asked == [0, 1000, 2000, 3000, 4000, 4999, 0]


async def test_curves_of_a_run_that_grows_under_many_requests_are_whole():
    """One request draws the columns in a thread while the next ones have new lines to add."""
    values = {f"step_reward/step_{step}_abs_mean": 0.5 for step in range(20)}

    class Source(FolderSource):
        async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
            return [
                MetricLine(seq=seq, values={"iteration": seq, **values}) for seq in range(since + 1, since + limit + 1)
            ]

    cache = CurveCache(Source(Path()))
    statuses = [a_status("mine", lines=1000 + more) for more in range(30)]
    found = await asyncio.gather(*(cache.curves(status, ["step_reward/"], points=10_000) for status in statuses))
    held = [(each.lines, {len(each.x[series.x]) for series in each.series.values()}) for each in found]
    assert held == [(1000 + more, {1000 + more}) for more in range(30)]


async def test_runs_beyond_the_last_few_are_forgotten(monkeypatch):
    monkeypatch.setattr(curves_module, "RUNS_HELD", 1)
    read = []

    class Source(FolderSource):
        async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
            read.append(run)
            return [MetricLine(seq=1, values={"iteration": 1, "reward/mean": 0.5})]

    cache = CurveCache(Source(Path()))
    for run in ("one", "two", "two", "one"):
        assert (await cache.curves(a_status(run, lines=1), ["reward/*"])).series["reward/mean"].y == [0.5]
    assert read == ["one", "two", "one"]


def test_what_differs_is_told_and_seeds_make_a_group(client):
    found = client.get("/configs", params={"run": ["mine_1", "mine_2", "other"]}).json()
    assert found["keys"] == ["group.size", "status.heartbeat_s"], "what can change a result comes first"
    runs = found["runs"]
    assert set(runs) == {"mine_1", "mine_2", "other"}
    assert runs["mine_1"]["group"] == runs["mine_2"]["group"] != runs["other"]["group"]
    assert [runs[name]["seed"] for name in ("mine_1", "mine_2")] == [1, 2]
    assert (runs["mine_1"]["values"]["group.size"], runs["other"]["values"]["group.size"]) == ("4", "8")
    assert set(client.get("/configs").json()["runs"]) == {"mine_1", "mine_2", "other", "long"}
    assert client.get("/configs", params={"run": ["mine_1", "nosuch"]}).status_code == 404
    held = client.get("/runs/other/config").json()
    assert held["fields"]["group.size"] == 8
    assert "size: 8" in held["text"]


def test_a_config_that_changes_is_read_again_and_one_that_is_damaged_hides_no_other(tiny_config, tmp_path, serve):
    for name in ("one", "two"):
        an_ended_run(tmp_path / name, tiny_config(group={"size": 4, "shard": 2}))
    _, address = serve(str(tmp_path))
    with httpx2.Client(base_url=address, timeout=PATIENCE_S) as client:
        assert client.get("/configs").json()["keys"] == []
        (tmp_path / "one" / "config.yaml").write_text(tiny_config(group={"size": 16, "shard": 2}).to_yaml())
        assert client.get("/configs").json()["keys"] == ["group.size"]
        (tmp_path / "one" / "config.yaml").write_text("group: [")
        assert set(client.get("/configs").json()["runs"]) == {"two"}
        answer = client.get("/runs/one/config")
        assert (answer.status_code, "holds no readable config.yaml" in answer.json()["detail"]) == (404, True)


def test_scores_by_prompt_come_with_their_course(client, folder):
    found = client.get("/runs/mine_1/evaluations").json()
    assert (found["iterations"], found["galleries"], found["readings"]) == ([0, 15, 30], [0, 15, 30], ["score", "clip"])
    assert (len(found["prompts"]), found["tags"][0], found["left_out"]) == (24, "single_object", 0)
    held = json.loads((folder / "mine_1" / "gallery" / "iteration_000015.json").read_text())
    assert found["scores"][1] == [pytest.approx(np.mean(row), abs=1e-6) for row in held["scores"]["score"]]
    other = client.get("/runs/mine_1/evaluations", params={"reading": "clip"}).json()
    assert other["scores"][1][0] == pytest.approx(found["scores"][1][0] / 2, abs=1e-6)
    none = client.get("/runs/mine_1/evaluations", params={"reading": "nobody"}).json()
    assert set(none["scores"][0]) == {None}


def test_many_evaluations_are_thinned_and_the_first_and_newest_stay(tiny_config, tmp_path):
    run = a_long_run(tmp_path / "run", tiny_config(), iterations=250, steps=1, evaluations=2)
    first = json.loads((run / "gallery" / "iteration_000000.json").read_text())
    for iteration in range(1, 250):
        (run / "gallery" / f"iteration_{iteration:06d}.json").write_text(json.dumps(first | {"iteration": iteration}))
    found = scores(run, "score")
    assert (len(found.iterations), found.iterations[0], found.iterations[-1]) == (MOST_EVALUATIONS, 0, 250)


def test_images_of_an_evaluation_fit_a_page(client, folder, tmp_path):
    found = client.get("/runs/mine_1/gallery/15").json()
    assert (found["media"], found["width"], found["height"]) == ("image/png", 32, 32)
    assert len(found["prompts"]) == len(found["scores"]) == 12
    evaluations = client.get("/runs/mine_1/evaluations").json()
    by_prompt = dict(zip(evaluations["prompts"], evaluations["scores"][1], strict=True))
    assert found["scores"] == [pytest.approx(by_prompt[prompt], abs=1e-5) for prompt in found["prompts"]]
    assert "score of all 48 images: " in found["change"]
    assert client.get("/runs/mine_1/gallery/0").json()["change"] == ""
    (gallery := tmp_path / "gallery").mkdir()
    large = np.zeros((2, 1024, 512, 3), np.uint8)
    np.savez(
        gallery / "iteration_000001.npz", prompts=np.array(["a", "b"]), images=large, readings=np.array([1.0, np.nan])
    )
    small = images_of(tmp_path, 1)
    assert small is not None
    assert (small.width, small.height, small.media, small.scores) == (128, 256, "image/jpeg", [1.0, None])
    assert (small.image_width, small.image_height, small.beside) == (512, 1024, "")
    np.savez(
        gallery / "iteration_000003.npz",
        prompts=np.array(["a", "b"]),
        images=large,
        readings=np.ones(2),
        conditions=large,
        wanted=large,
    )
    edited = images_of(tmp_path, 3)
    assert edited is not None  # three images of 512 pixels and two gaps of 32, at a quarter
    assert (edited.width, edited.height, edited.image_width) == ((3 * 512 + 2 * 32) // 4, 256, 512)
    assert "left: the image to edit" in edited.beside and "right: the wanted image" in edited.beside
    (gallery / "iteration_000002.npz").write_bytes(b"PK damaged")
    assert images_of(tmp_path, 2) is None
    answer = client.get("/runs/mine_1/gallery/16")
    assert (answer.status_code, "no images of this iteration" in answer.json()["detail"]) == (404, True)


def test_files_are_downloaded_under_their_runs_name(client, folder):
    answer = client.get("/runs/other/files/metrics")
    assert answer.content == (folder / "other" / "metrics.jsonl").read_bytes()
    assert answer.headers["content-disposition"] == 'attachment; filename="other_metrics.jsonl"'
    assert client.get("/runs/other/files/config").text == (folder / "other" / "config.yaml").read_text()
    assert client.get("/runs/other/files/adapter").json()["detail"] == "the run has no whole checkpoint yet"
    assert client.get("/runs/other/files/control.token").status_code == 422
    assert client.get("/runs/other/files/events").json()["detail"] == "the run has no events.jsonl"


def test_a_file_that_grows_while_it_is_downloaded_arrives_as_it_was(client, folder):
    path = folder / "mine_2" / "events.jsonl"
    path.write_bytes(held := b'{"type": "event"}\n' * 500_000)
    with client.stream("GET", "/runs/mine_2/files/events") as answer:
        pieces = answer.iter_bytes()
        arrived = [next(pieces)]
        with path.open("ab") as file:
            file.write(held)
        arrived += pieces
    path.unlink()
    assert b"".join(arrived) == held


async def test_curves_of_more_runs_than_are_held_are_whole(monkeypatch):
    """A run's columns may be dropped while requests for it wait."""
    monkeypatch.setattr(curves_module, "RUNS_HELD", 1)
    values = {f"step_reward/step_{step}_abs_mean": 0.5 for step in range(20)}

    class Source(FolderSource):
        async def lines(self, run: str, *, since: int, limit: int) -> list[MetricLine]:
            await asyncio.sleep(0)
            return [
                MetricLine(seq=seq, values={"iteration": seq, **values}) for seq in range(since + 1, since + limit + 1)
            ]

    lines = Counter(dict.fromkeys(("one", "two", "three"), 200))

    async def window(cache: CurveCache) -> set[bool]:
        whole = set()
        for run in [*lines] * 10:
            lines[run] += 1
            found = await cache.curves(a_status(run, lines=lines[run]), ["step_reward/"], points=10_000)
            whole |= {len(found.x[series.x]) == found.lines for series in found.series.values()}
        return whole

    cache = CurveCache(Source(Path()))
    assert set().union(*await asyncio.gather(*(window(cache) for _ in range(6)))) == {True}


def test_the_adapter_is_that_of_the_newest_whole_checkpoint(tmp_path):
    assert newest_adapter(tmp_path) is None
    for name, is_whole in (("iteration_000009", True), ("iteration_000010", True), ("iteration_000011", False)):
        (folder := tmp_path / "checkpoints" / name).mkdir(parents=True)
        (folder / ADAPTER_FILE).write_bytes(b"adapter")
        if is_whole:
            (folder / "manifest.json").write_text("{}")
    copied = tmp_path / "checkpoints" / "iteration_000010_best"
    copied.mkdir()
    (copied / "manifest.json").write_text("{}")
    assert newest_adapter(tmp_path) == tmp_path / "checkpoints" / "iteration_000010" / ADAPTER_FILE


def test_a_report_of_several_runs_can_be_downloaded(client):
    answer = client.get("/report", params={"run": ["mine_1", "other"]})
    assert answer.headers["content-disposition"] == 'attachment; filename="runs_report.html"'
    assert "mine_1" in answer.text
    assert "group.size" in answer.text
    assert client.get("/report", params={"run": "gone"}).status_code == 404
    assert client.get("/report").status_code == 422


def test_a_board_has_no_files_and_says_where_they_are(tmp_path, serve):
    with played_run(tmp_path, "played") as (url, _):
        _, address = serve(url)
        for path in ("config", "evaluations", "gallery/0", "files/metrics"):
            answer = httpx2.get(f"{address}/runs/played/{path}", timeout=PATIENCE_S)
            assert answer.status_code == 404
            assert "reads a board, which has no files: `flowcredit serve FOLDER`" in answer.json()["detail"]
        assert httpx2.get(f"{address}/configs", timeout=PATIENCE_S).json() == {"keys": [], "left_out": 0, "runs": {}}
        assert httpx2.get(f"{address}/runs/played/curves?names=*", timeout=PATIENCE_S).json()["series"] == {}


def test_health_stands_in_the_status_and_in_the_list(client):
    listed = {run["run"]: run for run in client.get("/runs").json()}
    status = RunStatus.model_validate(client.get("/runs/long").json())
    assert listed["long"]["health"] == status.health
    assert status.health.startswith(f"Finished after {ITERATIONS} iterations: held-out score ")
    assert listed["long"]["heldout"] == pytest.approx(status.rewards.heldout)

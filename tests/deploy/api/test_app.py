"""The status API over a real server and a real board: answers, rights, errors, and what schemathesis makes of it."""

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
from anyio import BrokenResourceError
from fastapi.security import HTTPAuthorizationCredentials
from PIL import Image
from redis import Redis

from deploy.api.auth import Access, is_loopback, read_token
from deploy.api.cache import FRESH_S
from deploy.api.middleware import RequestGuard
from deploy.api.problems import Problem
from deploy.api.prometheus import exposition
from deploy.api.serve import listen
from deploy.board.board import Board, Update
from deploy.board.embedded import BoardServer
from protocol.commands import Command
from protocol.errors import BoardError, ConfigError
from protocol.status import ActorStatus, Event, MetricLine, Rewards, Usage
from tests.support.paths import ROOT
from tests.support.runs.statuses import a_record, a_status
from tests.support.services.serving import AUTHORISED, TOKEN, Serve
from tests.support.waiting import PATIENCE_S, wait_until

KIND = {"content-type": "application/json"}
LINES = [
    MetricLine(seq=seq, values={"iteration": seq, "reward/mean": seq / 10, "train/loss": None, "seconds/update": 1.0})
    for seq in range(1, 7)
]


@pytest.fixture(scope="module")
def board_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = BoardServer(tmp_path_factory.mktemp("board"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def living(board_url: str) -> Iterator[None]:
    """Two runs on the board; `alive` gives signs of life, carries out nothing; `over` has ended."""
    ending = threading.Event()

    async def live() -> None:
        board = Board(board_url)
        events = [Event(number=1, time=1.0, kind="info", message="the run begins")]
        rewards, metrics = Rewards(now=0.4, heldout=0.6), {"reward/mean": 0.4, "evaluation/score": 0.6}
        over = a_status("over", "finished", rewards=rewards, metrics=metrics)
        damaged = a_record(7).model_copy(update={"width": 5})
        while not ending.is_set():
            try:
                update = Update(a_status("alive", metrics=LINES[-1].values), LINES, events, [a_record(), damaged])
                await board.write(update, keep_s=3600)
                await board.write(Update(over), keep_s=3600)
                await board.write(Update(a_status("deaf")), keep_s=3600)
            except BoardError:
                pass
            await asyncio.sleep(0.3)
        await board.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    yield
    ending.set()
    thread.join()


@pytest.fixture(scope="module")
def api(board_url: str, living: None, serve: Serve) -> Iterator[str]:
    process, address = serve(board_url)
    with httpx2.Client() as client:
        wait_until(lambda: bool(client.get(f"{address}/runs").json()))
    yield address
    process.terminate()
    assert process.wait(PATIENCE_S) == 0 or process.returncode < 0


@pytest.fixture
def client(api: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=api, timeout=PATIENCE_S) as client:
        yield client


def test_runs_are_listed_with_their_phase(client):
    runs = {run["run"]: run for run in client.get("/runs").json()}
    assert (runs["alive"]["phase"], runs["alive"]["iteration"], runs["alive"]["stale_since"]) == ("running", 6, None)
    assert runs["over"]["phase"] == "finished"


def test_a_run_s_status_is_the_document_on_the_board(client):
    answer = client.get("/runs/alive").json()
    assert (answer["schema_version"], answer["adapter_version"], answer["pools"][0]["restarts"]) == (1, 6, 1)
    assert answer["conditions"][0]["message"] == "3 missing"


def test_metrics_come_after_since_and_only_with_the_wanted_names(client):
    answer = client.get("/runs/alive/metrics", params={"since": 4, "names": "reward/,train/loss"}).json()
    assert answer == [
        {"seq": 5, "values": {"iteration": 5.0, "reward/mean": 0.5, "train/loss": None}},
        {"seq": 6, "values": {"iteration": 6.0, "reward/mean": 0.6, "train/loss": None}},
    ]


def test_events_are_streamed_status_first(client):
    seen = []
    with client.stream("GET", "/runs/alive/events", params={"since": 5}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((name, json.loads(line.removeprefix("data: "))))
            if len({name for name, _ in seen}) == 3:
                break
    data = dict(seen)
    assert data["status"]["run"] == "alive"
    assert [line["seq"] for line in data["metrics"]] == [6]
    assert data["event"]["message"] == "the run begins"


async def served(error: Exception) -> None:
    """Serve one request by an application that ends with an error."""

    async def application(*_: Any) -> None:
        raise error

    scope = {"type": "http", "path": "/runs/alive/events", "headers": []}
    await RequestGuard(application, max_body_bytes=1, bodies_held=1)(scope, None, None)  # type: ignore[arg-type]


def test_a_reader_of_events_who_leaves_is_no_error_and_anything_else_is():
    asyncio.run(served(ExceptionGroup("unhandled errors in a TaskGroup", [BrokenResourceError()])))
    with pytest.raises(ExceptionGroup, match="unhandled") as failed:
        asyncio.run(served(ExceptionGroup("unhandled", [BrokenResourceError(), ValueError("another")])))
    assert [str(error) for error in failed.value.exceptions] == ["another"]


def test_events_end_after_what_there_is_if_asked_once(client):
    def received(**position: object) -> list[tuple[str, Any]]:
        lines = client.get("/runs/alive/events", params={"once": True, **position}).text.split("\n")
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        return list(zip(names, (json.loads(line[6:]) for line in lines if line.startswith("data: ")), strict=True))

    assert [name for name, _ in received()] == ["status", "metrics", "event"]
    later = dict(received(since=4, since_event=1, session="s1"))
    assert (set(later), [line["seq"] for line in later["metrics"]]) == ({"status", "metrics"}, [5, 6])
    another = dict(received(since=4, since_event=1, session="of an earlier process"))
    assert [line["seq"] for line in another["metrics"]] == [1, 2, 3, 4, 5, 6]
    assert another["event"]["number"] == 1


def test_records_are_a_sheet_for_people_and_data_for_programs(client):
    sheet = client.get("/runs/alive/trajectories/5")
    assert sheet.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(sheet.content)).width == 3 * (64 + 6) + 6
    data = client.get("/runs/alive/trajectories/5/record").json()
    assert data["trajectories"][0]["rewards"] == pytest.approx([0.1, 0.2, 0.4])
    assert data["trajectories"][1]["rewards"] == [pytest.approx(0.1), None, pytest.approx(0.9)]
    assert data["trajectories"][1]["step_rewards"] == [None, None]
    assert data["trajectories"][0]["values"] == pytest.approx([0.0, 0.1, 0.3])
    tiles = np.asarray(Image.open(io.BytesIO(base64.b64decode(data["png"]))))
    assert tiles.shape == (2 * 4, 3 * 4, 3)
    np.testing.assert_array_equal(tiles[:4, 4:8], np.arange(48, 96, dtype=np.uint8).reshape(4, 4, 3))
    assert client.get("/runs/alive/trajectories/4").status_code == 404


def test_prometheus_reads_runs_pools_and_metrics(client):
    from prometheus_client.parser import text_string_to_metric_families

    text = client.get("/metrics").text
    values = {
        (record.name, tuple(sorted(record.labels.items()))): record.value
        for family in text_string_to_metric_families(text)
        for record in family.samples
    }
    assert values["flowcredit_iteration", (("run", "alive"),)] == 6
    assert values["flowcredit_pool_restarts_total", (("pool", "rollout"), ("run", "alive"))] == 1
    assert values["flowcredit_metric", (("name", "reward/mean"), ("run", "alive"))] == 0.6
    assert values["flowcredit_queue", (("queue", "groups/scored"), ("run", "alive"))] == 1
    labels = (("reason", "Missing"), ("run", "alive"), ("type", "ScoresComplete"))
    assert values["flowcredit_condition", labels] == 0


def test_prometheus_has_the_metrics_of_an_ended_run(client):
    values = client.get("/metrics").text
    assert 'flowcredit_metric{name="reward/mean",run="over"} 0.4' in values
    assert 'flowcredit_metric{name="evaluation/score",run="over"} 0.6' in values


def test_a_record_that_is_damaged_is_not_shown_and_says_so(client):
    answer = client.get("/runs/alive/trajectories/7")
    assert answer.status_code == 404
    assert "damaged: its images" in answer.json()["detail"]


def test_a_queue_that_is_full_says_so(client):
    """The run of this test carries nothing out."""
    answers = [
        client.post("/runs/deaf/commands", json={"command": "checkpoint"}, headers=AUTHORISED) for _ in range(51)
    ]
    assert [answer.status_code for answer in answers] == [202] * 50 + [429]
    assert "at most 50 commands may wait" in answers[-1].json()["detail"]


async def test_foreign_values_of_one_run_hide_no_other(client, board_url):
    board = Board(board_url)
    for run in ("broken", "strange"):
        await board.write(Update(a_status(run), LINES), keep_s=3600)
    await board.close()
    keys = Redis.from_url(board_url)
    keys.set("flowcredit:run:broken:status", b"\xff")
    keys.delete("flowcredit:run:strange:metrics")
    keys.set("flowcredit:run:strange:metrics", "no stream")
    wait_until(lambda: {"alive", "over", "strange"} <= {run["run"] for run in client.get("/runs").json()})
    assert client.get("/runs/alive").status_code == client.get("/readyz").status_code == 200
    answer = client.get("/runs/broken")
    assert answer.status_code == 502
    assert "the status of run broken on the board cannot be read" in answer.json()["detail"]
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert 'flowcredit_metric{name="reward/mean",run="alive"}' in answer.text
    keys.delete("flowcredit:run:broken:status", "flowcredit:run:strange:status")
    keys.close()


def test_readiness_reads_no_run(tmp_path, serve):
    """A status file that is a pipe would be waited for."""
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    os.mkfifo(run / "status.json")
    process, address = serve(str(tmp_path / "runs"))
    assert httpx2.get(f"{address}/readyz", timeout=PATIENCE_S).status_code == 200
    process.kill()
    process.wait(PATIENCE_S)


def test_a_server_on_any_loopback_address_knows_itself(tmp_path, serve):
    process, address = serve(str(tmp_path), "--host", "127.0.0.2")
    assert address.startswith("http://127.0.0.2:")
    assert httpx2.get(f"{address}/runs", timeout=PATIENCE_S).json() == []
    process.terminate()
    process.wait(PATIENCE_S)


async def test_a_desired_size_is_accepted_and_its_outcome_can_be_read(client, board_url):
    answer = client.put("/runs/alive/actors/reward/geneval", json={"count": 3}, headers=AUTHORISED)
    assert answer.status_code == 202
    assert answer.json()["state"] == "accepted"
    index = answer.headers["location"]
    assert client.get(index).json()["count"] == 3
    board = Board(board_url)
    command = Command.model_validate(answer.json()).model_copy(update={"state": "done", "finished": time.time()})
    await board.write(Update(a_status("alive"), commands=[command]), keep_s=3600)
    await board.close()
    assert client.get(index).json()["state"] == "done"


@pytest.mark.parametrize(
    ("call", "status", "detail"),
    [
        (lambda c: c.get("/runs/nobody"), 404, "no such run"),
        (lambda c: c.get("/runs/..%2f..%2fetc"), 404, "Not Found"),
        (lambda c: c.get("/static/..%2fserve.py"), 404, "no such file"),
        (lambda c: c.get("/runs/alive/metrics?since=-1"), 422, "query.since"),
        (lambda c: c.put("/runs/alive/actors/rollout", json={"count": 2}), 401, "token is missing or wrong"),
        (
            lambda c: c.put("/runs/alive/actors/rollout", json={"count": 2}, headers={"Authorization": "Bearer x"}),
            401,
            "token is missing or wrong",
        ),
        (lambda c: c.put("/runs/alive/actors/no", json={"count": 2}, headers=AUTHORISED), 404, "no such pool"),
        (lambda c: c.put("/runs/alive/actors/rollout", json={"count": 0}, headers=AUTHORISED), 422, "greater than"),
        (lambda c: c.put("/runs/alive/actors/rollout", json={"count": "9"}, headers=AUTHORISED), 422, "whole number"),
        (lambda c: c.put("/runs/over/actors/rollout", json={"count": 2}, headers=AUTHORISED), 409, "has finished"),
        (lambda c: c.post("/runs/alive/commands", json={"command": "explode"}, headers=AUTHORISED), 422, "pause"),
        (lambda c: c.post("/runs/alive/commands", content=b"x" * 9000, headers=AUTHORISED), 413, "4096 bytes"),
        (lambda c: c.get("/runs", headers={"Host": "evil.example"}), 421, "not known by that name"),
        (lambda c: c.post("/runs/alive/commands", content=b"\xff", headers=AUTHORISED | KIND), 400, "parsing the body"),
        (
            lambda c: c.post("/runs/alive/commands", json={"command": "stop", "x" * 3000: 1}, headers=AUTHORISED),
            422,
            "x" * 60 + ":",
        ),
    ],
)
def test_errors_are_problem_details(client, call: Callable[[httpx2.Client], httpx2.Response], status, detail):
    answer = call(client)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert set(body) == {"type", "title", "status", "detail"}
    assert body["status"] == status
    assert detail in body["detail"]


def test_the_400_of_a_body_is_documented_and_a_probe_without_host_is_answered(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert "400" in paths["/runs/{run}/commands"]["post"]["responses"]
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=PATIENCE_S) as probe:
        probe.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in probe.recv(1000)


def test_browsers_may_load_nothing_from_elsewhere_and_no_other_site_may_ask(client):
    answer = client.get("/", headers={"Origin": "https://evil.example"})
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "access-control-allow-origin" not in answer.headers
    assert "http" not in answer.text.replace("http-equiv", "")
    for file in (
        "app.js",
        "api.js",
        "charts.js",
        "choice.js",
        "compare.js",
        "config.js",
        "curves.js",
        "events.js",
        "images.js",
        "panels.js",
        "runs.js",
        "trajectories.js",
        "style.css",
        "vendor/uPlot.iife.min.js",
    ):
        assert client.get(f"/static/{file}").status_code == 200


def test_a_server_without_a_token_controls_nothing(board_url, living, serve):
    process, address = serve(board_url, token=None)
    answer = httpx2.post(f"{address}/runs/alive/commands", json={"command": "stop"}, headers=AUTHORISED)
    assert answer.status_code == 403
    assert "control needs a token" in answer.json()["detail"]
    process.terminate()
    process.wait(PATIENCE_S)


def test_a_server_that_others_can_reach_shows_nothing_without_the_token(tmp_path):
    access = Access(host="192.0.2.1", token=TOKEN)
    assert access.to_read
    assert not Access(host="127.0.0.1", token=TOKEN).to_read
    with pytest.raises(Problem, match="missing or wrong"):
        access.require_token(None)
    access.require_token(HTTPAuthorizationCredentials(scheme="Bearer", credentials=TOKEN))
    short = tmp_path / "token"
    short.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16 ASCII characters"):
        read_token(short)


@pytest.mark.parametrize(
    ("host", "holds"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)]
)
def test_loopback_is_told_from_the_rest(host, holds):
    assert is_loopback(host) is holds


def test_an_ipv6_address_is_shown_in_brackets():
    listener, address = listen("::1", 0)
    assert address == f"http://[::1]:{listener.getsockname()[1]}"
    listener.close()


def test_the_last_known_status_is_shown_with_its_time_when_the_board_is_away(tmp_path, serve):
    server = BoardServer(tmp_path)
    server.start()

    async def write() -> None:
        board = Board(server.url)
        for _ in range(100):
            try:
                await board.write(Update(a_status("alive"), LINES), keep_s=3600)
                return
            except BoardError:
                await asyncio.sleep(0.1)

    process, address = serve(server.url)
    asyncio.run(write())
    assert httpx2.get(f"{address}/runs/alive").json()["stale_since"] is None
    assert httpx2.get(f"{address}/readyz").status_code == 200
    server.stop()
    assert httpx2.get(f"{address}/readyz").status_code == 503
    assert httpx2.get(f"{address}/healthz").status_code == 200
    assert httpx2.get(f"{address}/runs/other").status_code == 503
    time.sleep(FRESH_S)
    scaled = httpx2.put(f"{address}/runs/alive/actors/rollout", json={"count": 2}, headers=AUTHORISED)
    assert scaled.status_code == 503 and "the board does not answer" in scaled.json()["detail"]
    wait_until(lambda: httpx2.get(f"{address}/runs/alive").json()["stale_since"] is not None)
    answer = httpx2.get(f"{address}/runs/alive").json()
    assert answer["stale_since"] == pytest.approx(answer["updated"], abs=60)
    process.terminate()
    process.wait(PATIENCE_S)


def test_ctrl_c_ends_a_server_quietly(tmp_path, serve):
    process, _ = serve(str(tmp_path), token=None)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    assert "stopped at once" not in process.stdout.read()


def test_a_server_of_a_script_s_background_ends_with_ctrl_c_from_its_announcement_on(tmp_path):
    """Such a shell lets its processes ignore Ctrl-C until they ask for it."""
    words = [
        "bash",
        "-c",
        'trap "" INT; exec "$@"',
        "shell",
        sys.executable,
        "-m",
        "flowcredit",
        "serve",
        str(tmp_path),
    ]
    with subprocess.Popen([*words, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("page")
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_server_goes_on_for_those_who_are_connected_when_it_is_asked_to(tmp_path, serve):
    process, address = serve(str(tmp_path), "--linger", "3600")
    with httpx2.Client(base_url=address, timeout=30) as client:
        assert client.get("/runs").json() == []
        for _ in range(3):  # a child's watcher repeats its signal
            process.send_signal(signal.SIGTERM)
            assert client.get("/runs").json() == []
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
    process, _ = serve(str(tmp_path), "--linger", "3600")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM), "nobody is connected"


@pytest.mark.whole
def test_schemathesis_finds_no_unexpected_answer(api):
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{api}/openapi.json")
    seen = set()

    for operation in schema.get_all_operations():
        found = operation.ok()
        if found.path == "/runs/{run}/events":
            continue  # endless by design; tested above
        seen.add(found.path)

        @settings(
            max_examples=15,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=found.as_strategy())
        def probe(case):
            case.call_and_validate(headers=AUTHORISED, timeout=PATIENCE_S)

        probe()
    assert {"/runs", "/runs/{run}", "/runs/{run}/actors/{pool}", "/runs/{run}/commands", "/metrics"} <= seen


def test_prometheus_has_what_each_actor_uses():
    used = Usage(memory_bytes=2**30, gpu_memory_bytes=2**33, gpu_share=0.875)
    actors = [
        ActorStatus(name="rollout-0", kind="rollout", state="busy", usage=used),
        ActorStatus(name="reward/red-0", kind="reward/red", state="idle", usage=Usage(memory_bytes=2**29)),
    ]
    lines = exposition([a_status("alive", actors=actors)]).decode().splitlines()
    assert [line for line in lines if line.startswith("flowcredit_actor_")] == [
        'flowcredit_actor_memory_bytes{actor="rollout-0",run="alive"} 1.073741824e+09',
        'flowcredit_actor_memory_bytes{actor="reward/red-0",run="alive"} 5.36870912e+08',
        'flowcredit_actor_gpu_memory_bytes{actor="rollout-0",run="alive"} 8.589934592e+09',
        'flowcredit_actor_gpu_share{actor="rollout-0",run="alive"} 0.875',
    ]

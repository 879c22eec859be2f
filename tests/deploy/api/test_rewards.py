"""The reward service and its client over real HTTP: equal scores, per-item errors, refusals, retries."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from deploy.api import rewards as rewards_module
from deploy.api.auth import Access
from deploy.api.rewards import BODIES_HELD, make_app
from deploy.api.scorer_process import ScorerProcess
from deploy.cli.rewards import wanted_scorers
from protocol.errors import ConfigError, ContractError, PromptError, ScorerError
from protocol.ground.condition_images import condition_of
from protocol.messages import Metadata, Prompt, Scores
from rewards.http import remote as remote_module
from rewards.http.wire import JSON, MSGPACK, Item, ScoreCall, ScoreReply, read_message, write_message
from rewards.images import ImageError, decode_image, encode_png
from rewards.scorer import CheckedScorer, build_scorer, score_pieces, score_prompts
from rewards.scores import partly
from tests.support.rewards.reward_servers import Here, http_server, reward_service
from tests.support.waiting import PATIENCE_S, wait_until

OPEN = Access(host="127.0.0.1", token=None)
TOKEN = "a-token-of-this-test-0123"
KINDS = {"red": "Redness", "liar": "Liar", "crowd": "Crowd", "beside": "Beside"}
IMAGES = np.random.default_rng(1).integers(0, 256, (5, 6, 8, 3), np.uint8)


class Redness:
    """Mean red in [0, 1]; images whose prompt is "dark" have no score, and "empty" prompts are refused."""

    name = "redness"
    low = 0.0
    high = 1.0

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if not prompt.metadata.get("known", True):
                raise PromptError(f"prompt line {prompt.index + 1}: unknown")

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        reasons = ["too dark" if prompt == "dark" else "" for prompt in prompts]
        red = images[..., 0].mean((1, 2)) / 255
        return partly(red, reasons, {"weight": [float(line.get("w", 0)) for line in metadata]})


class Liar(Redness):
    """Gives scores out of its range."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        return partly([2.0] * len(images), [""] * len(images))


class Crowd(Redness):
    """A group's scorer: each image's share of the group's red."""

    sees = "group"

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        red = images[..., 0].mean((1, 2))
        return partly(red / red.sum(), [""] * len(images), {"size": [float(len(images))] * len(images)})


class Beside(Redness):
    """Mean red of the first condition image, and how many there are."""

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        red = [row[0][..., 0].mean() / 255 for row in conditions]
        return partly(red, [""] * len(images), {"count": [float(len(row)) for row in conditions]})


@pytest.fixture(scope="module")
def url():
    scorers = {name: Here(build_scorer(f"{__name__}:{kind}")) for name, kind in KINDS.items()}
    with reward_service(make_app(scorers, OPEN, max_waiting=8)) as address:
        yield address


@pytest.mark.parametrize("wire", ["msgpack", "json"])
def test_remote_scores_equal_local_ones_to_the_last_bit(url: str, wire: str) -> None:
    remote = build_scorer("remote", url=url, scorer="red", wire=wire, batch=2)
    assert (remote.name, remote.low, remote.high) == ("red", 0.0, 1.0)
    prompts, metadata = ["a", "b", "dark", "c", "d"], [{"w": i} for i in range(5)]
    far, near = (s.score(IMAGES, prompts, metadata) for s in (remote, build_scorer(f"{__name__}:Redness")))
    np.testing.assert_array_equal(far.values, near.values)
    np.testing.assert_array_equal(far.components["weight"], near.components["weight"])
    assert far.reasons == near.reasons == ("", "", "too dark", "", "")


def test_a_group_is_scored_whole_through_the_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = build_scorer("remote", url=url, scorer="crowd", batch=2)
    assert remote.sees == "group"
    far, near = (s.score(IMAGES, ["a"] * 5, [{}] * 5) for s in (remote, build_scorer(f"{__name__}:Crowd")))
    np.testing.assert_array_equal(far.values, near.values)
    assert far.components["size"].tolist() == [5.0] * 5
    monkeypatch.setattr("deploy.api.rewards.PIXELS_AT_ONCE", 5 * 48 - 1)
    crowded = remote.score(IMAGES, ["a"] * 5, [{}] * 5)
    assert not crowded.valid.any()
    assert "a group may have 239 pixels in all" in crowded.reasons[0]


def test_condition_images_are_sent_once_and_only_to_a_scorer_that_looks_at_them(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the images a, a, b, c two share a condition, so a request of five files takes three images."""
    pixels_of_each = np.random.default_rng(2).integers(0, 256, (3, 4, 7, 3), np.uint8)
    for name, pixels in zip("abc", pixels_of_each, strict=True):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    a, b, c = (condition_of(tmp_path / f"{name}.png") for name in "abc")
    shown = [(a,), (a,), (a, b), (c,)]
    prompts = [Prompt(index=row, text="a", conditions=each) for row, each in enumerate(shown)]
    sent: list[ScoreCall] = []
    monkeypatch.setattr(
        remote_module, "write_message", lambda call, kind: sent.append(call) or write_message(call, kind)
    )
    for wire in ("msgpack", "json"):
        far = score_prompts(
            build_scorer("remote", url=url, scorer="beside", batch=5, parallel=1, wire=wire), IMAGES[:4], prompts
        )
        near = score_prompts(build_scorer(f"{__name__}:Beside"), IMAGES[:4], prompts)
        np.testing.assert_array_equal(far.values, near.values)
        assert far.components["count"].tolist() == [1, 1, 2, 1]
    assert [[item.conditions for item in call.items] for call in sent[:2]] == [[(0,), (0,), (0, 1)], [(0,)]]
    assert [len(call.conditions) for call in sent] == [2, 1, 2, 1]
    sent.clear()
    blind = score_prompts(build_scorer("remote", url=url, scorer="red"), IMAGES[:4], prompts)
    assert blind.valid.all() and [call.conditions for call in sent] == [()]
    remote = build_scorer("remote", url=url, scorer="beside")
    remote.check(prompts)
    with pytest.raises(PromptError, match="prompt line 1 .*needs an image to compare with"):
        remote.check([Prompt(index=0, text="a")])


def test_condition_images_count_in_the_limits_of_a_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has 48 pixels, a condition image 28; portions are scored one after the other."""
    scorer, png = build_scorer(f"{__name__}:Beside"), encode_png(IMAGES[0, :4, :7])
    items = [Item(image=encode_png(IMAGES[row]), prompt="a", conditions=(0, 0) if row else (0, 1)) for row in range(5)]
    call = ScoreCall(scorer="beside", items=tuple(items), conditions=(png, png))

    def asked(address: str) -> ScoreReply:
        headers = {"content-type": MSGPACK, "accept": MSGPACK}
        reply = httpx2.post(f"{address}/v1/score", content=write_message(call, MSGPACK), headers=headers)
        return read_message(ScoreReply, reply.content, MSGPACK)

    sizes = []
    monkeypatch.setattr(
        rewards_module, "score_pieces", lambda *asked: sizes.append(len(asked[1])) or score_pieces(*asked)
    )
    monkeypatch.setattr(rewards_module, "PIXELS_AT_ONCE", 2 * 48 + 2 * 28)
    assert [answer.components["count"] for answer in asked(url).items] == [2] * 5
    assert sizes == [2, 2, 1]
    monkeypatch.setattr(rewards_module, "PIXELS_AT_ONCE", 48 + 28)
    first, *others = asked(url).items
    assert first.value is None and "its condition images may have 76 pixels in all" in first.reason
    assert all(answer.value is not None for answer in others)
    monkeypatch.setattr(rewards_module, "REQUEST_PIXELS", 5 * 48 + 2 * 28 - 1)
    with reward_service(make_app({"beside": Here(scorer)}, OPEN)) as address:
        reply = httpx2.post(
            f"{address}/v1/score", content=write_message(call, MSGPACK), headers={"content-type": MSGPACK}
        )
    assert reply.status_code == 413 and "295 pixels in all, got 296" in reply.text
    with pytest.raises(ContractError, match=r"must be indices of 1 condition images, got \[0, 1\]"):
        read_message(ScoreCall, write_message(call.model_copy(update={"conditions": (png,)}), JSON), JSON)


def test_prompts_are_checked_by_the_served_scorer(url: str) -> None:
    remote = build_scorer("remote", url=url, scorer="red")
    remote.check([Prompt(index=0, text="a")])
    with pytest.raises(PromptError, match="prompt line 4: unknown"):
        remote.check([Prompt(index=3, text="a", metadata={"known": False})])
    many = [Prompt(index=i, text="a", metadata={"known": i != 2500}) for i in range(2600)]
    with pytest.raises(PromptError, match="prompt line 2501: unknown"):
        remote.check(many)


def test_an_image_that_cannot_be_read_fails_alone_and_sizes_may_differ(url: str) -> None:
    wide = np.full((3, 9, 3), 255, np.uint8)
    items = [(encode_png(IMAGES[0]), "a"), (b"no image", "a"), (encode_png(wide), "a"), (encode_png(wide), "dark")]
    call = ScoreCall(scorer="red", items=tuple(Item(image=data, prompt=prompt) for data, prompt in items))
    response = httpx2.post(f"{url}/v1/score", content=write_message(call, JSON), headers={"content-type": JSON})
    answers = read_message(ScoreReply, response.content, JSON).items
    assert answers[0].value == pytest.approx(IMAGES[0, ..., 0].mean() / 255)
    assert answers[1].value is None and "must be a PNG" in answers[1].reason
    assert answers[2].value == 1.0
    assert (answers[3].value, answers[3].reason) == (None, "too dark")


@pytest.mark.parametrize("kind", ["DDS", "BMP"])
def test_only_formats_of_images_are_decoded(kind: str) -> None:
    """Others have decoders that fail in ways of their own, as DDS does on a header that is damaged."""
    file = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(file, format=kind)
    with pytest.raises(ImageError, match="must be a PNG, JPEG or WebP"):
        decode_image(file.getvalue())
    for kept in ("JPEG", "WEBP"):
        file = io.BytesIO()
        Image.fromarray(IMAGES[0]).save(file, format=kept)
        assert decode_image(file.getvalue()).shape == IMAGES[0].shape


def test_a_scorer_that_breaks_its_word_gives_missing_scores_with_the_rule(url: str) -> None:
    scores = build_scorer("remote", url=url, scorer="liar").score(IMAGES, ["a"] * 5, [{}] * 5)
    assert not scores.valid.any() and r"values must lie in [0.0, 1.0], got 2.0" in scores.reasons[0]


def test_a_scorer_that_is_not_served_and_a_service_that_is_not_there_are_found_at_the_start(url: str) -> None:
    with pytest.raises(ScorerError, match="serves no 'rad': did you mean 'red'"):
        build_scorer("remote", url=url, scorer="rad")
    with pytest.raises(ScorerError, match="no reward service answers: GET http://127.0.0.1:9/v1/scorers: ConnectError"):
        build_scorer("remote", url="http://127.0.0.1:9", scorer="red", tries=1)


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"{", JSON, 400, "ScoreCall is malformed"),
        (b'{"scorer": "red", "items": []}', JSON, 400, "items"),
        (b"\xc1", MSGPACK, 400, "ScoreCall is not application/msgpack"),
        (b"{}", "application/x-pickle", 400, "must be application/msgpack or application/json"),
        (b'{"scorer": "x", "items": [{"image": "", "prompt": ""}]}', JSON, 404, "no scorer 'x'"),
    ],
)
def test_malformed_requests_are_refused_in_one_line(
    url: str, content: bytes, kind: str, status: int, message: str
) -> None:
    response = httpx2.post(f"{url}/v1/score", content=content, headers={"content-type": kind})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert message in response.json()["detail"] and "\n" not in response.text


def test_a_full_queue_sends_away_and_the_client_comes_again() -> None:
    class Slow(Redness):
        def score(self, images, prompts, metadata):

            time.sleep(0.3)
            return super().score(images, prompts, metadata)

    with reward_service(make_app({"slow": Here(CheckedScorer(Slow()))}, OPEN, max_waiting=2)) as url:
        remote = build_scorer("remote", url=url, scorer="slow", batch=2, parallel=3, tries=8)
        scores = remote.score(np.repeat(IMAGES, 2, 0)[:6], ["a"] * 6, [{}] * 6)
        health = httpx2.get(f"{url}/v1/health").json()
    assert scores.valid.all()
    assert health["scorers"]["slow"] == {"status": "ok", "waiting": 0, "scored": 6, "missing": 0, "restarts": 0}


def large_png(side: int) -> bytes:
    """A white image whose file is small."""
    file = io.BytesIO()
    Image.new("1", (side, side), 1).save(file, format="PNG")
    return file.getvalue()


def posted(url: str, items: list[tuple[bytes, str]], kind: str = MSGPACK) -> httpx2.Response:
    call = ScoreCall.model_construct(scorer="red", items=tuple(Item(image=data, prompt=text) for data, text in items))
    headers = {"content-type": kind, "accept": JSON}
    return httpx2.post(f"{url}/v1/score", content=write_message(call, kind), headers=headers, timeout=60)


def test_images_that_are_too_large_fail_alone_before_they_are_decoded() -> None:
    import resource

    scorers, large = {"red": Here(build_scorer(f"{__name__}:Redness"))}, large_png(8000)
    with reward_service(make_app(scorers, OPEN)) as url:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = posted(url, [(large, "a")] * 10 + [(encode_png(IMAGES[0]), "a")])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    items = answer.json()["items"]
    assert all("at most 16777216 pixels, got 8000x8000" in item["reason"] for item in items[:10])
    assert items[10]["value"] == pytest.approx(IMAGES[0, ..., 0].mean() / 255)
    assert grown < 8000 * 8000 / 1024, "KiB: less than one byte for each pixel of one of them"


def test_many_large_images_are_scored_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.api.rewards.PIXELS_AT_ONCE", 100)
    scorers = {"red": Here(build_scorer(f"{__name__}:Redness"))}
    with reward_service(make_app(scorers, OPEN)) as url:
        files = [encode_png(image) for image in IMAGES]
        items = posted(url, [*((file, "a") for file in files), (b"nothing", "a"), (files[0], "dark")]).json()["items"]
    means = [pytest.approx(image[..., 0].mean() / 255) for image in IMAGES]
    assert [item["value"] for item in items] == [*means, None, None]
    assert "must be a PNG" in items[5]["reason"] and items[6]["reason"] == "too dark"


def test_a_request_has_a_largest_number_of_images_even_when_nothing_waits(url: str) -> None:
    answer = posted(url, [(encode_png(IMAGES[0]), "a")] * 9)
    assert (answer.status_code, answer.json()["detail"]) == (
        413,
        "a request may have 8 images, got 9: send fewer at once",
    )
    answer = posted(url, [(b"", "")] * 2000)
    assert answer.status_code == 400 and "should have at most 1024 items" in answer.json()["detail"]
    assert httpx2.get(f"{url}/v1/health").json()["scorers"]["red"]["waiting"] == 0


def test_a_request_has_a_largest_number_of_pixels_and_the_client_stays_below(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = build_scorer("remote", url=url, scorer="red", batch=5)
    whole = remote.score(IMAGES, ["a"] * 5, [{}] * 5)
    monkeypatch.setattr("deploy.api.rewards.REQUEST_PIXELS", 3 * 48)
    refused = remote.score(IMAGES, ["a"] * 5, [{}] * 5)
    assert not refused.valid.any()
    assert "144 pixels in all, got 240" in refused.reasons[0]
    monkeypatch.setattr("rewards.http.remote.REQUEST_PIXELS", 3 * 48)
    np.testing.assert_array_equal(remote.score(IMAGES, ["a"] * 5, [{}] * 5).values, whole.values)


def test_a_body_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The health of the service is answered while a body is being read."""
    begun, go_on = threading.Event(), threading.Event()

    def held(*words: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return read_message(*words)

    monkeypatch.setattr("deploy.api.rewards.read_message", held)
    app = make_app({"red": Here(build_scorer(f"{__name__}:Redness"))}, OPEN)
    with reward_service(app) as url, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(posted, url, [(encode_png(IMAGES[0]), "a")])
        try:
            assert begun.wait(PATIENCE_S)
            assert httpx2.get(f"{url}/v1/health", timeout=PATIENCE_S).status_code == 200
        finally:
            go_on.set()
        assert answer.result(PATIENCE_S).status_code == 200


def test_bodies_that_never_come_hold_no_room_and_the_slowest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client announces the largest body; some send nothing of it, and then some all but its end."""
    monkeypatch.setattr("deploy.api.rewards.BODY_BYTES", 1024 * 1024)
    with reward_service(make_app({"red": Here(build_scorer(f"{__name__}:Redness"))}, OPEN)) as url, ExitStack() as held:
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/score HTTP/1.1\r\nHost: {host}\r\nContent-Length: {1024 * 1024}\r\n\r\n".encode()
        for sent in (b"{", b"{" + b" " * (1024 * 1024 - 2)):
            slow = [held.enter_context(socket.create_connection((host, int(port)))) for _ in range(2 * BODIES_HELD)]
            for each in slow:
                each.settimeout(PATIENCE_S)
                each.sendall(head + sent)
                assert posted(url, [(encode_png(IMAGES[0]), "a")]).status_code == 200
        assert b"503" in slow[0].recv(100), "the first of those that sent much"
        assert b"others need its room" in slow[0].recv(10_000)


def test_whole_bodies_in_progress_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.api.rewards.BODY_BYTES", 1024)
    monkeypatch.setattr("deploy.api.rewards.BODIES_HELD", 1)
    busy, go_on = threading.Event(), threading.Event()

    class Held(Redness):
        def score(self, images, prompts, metadata):
            busy.set()
            assert go_on.wait(PATIENCE_S)
            return super().score(images, prompts, metadata)

    with reward_service(make_app({"red": Here(CheckedScorer(Held()))}, OPEN)) as url, ThreadPoolExecutor(1) as pool:
        items = [(encode_png(IMAGES[0]), "a" * 500)]
        first = pool.submit(posted, url, items)
        try:
            assert busy.wait(PATIENCE_S)
            refused = posted(url, items)
        finally:
            go_on.set()
        assert refused.status_code == 503 and "already hold" in refused.json()["detail"]
        assert first.result(PATIENCE_S).status_code == posted(url, items).status_code == 200


class Moods(Redness):
    """Does what its first prompt says."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        if prompts[0] == "hang":
            time.sleep(3600)
        if prompts[0] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompts[0] == "interrupt":
            raise KeyboardInterrupt
        if prompts[0] == "exit":
            sys.exit(3)
        return super().score(images, prompts, metadata)


def test_a_scorer_that_hangs_or_ends_is_noticed_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    slot = ScorerProcess(f"{__name__}:Moods", {}, deadline_s=1.0)
    image = encode_png(IMAGES[0])
    try:
        with reward_service(make_app({"red": slot}, OPEN, max_waiting=4)) as url:

            def said(prompt: str) -> tuple[int, str]:
                answer = posted(url, [(image, prompt)])
                health = httpx2.get(f"{url}/v1/health").json()
                assert health["scorers"]["red"]["waiting"] == 0
                if answer.status_code != 200:
                    assert answer.headers["content-type"] == "application/problem+json"
                return answer.status_code, answer.json().get("detail", health["status"])

            assert said("a") == (200, "ok")
            assert said("hang") == (504, "the scorer gave no answer: none within 1 s; its process starts again")
            assert httpx2.get(f"{url}/v1/health").json()["status"] == "degraded"
            assert said("a") == (200, "ok")
            assert said("die") == (504, "the scorer gave no answer: its process ended; its process starts again")
            assert said("interrupt") == (500, "the scorer failed: KeyboardInterrupt")
            assert said("exit") == (200, "ok"), "its image has no score"
            assert httpx2.get(f"{url}/v1/health").json()["scorers"]["red"]["restarts"] == 2
    finally:
        slot.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_scorer_that_cannot_be_built_is_one_line() -> None:
    with pytest.raises(ScorerError, match="takes no argument 'side'"):
        ScorerProcess(f"{__name__}:Redness", {"side": 3}, deadline_s=1.0)


def test_a_client_that_leaves_gives_its_position_back_and_costs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    busy, go_on = threading.Event(), threading.Event()

    class Held(Redness):
        def score(self, images, prompts, metadata):
            busy.set()
            assert go_on.wait(PATIENCE_S)
            return super().score(images, prompts, metadata)

    app = make_app({"red": Here(CheckedScorer(Held()))}, OPEN, max_waiting=3)
    call = ScoreCall(scorer="red", items=(Item(image=encode_png(IMAGES[0]), prompt="a"),))
    body = write_message(call, JSON)
    head = f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    with reward_service(app) as url, ThreadPoolExecutor(1) as pool:
        host, port = url.removeprefix("http://").split(":")

        def waiting() -> int:
            return httpx2.get(f"{url}/v1/health").json()["scorers"]["red"]["waiting"]

        first = pool.submit(posted, url, [(encode_png(IMAGES[0]), "a")])
        try:
            assert busy.wait(PATIENCE_S)
            with ExitStack() as leaving:
                for sent in (body, body, body[:-1]):  # the last one leaves within its body
                    connection = leaving.enter_context(socket.create_connection((host, int(port))))
                    connection.sendall(head.encode() + sent)
                wait_until(lambda: waiting() == 3)
            wait_until(lambda: waiting() == 1)
        finally:
            go_on.set()
        assert first.result(PATIENCE_S).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= 30]


def test_a_token_is_asked_for_and_a_body_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    monkeypatch.setattr("deploy.api.rewards.BODY_BYTES", 1024 * 1024)
    access = Access(host="127.0.0.1", token=TOKEN)
    app = make_app({"red": Here(build_scorer(f"{__name__}:Redness"))}, access)
    assert app.openapi()["paths"]["/v1/score"]["post"]["security"] == [{"HTTPBearer": []}]
    with reward_service(app) as url:
        assert httpx2.get(f"{url}/v1/health").json()["status"] == "ok"
        with pytest.raises(ScorerError, match="status 401: the bearer token is missing or wrong"):
            build_scorer("remote", url=url, scorer="red")
        remote = build_scorer("remote", url=url, scorer="red", token_env="REWARD_TOKEN")
        assert remote.score(IMAGES, ["a"] * 5, [{}] * 5).valid.all()
        large = np.random.default_rng(0).integers(0, 256, (1, 800, 800, 3), np.uint8)
        assert "status 413" in remote.score(large, ["a"], [{}]).reasons[0]


def test_a_reply_of_another_length_breaks_the_contract() -> None:
    def answer(asked):
        if asked.method == "GET":
            return 200, JSON, b'{"scorers": [{"name": "red"}]}'
        return 200, JSON, json.dumps({"scorer": "red", "items": [{"value": 1}]}).encode()

    with http_server(answer) as (url, _):
        remote = build_scorer("remote", url=url, scorer="red")
        assert remote.high == float("inf")
        with pytest.raises(ContractError, match="scorer red: a reply must hold 5 answers of 'red', got 1"):
            remote.score(IMAGES, ["a"] * 5, [{}] * 5)


@pytest.mark.whole
def test_the_command_serves_until_it_is_interrupted_and_refuses_a_taken_port(tmp_path) -> None:
    command = [sys.executable, "-m", "flowcredit", "serve-rewards", "red=red_scorer:Red", "--port"]
    (tmp_path / "red_scorer.py").write_text(f"from {__name__} import Redness as Red\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    options = {"env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "0"], **options)
    try:
        line = process.stdout.readline()
        url = line.split(" on ")[1].split(",")[0]
        assert build_scorer("remote", url=url, scorer="red").score(IMAGES, ["a"] * 5, [{}] * 5).valid.all()
        second = subprocess.run([*command, url.rpartition(":")[2]], check=False, timeout=60, **options)
        open_to_all = subprocess.run([*command, "0", "--host", "0.0.0.0"], check=False, timeout=60, **options)
        assert open_to_all.returncode == 2 and "is open to other machines and needs a token" in open_to_all.stderr
        assert second.returncode == 2 and "cannot be listened on: [Errno 98]" in second.stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    said = process.stderr.read()
    assert process.returncode == 0, said
    assert "train" not in said


def test_what_to_serve_is_read_from_names_arguments_and_a_config(tmp_path) -> None:
    assert wanted_scorers(["ocr", "mine=a.b:C"], ["ocr.min_side=64", "mine.path=/x"]) == {
        "ocr": ("ocr", {"min_side": 64}),
        "mine": ("a.b:C", {"path": "/x"}),
    }
    path = tmp_path / "run.yaml"
    path.write_text("rewards: {pick: {scorer: pickscore, args: {model: m}}}")
    assert wanted_scorers(["ocr"], ["ocr.low=1e-4"])["ocr"][1] == {"low": 1e-4}, "a number, as in the config"
    assert wanted_scorers(["pick"], ["pick.batch=4"], path) == {"pick": ("pickscore", {"model": "m", "batch": 4})}
    with pytest.raises(ConfigError, match="has no reward 'ocr'"):
        wanted_scorers(["ocr"], [], path)
    path.write_text("rewards: {1: {scorer: pickscore}, pick: {scorer: ocr}}")
    assert wanted_scorers(["1"], [], path) == {"1": ("pickscore", {})}
    with pytest.raises(ConfigError, match=r"has no reward 'ocr', only \['1', 'pick'\]"):
        wanted_scorers(["ocr"], [], path)
    with pytest.raises(ConfigError, match="--arg must read NAME.KEY=VALUE"):
        wanted_scorers(["ocr"], ["min_side=64"])
    with pytest.raises(ConfigError, match=r"the value of --arg ocr.x is not YAML, got '\['"):
        wanted_scorers(["ocr"], ["ocr.x=["])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("", r"rewards.pick: input should be a valid dictionary or instance of .*, got None"),
        ("{scorer: 5}", r"rewards.pick.scorer: input should be a valid string, got 5"),
        ("{scorer: a, args: [1]}", r"rewards.pick.args: input should be a valid dictionary, got \[1\]"),
        ("{args: {}}", r"rewards.pick.scorer must be given"),
        ("{scorer: a, arg: {}}", "unknown key .rewards.pick.arg.: did you mean .args.?"),
    ],
)
def test_a_broken_reward_of_a_config_is_one_line(section: str, message: str, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(f"rewards: {{pick: {section}}}")
    with pytest.raises(ConfigError, match=message):
        wanted_scorers(["pick"], [], tmp_path / "run.yaml")


@pytest.mark.parametrize("url", ["http://[::1", "http://h:x", 5])
def test_an_address_that_is_none_and_an_argument_named_like_ours_are_one_line(url: object) -> None:
    with pytest.raises(ScorerError, match="url must .*got "):
        build_scorer("remote", url=url, scorer="red")
    with pytest.raises(ScorerError, match="takes no argument 'spec'"):
        build_scorer("remote", url=url, scorer="red", spec=1)

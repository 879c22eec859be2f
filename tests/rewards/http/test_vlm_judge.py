"""The judge asks a real local endpoint and takes nothing but a well-formed number for a score."""

import base64
import json

import numpy as np
import pytest

from protocol.errors import ScorerError
from rewards.images import decode_image
from rewards.scorer import build_scorer
from tests.support.rewards.reward_servers import Answer, Asked, http_server

IMAGES = np.random.default_rng(2).integers(0, 256, (1, 9, 7, 3), np.uint8)


def completion(text: object) -> Answer:
    return 200, "application/json", json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def judged(url: str, images: np.ndarray = IMAGES, **args):
    scorer = build_scorer("vlm_judge", url=f"{url}/v1", model="judge-1", tries=2, timeout_s=5, **args)
    return scorer.score(images, ["a red cat"] * len(images), [{}] * len(images))


def test_the_question_holds_the_lossless_image_the_prompt_and_temperature_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with http_server(lambda asked: completion("It is a cat.\nFinal Score: 4.5")) as (url, seen):
        scores = judged(url, token_env="JUDGE_KEY")
    assert scores.values.tolist() == [pytest.approx(0.9)]
    (asked,) = seen
    question = json.loads(asked.body)
    assert (asked.path, question["model"], question["temperature"]) == ("/v1/chat/completions", "judge-1", 0)
    assert asked.headers["authorization"] == "Bearer secret"
    image, words = question["messages"][0]["content"]
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert np.array_equal(decode_image(data), IMAGES[0])
    assert "a red cat" in words["text"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I would say four of five.", "must hold one score, got 0"),
        ("Final Score: 4\nFinal Score: 5", "must hold one score, got 2"),
        ("Final Score: 7", r"must lie in \[1, 5\], got 7"),
        ("Final Score: 0", r"must lie in \[1, 5\], got 0"),
        ("Final Score: 4/5", "must hold one score, got 0"),
        (None, "must hold one score, got 0"),
        (["Final Score: 3"], "must hold one score, got 0"),
    ],
)
def test_an_answer_that_cannot_be_parsed_is_a_missing_score(text: object, reason: str) -> None:
    with http_server(lambda asked: completion(text)) as (url, _):
        scores = judged(url)
    assert np.isnan(scores.values[0]) and not scores.valid[0]
    import re

    assert re.search(reason, scores.reasons[0])


def test_one_failing_image_leaves_the_others_their_scores() -> None:
    images = np.arange(3, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)

    def answer(asked: Asked) -> Answer:
        data = json.loads(asked.body)["messages"][0]["content"][0]["image_url"]["url"].split(",")[1]
        level = int(decode_image(base64.b64decode(data))[0, 0, 0])
        return (400, "text/plain", b"too\ndark") if level == 1 else completion(f"Final Score: {level + 2}")

    with http_server(answer) as (url, seen):
        scores = judged(url, images)
    assert scores.valid.tolist() == [True, False, True]
    np.testing.assert_allclose(scores.values, [0.4, np.nan, 0.8], rtol=1e-6)
    assert "status 400: too dark" in scores.reasons[1]
    assert len(seen) == 3, "a status that will not pass is not tried again"


def test_a_passing_failure_is_tried_again_and_a_lasting_one_ends_after_the_tries() -> None:
    statuses = iter([503])
    with http_server(
        lambda a: (s, "text/plain", b"busy") if (s := next(statuses, 0)) else completion("Final Score: 5")
    ) as (url, seen):
        assert judged(url).values.tolist() == [1.0]
        assert len(seen) == 2
    with http_server(lambda asked: (503, "text/plain", b"busy")) as (url, seen):
        scores = judged(url)
        assert "status 503: busy" in scores.reasons[0] and len(seen) == 2


def test_a_reply_that_is_no_completion_is_a_missing_score() -> None:
    for body in (b"<html>", b"[]", b'{"choices": []}'):
        with http_server(lambda asked, body=body: (200, "text/html", body)) as (url, _):
            assert "not a chat completion" in judged(url).reasons[0]


def test_nobody_there_is_a_missing_score_and_bad_settings_are_refused() -> None:
    assert "ConnectError" in judged("http://127.0.0.1:9").reasons[0]
    for args, message in (
        ({"pattern": "("}, "cannot be read"),
        ({"pattern": "score"}, "one group"),
        ({"instruction": "judge"}, r"hold \{prompt\}"),
        ({"low": 5, "high": 5}, "low must be less than high"),
        ({"token_env": "NO_SUCH_VARIABLE_HERE"}, "must hold the token"),
    ):
        with pytest.raises(ScorerError, match=message):
            build_scorer("vlm_judge", url="http://127.0.0.1:9", model="m", **args)

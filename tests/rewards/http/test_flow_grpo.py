"""flow_grpo's wire: what is sent, and that no reply is ever trusted."""

import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protocol.errors import ContractError, ScorerError
from rewards.scorer import build_scorer
from tests.support.rewards.reward_servers import Answer, Asked, http_server

IMAGES = np.random.default_rng(2).integers(0, 256, (3, 9, 7, 3), np.uint8)
METADATA = [{"tag": "colors", "include": [{"class": "cat", "count": i}]} for i in range(3)]
"""As `protocol.prompts` reads them: the prompt itself is not among the metadata."""


def ask(url: str, **args):
    return build_scorer("flow_grpo", url=url, tries=1, **args).score(IMAGES, ["a", "b", "c"], METADATA)


def pickled(reply: object) -> Answer:
    return 200, "application/octet-stream", pickle.dumps(reply)


def test_a_pickled_question_of_lossless_images_is_sent_in_batches() -> None:
    def answer(asked: Asked) -> Answer:
        size = len(pickle.loads(asked.body)["images"])
        return 200, "application/json", json.dumps({"scores": [0.5] * size, "rewards": [1] * size}).encode()

    with http_server(answer) as (url, seen):
        scores = ask(url, send="meta_datas", only_strict=False, image_format="png", batch=2)
    assert scores.values.tolist() == [0.5] * 3 and scores.components["rewards"].tolist() == [1, 1, 1]
    questions = [pickle.loads(asked.body) for asked in seen]
    assert [sorted(question) for question in questions] == [["images", "meta_datas", "only_strict"]] * 2
    assert [len(question["images"]) for question in questions] == [2, 1]
    assert questions[0]["meta_datas"] == [{**METADATA[0], "prompt": "a"}, {**METADATA[1], "prompt": "b"}]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(questions[1]["images"][0]))), IMAGES[2])


def released_geneval(asked: Asked) -> Answer:
    """Behaves as flow_grpo's released server: it opens JPEG only and reads each prompt from its metadata."""
    question = pickle.loads(asked.body)
    try:
        images = [Image.open(io.BytesIO(data), formats=["jpeg"]) for data in question["images"]]
        prompts = [line["prompt"] for line in question["meta_datas"]]
    except (OSError, KeyError) as error:
        return 500, "text/plain", repr(error).encode()
    return pickled(
        {"scores": [float(np.asarray(image).mean()) for image in images], "strict_rewards": [1.0] * len(prompts)}
    )


def test_a_server_that_opens_jpeg_only_and_reads_prompts_from_metadata_gives_every_score() -> None:
    with http_server(released_geneval) as (url, _):
        scores = ask(url, send="meta_datas", only_strict=False, unpickle=True)
        refused = ask(url, send="meta_datas", only_strict=False, unpickle=True, image_format="png")
    assert scores.valid.all()
    np.testing.assert_allclose(scores.values, IMAGES.mean((1, 2, 3)), rtol=0.02)
    assert not refused.valid.any() and "status 500" in refused.reasons[0]


@pytest.mark.parametrize("settings", [{"image_format": "gif"}, {"quality": 0}, {"quality": 101}])
def test_an_image_format_or_quality_that_cannot_be_is_refused(settings: dict) -> None:
    with pytest.raises(ScorerError, match="image_format must be jpeg or png and quality 1 to 100"):
        build_scorer("flow_grpo", url="http://127.0.0.1:1", **settings)


def test_a_pickled_reply_is_refused_unless_asked_for() -> None:
    reply = {"scores": [0.1, np.float32(0.2), 0.3], "grouped": {"colors": np.ones(3)}, "outputs": np.arange(3.0)}
    with http_server(lambda asked: pickled(reply)) as (url, _):
        with pytest.raises(ContractError, match="must be JSON or msgpack.*unpickle=true"):
            ask(url)
        scores = ask(url, unpickle=True)
    np.testing.assert_allclose(scores.values, [0.1, 0.2, 0.3], rtol=1e-6)
    assert scores.components["outputs"].tolist() == [0, 1, 2]


class Bomb:
    """Runs a command when it is unpickled by a careless reader."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_reply_that_would_run_code_is_refused_even_when_unpickling_was_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    bomb = pickled({"scores": Bomb(str(trace))})
    with http_server(lambda asked: bomb) as (url, _), pytest.raises(ContractError, match="names posix.system"):
        ask(url, unpickle=True)
    assert not trace.exists()


def test_replies_without_one_number_an_image_break_the_contract() -> None:
    for reply in ({"scores": [1, 2]}, {"rewards": [1, 2, 3]}, [1, 2, 3], {"scores": ["a", "b", "c"]}):
        body = json.dumps(reply).encode()
        with (
            http_server(lambda asked, body=body: (200, "application/json", body)) as (url, _),
            pytest.raises(ContractError, match="scorer flow_grpo: the server's reply must"),
        ):
            ask(url)


def test_a_reply_whose_keys_are_of_several_kinds_breaks_the_contract_too() -> None:
    with (
        http_server(lambda asked: pickled({b"scores": [1, 2, 3], "info": "", 3: 4})) as (url, _),
        pytest.raises(ContractError, match=r"under 'scores', got keys \[b'scores', 'info', 3\]"),
    ):
        ask(url, unpickle=True)


def test_a_failing_server_and_a_score_that_is_no_number_are_missing() -> None:
    with http_server(lambda asked: (500, "text/plain", b"Traceback ...")) as (url, _):
        scores = ask(url)
    assert not scores.valid.any() and "status 500: Traceback ..." in scores.reasons[0]
    with http_server(lambda asked: (200, "application/json", b'{"scores": [0.5, NaN, 1]}')) as (url, _):
        assert ask(url).valid.tolist() == [True, False, True]

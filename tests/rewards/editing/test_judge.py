"""Judges of edits: the releases' formulas with fabricated answers, an endpoint, a tiny model, unreadable answers."""

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import PromptError, ScorerError
from protocol.messages import Prompt
from rewards.editing import judge as judge_module
from rewards.editing.judge import QUALITY, TYPES
from rewards.images import decode_image, encode_png
from rewards.scorer import build_scorer, check_prompts, require_ready
from tests.support.rewards.qwen3_vl import tiny_qwen3_vl
from tests.support.rewards.reward_servers import Answer, Asked, http_server

RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (2, 8, 8, 3), np.uint8)
BEFORE = RNG.integers(0, 256, (2, 12, 10, 3), np.uint8)
SCENE = [[BEFORE[0]], [BEFORE[1], BEFORE[0]]]
PROMPTS = ["make it red", "add a hat"]


class Fabricated:
    """Answers by the number of images and the words."""

    parallel = 1

    def __init__(self, answers: Sequence[object]) -> None:
        self._answers: Iterator[object] = iter(answers)
        self.asked: list[tuple[list[np.ndarray], str, bool]] = []

    def ask(self, images: Sequence[np.ndarray], words: str, *, words_first: bool = False) -> tuple[object, str]:
        self.asked.append((list(images), words, words_first))
        answer = next(self._answers)
        return (None, "no answer") if answer is None else (answer, "")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    def tell(*answers: object) -> Fabricated:
        fabricated = Fabricated(answers)
        monkeypatch.setattr(judge_module, "judge_of", lambda _: fabricated)
        return fabricated

    return tell


def test_vie_scores_are_the_roots_of_the_least_of_each_pair(told: Any) -> None:
    asked = told('{"score": [8, 5], "reasoning": "ok"}', "[9, 6]", "output score = [10, 10]", "I say [10.0, 4]").asked
    scores = build_scorer("edit_judge").score(IMAGES, PROMPTS, [{}] * 2, SCENE)
    np.testing.assert_allclose(scores.values, [np.sqrt(5 * 6), np.sqrt(10 * 4)], rtol=1e-6)
    parts = {name: values.tolist() for name, values in scores.components.items()}
    assert parts == {"follows": [8, 10], "keeps": [5, 10], "semantics": [5, 10], "quality": [6, 4]}
    assert [len(images) for images, _, _ in asked] == [2, 1, 3, 1]
    assert all(images[-1].shape == BEFORE[0].shape for images, _, _ in asked), "resized to the first condition image"
    assert PROMPTS[0] in asked[0][1] and asked[1][1] == QUALITY


@pytest.mark.parametrize(
    "answers",
    [
        [None],
        ["[9, 9]", "none"],
        ["[9, 9]", "[9, 9, 9]"],
        ["[9, 9]", "[8, 8] or [9, 9]"],
        ["[9, 11]"],
        ["[-1, 9]"],
        [7],
    ],
)
def test_an_answer_that_cannot_be_read_is_a_missing_score(told: Any, answers: list[object]) -> None:
    told(*answers, "[7, 7]", "[7, 7]")
    scores = build_scorer("edit_judge").score(IMAGES, PROMPTS, [{}] * 2, SCENE)
    assert scores.valid.tolist() == [False, True] and scores.values[1] == 7
    assert scores.reasons[0] == "no answer" or "one list of 2 numbers from 0 to 10" in scores.reasons[0]


def test_the_release_s_words_are_read_in_its_file(told: Any, tmp_path: Path) -> None:
    file = tmp_path / "vie_prompts.py"
    names = ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC")
    texts = [f'{name} = """{name[-3:]} <instruction>"""\n' for name in names]
    file.write_text("raise SystemExit\n" + "".join(texts))
    with pytest.raises(ScorerError, match="must be GEdit-Bench's vie_prompts.py, got no text _prompts_0shot_rule_PQ"):
        build_scorer("edit_judge", template=str(file))
    file.write_text("".join([*texts, '_prompts_0shot_rule_PQ = "quality"\n', "other = 3\n"]))
    asked = told("[1, 2]", "[3, 4]").asked
    build_scorer("edit_judge", template=str(file)).score(IMAGES[:1], PROMPTS[:1], [{}], SCENE[:1])
    assert asked[0][1].splitlines() == ["mit make it red", "ule make it red", "_SC make it red"]
    assert asked[1][1].splitlines()[1:] == ["quality"]


@pytest.fixture
def rubrics(tmp_path: Path) -> str:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({kind: f"rubric of {kind}: <edit_prompt>." for kind in TYPES}))
    return str(path)


def test_imgedit_s_score_is_the_mean_of_three_that_the_first_caps(told: Any, rubrics: str) -> None:
    reply = "Brief reasoning: it is: fine.\nPrompt Compliance: {}\nVisual Naturalness: {}\nPhysical & Detail: {} "
    judge = told(reply.format(2, 5, 4), reply.format(5, 3, 4))
    facts = [{"tag": "remove"}, {"tag": "style"}]
    scores = build_scorer("imgedit_judge", template=rubrics).score(IMAGES, PROMPTS, facts, SCENE)
    np.testing.assert_allclose(scores.values, [2, 4], rtol=1e-6)
    np.testing.assert_allclose(scores.components["plain"], [11 / 3, 4], rtol=1e-6)
    assert [scores.components[name].tolist() for name in ("first", "second", "third")] == [[2, 5], [5, 3], [4, 4]]
    assert [words for _, words, _ in judge.asked] == ["rubric of remove: make it red.", "rubric of style: add a hat."]
    assert [(len(images), first) for images, _, first in judge.asked] == [(2, True), (3, True)]


def test_imgedit_takes_no_other_form_and_no_other_type(told: Any, rubrics: str) -> None:
    told("A: 1\nB: 2", "A: 1\nB: 2\nC: 6")
    facts = [{"tag": "remove"}, {"tag": "style"}]
    scores = build_scorer("imgedit_judge", template=rubrics).score(IMAGES, PROMPTS, facts, SCENE)
    assert not scores.valid.any() and "must hold 3 lines that end with a number from 1 to 5" in scores.reasons[1]
    condition = judge_prompt("remove")
    check_prompts("imgedit_judge", {"template": rubrics}, [condition])
    with pytest.raises(PromptError, match="tag must be a type of edit, one of add, .* got 'paint'"):
        check_prompts("imgedit_judge", {"template": rubrics}, [judge_prompt("paint")])
    Path(rubrics).write_text("{}")
    with pytest.raises(ScorerError, match="must be ImgEdit-Bench's prompts.json"):
        require_ready("imgedit_judge", {"template": rubrics})


def judge_prompt(tag: str) -> Prompt:
    from protocol.messages import ConditionImage

    return Prompt(index=0, text="a", metadata={"tag": tag}, conditions=(ConditionImage(path="/a.png", sha256=""),))


def test_an_endpoint_gets_the_images_in_order_and_without_loss() -> None:
    def answer(asked: Asked) -> Answer:
        if not asked.body:
            return 404, "text/plain", b""
        parts = json.loads(asked.body)["messages"][0]["content"]
        images = [decode_image(base64.b64decode(each["image_url"]["url"].partition(",")[2])) for each in parts[:-1]]
        level = min(10, images[0][0, 0, 0] // 20)
        text = f"[{level}, {len(images)}]"
        return 200, "application/json", json.dumps({"choices": [{"message": {"content": text}}]}).encode()

    with http_server(answer) as (url, seen):
        judge = {"url": f"{url}/v1", "model": "gpt-4.1", "tries": 1}
        require_ready("edit_judge", {"judge": judge})
        scores = build_scorer("edit_judge", judge=judge).score(IMAGES[:1], PROMPTS[:1], [{}], [[IMAGES[1]]])
    assert scores.components["keeps"].tolist() == [2]
    assert scores.components["follows"].tolist() == [min(10, int(IMAGES[1][0, 0, 0]) // 20)]
    assert {json.loads(asked.body)["model"] for asked in seen if asked.body} == {"gpt-4.1"}
    assert encode_png(IMAGES[1]) in [
        base64.b64decode(part["image_url"]["url"].partition(",")[2])
        for asked in seen
        if asked.body
        for part in json.loads(asked.body)["messages"][0]["content"][:-1]
    ]
    with pytest.raises(ScorerError, match="takes no argument 'modle': did you mean 'model'"):
        build_scorer("edit_judge", judge={"url": "http://127.0.0.1:9/v1", "modle": "a"})
    with pytest.raises(ScorerError, match="no server answers at http://127.0.0.1:9"):
        require_ready("edit_judge", {"judge": {"url": "http://127.0.0.1:9/v1", "model": "a"}})


def test_a_model_in_this_process_judges_and_its_babble_is_no_score(tmp_path: Path) -> None:
    judge = {"model": str(tiny_qwen3_vl(tmp_path)), "device": "cpu", "dtype": "float32", "max_tokens": 4}
    require_ready("edit_judge", {"judge": judge})
    scores = build_scorer("edit_judge", judge=judge).score(IMAGES[:1], PROMPTS[:1], [{}], SCENE[:1])
    assert not scores.valid.any() and "one list of 2 numbers" in scores.reasons[0]

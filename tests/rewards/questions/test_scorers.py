"""Soft-TIFA and DPG-Bench's questions: worked numbers, and a Qwen3-VL beside transformers' own way to ask it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from protocol.errors import PromptError, ScorerError
from protocol.messages import Prompt
from rewards.questions import scorers
from rewards.questions.model import QuestionModel
from rewards.questions.scorers import answers_to, share_of_yes
from rewards.scorer import build_scorer, check_prompts, require_ready
from tests.support.rewards.qwen3_vl import CHAT, IMAGE, VIDEO, tiny_qwen3_vl

WORDS = "Is it red? One word."
PAIRS = {"vqa_list": [["How many cats are there?", "two"], ["Are the cats red?", "Yes"]]}
TREE = {
    "questions": [
        {"id": 1, "question": "A dog?", "parents": [0]},
        {"id": 2, "question": "Is it red?", "parents": [1]},
        {"id": 3, "question": "Does it sleep?", "parents": [2]},
        {"id": 4, "question": "A tree?", "parents": [0]},
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def asked_by_transformers(folder: Path, images: list[np.ndarray], **options: object) -> object:
    """The release's way: processor and `generate`."""
    processor = object.__new__(Qwen3VLProcessor)  # its constructor wants a video processor, and that torchvision
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    tokenizer = processor.tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    processor.chat_template, processor.audio_tokenizer = CHAT, None
    for name, token in {"image": IMAGE, "video": VIDEO}.items():
        setattr(processor, f"{name}_token", token)
        setattr(processor, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    content = [{"type": "image", "image": Image.fromarray(image)} for image in images]
    asked = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": WORDS}]}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    found = model.generate(**asked, do_sample=False, output_scores=True, return_dict_in_generate=True, **options)
    return found, found.sequences[0, asked["input_ids"].shape[1] :], tokenizer


def test_a_question_is_asked_as_transformers_asks_it(folder: Path, image: np.ndarray) -> None:
    """The softmax of one token's scores, and the first token of each answer."""
    found, _, tokenizer = asked_by_transformers(folder, [image], max_new_tokens=1)
    chances = found.scores[0].softmax(-1)[0]
    answers = ["two", "Two", " two", " Two", "2", " 2"]
    wanted = sum(float(chances[tokenizer.encode(answer)[0]]) for answer in answers)
    ours = QuestionModel(str(folder), device="cpu", dtype="float32")
    assert ours.probabilities(image, WORDS, answers)[0] == pytest.approx(wanted, rel=1e-5)
    assert ours.probabilities(image[::-1].copy(), WORDS, answers)[0] != pytest.approx(wanted, rel=1e-5)


def test_an_answer_in_words_about_two_images_is_that_of_transformers(folder: Path, image: np.ndarray) -> None:
    other = np.ascontiguousarray(image[:16, ::-1])
    _, tokens, tokenizer = asked_by_transformers(folder, [image, other], max_new_tokens=6)
    ours = QuestionModel(str(folder), device="cpu", dtype="float32", max_tokens=6)
    text, reason = ours.ask([image, other], WORDS)
    assert (text, reason) == (tokenizer.decode(tokens, skip_special_tokens=True), "") and text
    assert ours.ask([image], f"{IMAGE}?") == (None, f"a question must not hold {IMAGE}")


def test_a_number_has_six_spellings_and_yes_has_four() -> None:
    assert answers_to("How many cats are there?", "two") == ["two", "Two", " two", " Two", "2", " 2"]
    assert answers_to("Are the cats red?", "Yes") == ["Yes", "yes", " yes", " Yes"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Probabilities by the first words of a question; a stand-in for the model gives them."""
    chances: dict[str, float] = {}

    class Told:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def probabilities(self, _: np.ndarray, words: str, *lists: list[str]) -> list[float]:
            chance = next(value for start, value in chances.items() if words.startswith(start))
            return [1 - chance if answers[0] == "No" else chance for answers in lists]

    monkeypatch.setattr(scorers, "QuestionModel", Told)
    return chances


def test_soft_tifa_is_the_geometric_mean_and_am_the_arithmetic(told: dict[str, float], image: np.ndarray) -> None:
    told |= {"How many": 0.9, "Are the cats": 0.4}
    scores = build_scorer("soft_tifa", instruction="{question} In a word.").score(image[None], ["two cats"], [PAIRS])
    assert scores.values[0] == pytest.approx(0.6)  # sqrt(0.9 x 0.4)
    assert scores.components["am"][0] == pytest.approx(0.65)


def test_what_hangs_on_a_no_is_a_no(told: dict[str, float], image: np.ndarray) -> None:
    parents = {1: [0], 2: [1], 3: [2], 4: [0]}
    assert share_of_yes(dict.fromkeys(parents, True), parents) == 1
    assert share_of_yes({1: True, 2: False, 3: True, 4: True}, parents) == 0.5
    assert share_of_yes({1: False, 2: True, 3: True, 4: True}, parents) == 0.25, "a no is passed on"
    told |= {"A dog": 0.8, "Is it red": 0.3, "Does it sleep": 0.9, "A tree": 0.7}
    scores = build_scorer("dpg_questions").score(image[None], ["a dog"], [TREE])
    assert scores.values.tolist() == [0.5]


def test_wrong_metadata_and_settings_are_one_line(folder: Path) -> None:
    asked = {"instruction": "{question}"}
    for scorer, args, good in (("soft_tifa", asked, PAIRS), ("dpg_questions", {}, TREE)):
        check_prompts(scorer, args, [Prompt(index=0, text="a", metadata=good)])
        for bad in ({}, {"vqa_list": [["How many?"]]}, {"questions": [{"id": 1, "question": "x", "parents": [2]}]}):
            with pytest.raises(PromptError, match=scorer):
                check_prompts(scorer, args, [Prompt(index=0, text="a", metadata=bad)])
    with pytest.raises(ScorerError, match=r"must hold \{question\} once"):
        require_ready("soft_tifa", {"instruction": "in a word", "model": str(folder)})
    require_ready("soft_tifa", {**asked, "model": str(folder)})
    with pytest.raises(ScorerError, match="dtype must be bfloat16 or float32, got 'int4'"):
        build_scorer("dpg_questions", model=str(folder), dtype="int4")

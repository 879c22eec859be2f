"""Scores of images by answers to questions: GenEval 2's Soft-TIFA, and DPG-Bench's questions.

scorer = build_scorer("soft_tifa", instruction="…{question}…")
"""

from collections.abc import Mapping, Sequence

import numpy as np

from protocol.errors import PromptError
from protocol.messages import Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards.questions.model import IMAGE, MARK, MODEL, QuestionModel, require_instruction
from rewards.scores import scored

YES, NO = ("Yes", "yes", " yes", " Yes"), ("No", "no", " no", " No")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS, start=1)}


class SoftTifa:
    """Soft-TIFA of GenEval 2 (arXiv 2512.16853), in [0, 1].

    The value is the geometric mean, over a prompt's questions, of the probability of the right answer; the component
    `am` is the arithmetic mean. Metadata: `vqa_list`, pairs of a question and its right answer.

    The authors' instruction is not part of this package: `flowcredit eval --suite geneval2` reads it from their file.
    """

    name = "soft_tifa"
    low, high = 0.0, 1.0

    def __init__(
        self, *, instruction: str, model: str = MODEL, device: str | None = None, dtype: str = "bfloat16"
    ) -> None:
        """Load the weights of a Qwen3-VL (17 GB).

        Args:
            instruction: what is asked; `{question}` is filled in.
            model: folder, `pkg://` path or hub id.
            dtype: `bfloat16`, as the release runs it, or `float32`.

        Raises:
            ScorerError: see `QuestionModel`; or the instruction does not hold `{question}`.
        """
        require_instruction(instruction, of=self.name)
        self._instruction = instruction
        self._model = QuestionModel(model, device=device, dtype=dtype)

    @staticmethod
    def ready(*, instruction: str, model: str = MODEL, **_: object) -> None:
        """Check instruction and weights (ScorerError)."""
        require_instruction(instruction, of=SoftTifa.name)
        QuestionModel.ready(model)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that every prompt has questions with answers (PromptError names the line of one without)."""
        check_each(prompts, lambda prompt: _pairs(prompt.metadata))

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Make one forward for each question about each image."""
        rows = [
            np.array([self._chance(image, *pair) for pair in _pairs(facts)])
            for image, facts in zip(images, metadata, strict=True)
        ]
        with np.errstate(divide="ignore"):
            geometric = [float(np.exp(np.log(row).mean())) for row in rows]
        return scored(np.clip(geometric, 0, 1), {"am": np.clip([float(row.mean()) for row in rows], 0, 1)})

    def _chance(self, image: np.ndarray, question: str, answer: str) -> float:
        words = self._instruction.replace(MARK, question)
        (chance,) = self._model.probabilities(image, words, answers_to(question, answer))
        return chance


def answers_to(question: str, answer: str) -> list[str]:
    """List the replies that count as right, as the release does: spellings of a number; of yes for other questions."""
    if not question.startswith("How many"):
        return list(YES)
    words = [answer, answer.capitalize(), DIGITS.get(answer, "other")]
    return [words[0], words[1], f" {words[0]}", f" {words[1]}", words[2], f" {words[2]}"]


class DpgQuestions:
    """The share of DPG-Bench's questions (arXiv 2403.05135) about a prompt that are answered with yes, in [0, 1].

    A question whose parent was not answered with yes counts as no, as in the release. The release asks an mPLUG; here a
    Qwen3-VL is asked, with words of ours, so scores of the two are not comparable. Metadata: `questions`, a list of
    `{"id": 1, "question": "…", "parents": [0]}`, where parent 0 is none.
    """

    name = "dpg_questions"
    low, high = 0.0, 1.0

    def __init__(
        self,
        *,
        instruction: str = f"{MARK} Reply with yes or no only.",
        model: str = MODEL,
        device: str | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        """Load the weights; see `SoftTifa`."""
        require_instruction(instruction, of=self.name)
        self._instruction = instruction
        self._model = QuestionModel(model, device=device, dtype=dtype)

    @staticmethod
    def ready(*, model: str = MODEL, **_: object) -> None:
        QuestionModel.ready(model)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that every prompt has questions (PromptError names the line of one without)."""
        check_each(prompts, lambda prompt: _questions(prompt.metadata))

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Make one forward for each question about each image."""
        rows = []
        for image, facts in zip(images, metadata, strict=True):
            questions = _questions(facts)
            said = {number: self._is_yes(image, words) for number, (words, _) in questions.items()}
            rows.append(share_of_yes(said, {number: parents for number, (_, parents) in questions.items()}))
        return scored(rows)

    def _is_yes(self, image: np.ndarray, question: str) -> bool:
        words = self._instruction.replace(MARK, question)
        yes, no = self._model.probabilities(image, words, YES, NO)
        return yes > no


def share_of_yes(said: Mapping[int, bool], parents: Mapping[int, Sequence[int]]) -> float:
    """Return the share of yes after each question with a parent of no, in the questions' order, has become no."""
    counted = dict(said)
    for number, above in parents.items():
        if any(parent and not counted[parent] for parent in above):
            counted[number] = False
    return sum(counted.values()) / len(counted)


def _pairs(facts: Metadata) -> list[tuple[str, str]]:
    pairs = facts.get("vqa_list")
    is_right = isinstance(pairs, Sequence) and not isinstance(pairs, str) and pairs
    if not is_right or not all(len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in pairs):
        raise PromptError(f"soft_tifa needs vqa_list, pairs of question and answer, got {pairs!r}")
    for question, _ in pairs:
        _require_plain(question)
    return [(question, answer) for question, answer in pairs]


def _questions(facts: Metadata) -> dict[int, tuple[str, list[int]]]:
    try:
        questions = {
            int(each["id"]): (str(each["question"]), list(map(int, each["parents"]))) for each in facts["questions"]
        }
    except (KeyError, TypeError, ValueError):
        questions = {}
    if not questions or any(
        parent and parent not in questions for _, parents in questions.values() for parent in parents
    ):
        raise PromptError(
            "dpg_questions needs questions with id, question and parents that exist, got"
            f" {str(facts.get('questions'))[:80]!r}"
        )
    for question, _ in questions.values():
        _require_plain(question)
    return questions


def _require_plain(question: str) -> None:
    if IMAGE in question:
        raise PromptError(f"a question must not hold {IMAGE}, got {question!r}: remove it")

"""Vision-language models as judges of edits, by the formulas of GEdit-Bench and ImgEdit-Bench.

    rewards: {judge: {scorer: edit_judge, args: {judge: {url: "http://10.0.0.7:8000/v1", model: "gpt-4.1"}}}}

An answer that cannot be read is a missing score. The release of GEdit-Bench draws a random number then.
"""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import PromptError, ScorerError, one_line
from protocol.messages import Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards.editing.answers import judge_of, listed, named, require_judge
from rewards.images import resized
from rewards.scores import partly

MARK = "{instruction}"
SEMANTICS = (
    "You see one or more images, and as the last one the image that an editor made from them after this"
    f" instruction:\n\n{MARK}\n\nGive two numbers from 0 to 10. The first one says how well the last image does what"
    " the instruction says: 0 not at all, 10 completely. The second one says how well it keeps all that the instruction"
    " does not name: 0 for a different image, 10 if nothing else has changed. Reply with the two numbers only, in the"
    " form [first, second]."
)
"""Ours; the release's words are in its `vie_prompts.py`."""
QUALITY = (
    "Give two numbers from 0 to 10 for this image. The first one says how natural its light, shadows, sizes and"
    " distances look: 0 not at all, 10 completely. The second one says how free it is of faults, such as blurred or"
    " broken parts, wrong limbs and marks: 0 full of them, 10 without any. Reply with the two numbers only, in the form"
    " [first, second]."
)
"""Ours."""
RELEASED = {
    "semantics": ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC"),
    "quality": ("_context_no_delimit", "_prompts_0shot_rule_PQ"),
}
"""The texts of `vie_prompts.py` that make each question, one after the other."""


TYPES = ("add", "remove", "replace", "adjust", "background", "style", "extract", "action", "compose")
"""ImgEdit-Bench's types of edits."""


class EditJudge:
    """VIEScore for edits (arXiv 2312.14867) as GEdit-Bench computes it (arXiv 2504.17761), in [0, 10].

        semantics = min(follows, keeps)        quality = min(natural, faultless)        value = sqrt(semantics quality)

    The judge sees the raw condition images and the edited one for the first two numbers, the edited one alone for the
    others. The edited image is resized to the first condition image, as in the release.

    Worked numbers: answers [8, 5] and [9, 6] make semantics 5, quality 6 and the value 5.477.
    """

    name = "edit_judge"
    low, high = 0.0, 10.0
    components = ("follows", "keeps", "semantics", "quality")

    def __init__(self, *, judge: Mapping[str, Any] | None = None, template: str | None = None) -> None:
        """Make the judge.

        Args:
            judge: its settings, see `rewards.editing.answers.judge_of`; by default a Qwen3-VL-8B in this process.
            template: the release's `vie_prompts.py` (folder `viescore`), which is read and never run; None asks in
                words of ours.

        Raises:
            ScorerError: the judge cannot be made, or the file does not hold the texts.
        """
        self._words = _released(template) if template else {"semantics": SEMANTICS, "quality": QUALITY}
        self._judge = judge_of(judge or {})
        self._threads = ThreadPoolExecutor(max_workers=self._judge.parallel, thread_name_prefix="edit-judge")

    @staticmethod
    def ready(*, judge: Mapping[str, Any] | None = None, template: str | None = None) -> None:
        if template:
            _released(template)
        require_judge(judge or {})

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],  # noqa: ARG002
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        """Ask two questions about each image."""
        answers = list(self._threads.map(self._judged, images, prompts, conditions))
        reasons = [reason for _, reason in answers]
        follows, keeps, natural, faultless = np.array([numbers for numbers, _ in answers]).T
        semantics, quality = np.minimum(follows, keeps), np.minimum(natural, faultless)
        parts = {"follows": follows, "keeps": keeps, "semantics": semantics, "quality": quality}
        return partly(np.sqrt(semantics * quality), reasons, parts)

    def _judged(self, image: np.ndarray, prompt: str, conditions: Sequence[np.ndarray]) -> tuple[list[float], str]:
        edited = resized(image, *conditions[0].shape[:2])
        numbers: list[float] = []
        for seen, words in (
            ([*conditions, edited], self._words["semantics"].replace(MARK, prompt)),
            ([edited], self._words["quality"]),
        ):
            text, reason = self._judge.ask(seen, words)
            found, unread = ([], "") if reason else listed(text, count=2, low=0, high=10)
            if reason or unread:
                return [math.nan] * 4, reason or unread
            numbers += found
        return numbers, ""


class ImgEditJudge:
    """ImgEdit-Bench's basic suite (arXiv 2505.20275), in [1, 5]: the mean of three numbers from 1 to 5.

    The first number says whether the instruction is followed, and the others count at most as much. The rubric asks the
    judge for that too; the component `plain` is the mean without it, as the release's script computes it. Metadata:
    `tag`, the type of the edit, which has its rubric.

    Worked numbers: an answer 2, 5, 4 makes (2 + 2 + 2) / 3 = 2, and 3.667 plain.
    """

    name = "imgedit_judge"
    low, high = 1.0, 5.0
    components = ("first", "second", "third", "plain")

    def __init__(self, *, template: str, judge: Mapping[str, Any] | None = None) -> None:
        """Make the judge.

        Args:
            template: the release's `prompts.json`, with the rubric of each type.
            judge: its settings, see `rewards.editing.answers.judge_of`; by default a Qwen3-VL-8B in this process.

        Raises:
            ScorerError: the judge cannot be made, or the file does not hold rubrics.
        """
        self._words = _rubrics(template)
        self._judge = judge_of(judge or {})
        self._threads = ThreadPoolExecutor(max_workers=self._judge.parallel, thread_name_prefix="imgedit-judge")

    @staticmethod
    def ready(*, template: str, judge: Mapping[str, Any] | None = None) -> None:
        _rubrics(template)
        require_judge(judge or {})

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that each prompt has a type of edit (PromptError names the line of one without)."""
        check_each(prompts, lambda prompt: _type_of(prompt.metadata))

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        """Ask one question about each image."""
        words = [
            self._words[_type_of(facts)].replace(MARK, prompt) for prompt, facts in zip(prompts, metadata, strict=True)
        ]
        answers = list(self._threads.map(self._judged, images, words, conditions))
        numbers = np.array([found for found, _ in answers])
        parts = dict(zip(self.components, (*numbers.T, numbers.mean(1)), strict=True))
        return partly(np.minimum(numbers, numbers[:, :1]).mean(1), [reason for _, reason in answers], parts)

    def _judged(self, image: np.ndarray, words: str, conditions: Sequence[np.ndarray]) -> tuple[list[float], str]:
        text, reason = self._judge.ask([*conditions, image], words, words_first=True)
        found, unread = ([], "") if reason else named(text, count=3, low=1, high=5)
        return (found, "") if found else ([math.nan] * 3, reason or unread)


def _type_of(facts: Metadata) -> str:
    found = facts.get("tag")
    if found not in TYPES:
        raise PromptError(f"tag must be a type of edit, one of {', '.join(TYPES)}, got {found!r}")
    return found


def _released(template: str) -> dict[str, str]:
    """Read GEdit-Bench's questions in `vie_prompts.py`, as its evaluation joins them."""
    rule, remedy = f"template {template} must be GEdit-Bench's vie_prompts.py", "download it again"
    try:
        tree = ast.parse(Path(template).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ScorerError(f"{rule}, got {one_line(error)}: {remedy}") from None
    texts = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lacking = {name for names in RELEASED.values() for name in names} - texts.keys()
    if lacking:
        raise ScorerError(f"{rule}, got no text {sorted(lacking)[0]}: {remedy}")
    words = {question: "\n".join(texts[name] for name in names) for question, names in RELEASED.items()}
    return words | {"semantics": words["semantics"].replace("<instruction>", MARK)}


def _rubrics(template: str) -> dict[str, str]:
    """Read ImgEdit-Bench's rubrics by type of edit in `prompts.json`."""
    rule = f"template {template} must be ImgEdit-Bench's prompts.json"
    try:
        found = json.loads(Path(template).read_text(encoding="utf-8"))
        return {kind: found[kind].replace("<edit_prompt>", MARK) for kind in TYPES}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ScorerError(f"{rule}, got {one_line(error)}: download it again") from None

"""A vision-language model that judges edits: at an OpenAI-compatible endpoint, or a Qwen3-VL in this process.

judge = judge_of({"url": "http://10.0.0.7:8000/v1", "model": "Qwen/Qwen2.5-VL-72B-Instruct-AWQ"})
judge = judge_of({"model": "Qwen/Qwen3-VL-8B-Instruct"})
text, reason = judge.ask([before, after], "…")
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from protocol.errors import ScorerError
from rewards.loading import build_from_path, require_class_ready

LIST = re.compile(r"\[\s*(-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?)*)\s*\]")
NAMED = re.compile(r"(?m)^[^:\n]+:[ \t]*(-?\d+(?:\.\d+)?)[ \t]*$")


class Judge(Protocol):
    """Answers questions about images, at temperature 0; several threads may use it."""

    parallel: int
    """Questions that it answers at one time."""

    def ask(self, images: Sequence[np.ndarray], words: str, *, words_first: bool = False) -> tuple[object, str]:
        """Return the answer and an empty reason, or None and the reason; images are uint8 [H, W, 3]."""
        ...


def judge_of(settings: Mapping[str, Any]) -> Judge:
    """Make a judge: with `url` an `Endpoint`, otherwise a `QuestionModel`; the settings are their arguments.

    Raises:
        ScorerError: a wrong setting, or weights that cannot be loaded.
    """
    return build_from_path(_path_of(settings), args=settings)


def require_judge(settings: Mapping[str, Any]) -> None:
    """Check that the endpoint answers, or that the weights are there (ScorerError)."""
    require_class_ready(_path_of(settings), settings)


def _path_of(settings: Mapping[str, Any]) -> str:
    if not settings.get("url", "none"):
        raise ScorerError(
            "url of a judge must be the address of an OpenAI-compatible endpoint, got none: set"
            " rewards.NAME.args.judge.url=http://HOST:8000/v1"
        )
    return "rewards.http.chat:Endpoint" if "url" in settings else "rewards.questions.model:QuestionModel"


def listed(text: object, *, count: int, low: float, high: float) -> tuple[list[float], str]:
    """Find the only list of numbers in an answer, such as `{"score": [8, 9]}`; without one return the reason."""
    found = [[float(number) for number in each.split(",")] for each in LIST.findall(str(text))]
    numbers = found[0] if len(found) == 1 else []
    return _checked(numbers, text, f"one list of {count} numbers", count=count, low=low, high=high)


def named(text: object, *, count: int, low: float, high: float) -> tuple[list[float], str]:
    """Find the numbers of an answer's lines `Name: number`; without `count` of them return the reason."""
    numbers = [float(number) for number in NAMED.findall(str(text))]
    return _checked(numbers, text, f"{count} lines that end with a number", count=count, low=low, high=high)


def _checked(
    numbers: list[float], text: object, what: str, *, count: int, low: float, high: float
) -> tuple[list[float], str]:
    if len(numbers) == count and all(low <= number <= high for number in numbers):
        return numbers, ""
    return [], f"the answer must hold {what} from {low:g} to {high:g}, got {str(text)[-120:]!r}"

"""A plain function as a scorer: `(images, prompts, metadata) -> a number for each image, None where there is none`.

A function that has a parameter `conditions` gets the condition images by it (`rewards.scorer.Scorer`).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from protocol.errors import ContractError, ScorerError
from protocol.messages import Metadata, Prompt, Scores
from rewards.scores import partly

GIVEN = 3
"""Arguments that every call gets: images, prompts, metadata. Further arguments, except `conditions`, are the config's
`args`."""


def scorer_class(function: Callable[..., Any]) -> type:
    """Make the class of a scorer that calls `function`; its constructor takes the arguments after the first three.

    Raises:
        ScorerError: the function does not take three.
    """
    signature = inspect.signature(function)
    try:
        signature.bind_partial(*range(GIVEN))
    except TypeError:
        raise ScorerError(
            f"reward function {function.__name__} must take images, prompts and metadata, got {signature}"
        ) from None

    further = dict(list(signature.parameters.items())[GIVEN:])
    takes = further.pop("conditions", None)

    class FunctionScorer:
        name = function.__name__
        low, high = -math.inf, math.inf
        components = ()

        def __init__(self, **args: Any) -> None:
            self._args = args

        @staticmethod
        def check(prompts: Sequence[Prompt]) -> None: ...

        def score(
            self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata], **given: Any
        ) -> Scores:
            """Score B images; None or NaN is a missing score."""
            values = numbers_of(function(images, prompts, metadata, **given, **self._args), len(images))
            return partly(values, [f"{self.name}: no score" if np.isnan(value) else "" for value in values])

    FunctionScorer.__name__, FunctionScorer.__module__ = function.__name__, function.__module__
    FunctionScorer.__signature__ = signature.replace(parameters=list(further.values()))  # type: ignore[attr-defined]
    if takes:
        own = inspect.signature(FunctionScorer.score)
        wanted = [*list(own.parameters.values())[:-1], takes.replace(kind=takes.KEYWORD_ONLY)]
        FunctionScorer.score.__signature__ = own.replace(parameters=wanted)  # type: ignore[attr-defined]
    return FunctionScorer


def numbers_of(answer: Any, size: int) -> np.ndarray:
    """Return the numbers of a list or an array (numpy, torch on any device) as float32 [size], NaN where there is none.

    Raises:
        ContractError: the answer has another form or length, or holds infinity.
    """
    listed = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(listed, list | tuple) or len(listed) != size:
        got = len(listed) if isinstance(listed, list | tuple) else type(answer).__name__
        raise ContractError(f"a reward function must return one number for each of {size} images, got {got}")
    try:
        values = np.array([math.nan if value is None else float(value) for value in listed], np.float32)
    except (TypeError, ValueError):
        odd = next(value for value in listed if not isinstance(value, int | float | None))
        raise ContractError(f"a reward function must return numbers, or None for no score, got {odd!r}") from None
    if np.isinf(values).any():
        raise ContractError("a reward function must return finite numbers, got infinity; clip it, or return None")
    return values

"""Ask a vision-language model at an OpenAI-compatible endpoint one question with images; a failure becomes a reason."""

import base64
import json
import re
from collections.abc import Sequence

import numpy as np

from protocol.errors import ScorerError, named_line
from rewards.http.caller import CallError, HttpCaller
from rewards.images import encode_png


def checked_pattern(pattern: str, instruction: str, *, of: str, **filled_in: str) -> re.Pattern[str]:
    """Compile the pattern that finds an answer, and check the question.

    Args:
        pattern: regular expression with one group.
        instruction: the question, which holds `{prompt}`.
        of: name of the scorer, for the error.
        filled_in: further fields that the instruction may hold.

    Raises:
        ScorerError: one of them cannot be parsed or lacks its part.
    """
    try:
        compiled = re.compile(pattern)
        instruction.format(prompt="", **filled_in)
    except (re.error, LookupError, ValueError) as error:
        raise ScorerError(f"pattern or instruction of {of} cannot be read: {error}") from None
    if compiled.groups != 1 or "{prompt}" not in instruction:
        raise ScorerError(f"pattern of {of} must have one group, and its instruction must hold {{prompt}}")
    return compiled


class ChatModel:
    """A model of one endpoint; it answers at temperature 0."""

    def __init__(self, caller: HttpCaller, *, model: str, max_tokens: int) -> None:
        self._caller, self._model, self._max_tokens = caller, model, max_tokens

    def ask(self, images: Sequence[np.ndarray], words: str) -> tuple[object, str]:
        """Ask about images uint8 [H, W, 3], sent lossless before the words; return the answer, or None and a reason."""
        urls = [f"data:image/png;base64,{base64.b64encode(encode_png(image)).decode()}" for image in images]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        question = {
            "model": self._model,
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": words}]}],
        }
        try:
            reply = self._caller.call("POST", "/chat/completions", json=question)
            return json.loads(reply.content)["choices"][0]["message"]["content"], ""
        except CallError as error:
            return None, str(error)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return None, f"the endpoint's reply is not a chat completion: {named_line(error)}"

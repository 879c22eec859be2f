"""Ask a vision-language model at an OpenAI-compatible endpoint one question with images; a failure becomes a reason."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.errors import ScorerError, named_line
from rewards.http.caller import CallError, HttpCaller, require_server
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

    def ask(self, images: Sequence[np.ndarray], words: str, *, words_first: bool = False) -> tuple[object, str]:
        """Ask about images uint8 [H, W, 3], sent lossless before the words; return the answer, or None and a reason."""
        urls = [f"data:image/png;base64,{base64.b64encode(encode_png(image)).decode()}" for image in images]
        shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        text: list[dict[str, Any]] = [{"type": "text", "text": words}]
        question = {
            "model": self._model,
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "messages": [{"role": "user", "content": [*text, *shown] if words_first else [*shown, *text]}],
        }
        try:
            reply = self._caller.call("POST", "/chat/completions", json=question)
            return json.loads(reply.content)["choices"][0]["message"]["content"], ""
        except CallError as error:
            return None, str(error)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return None, f"the endpoint's reply is not a chat completion: {named_line(error)}"


class Endpoint(ChatModel):
    """A `ChatModel` with its own caller."""

    ready = staticmethod(require_server)

    def __init__(
        self,
        *,
        url: str,
        model: str,
        max_tokens: int = 512,
        parallel: int = 8,
        timeout_s: float = 120.0,
        tries: int = 3,
        deadline_s: float = 300.0,
        token_env: str | None = None,
    ) -> None:
        """Check the settings; no request is sent.

        Args:
            url: address of the endpoint, up to and including `/v1`.

        Raises:
            ScorerError: a setting is out of range.
        """
        if parallel < 1:
            raise ScorerError(f"parallel of a judge must be at least 1, got {parallel}")
        caller = HttpCaller(url, timeout_s=timeout_s, tries=tries, deadline_s=deadline_s, token_env=token_env)
        super().__init__(caller, model=model, max_tokens=max_tokens)
        self.parallel = parallel

"""One question with images to a vision-language model behind an OpenAI-compatible endpoint; a failure is a reason."""

import base64
import json
from collections.abc import Sequence

import numpy as np

from protocol.errors import one_line
from rewards.http.caller import CallError, HttpCaller
from rewards.images import encode_png


class ChatModel:
    """A model of one endpoint, asked at temperature 0."""

    def __init__(self, caller: HttpCaller, *, model: str, max_tokens: int) -> None:
        """
        Args:
            caller: of the endpoint.
            model: name of the model there.
            max_tokens: largest length of one answer.
        """
        self._caller, self._model, self._max_tokens = caller, model, max_tokens

    def ask(self, images: Sequence[np.ndarray], words: str) -> tuple[object, str]:
        """Ask about images uint8 [H, W, 3], which go before the words, lossless; return the answer, or why not."""
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
            return None, f"the endpoint's reply is no chat completion: {type(error).__name__}: {one_line(error)}"

"""A client of reward servers with flow_grpo's HTTP protocol, which does not trust their replies.

    scorer = build_scorer("flow_grpo", url="http://10.0.0.7:18085", send="meta_datas")

The request is a pickled dict of `images` (a list of JPEG files) and `prompts` or `meta_datas` (each with its `prompt`);
the reply is a pickled dict too. The released GenEval and DeQA servers read JPEG only; your own server may take
`image_format: png`, which is lossless. Reading a pickle can run any code, so a reply is read only as JSON or msgpack
unless `unpickle: true` is given. Even then the reader builds only plain data and NumPy arrays.
"""

import io
import json
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from protocol.errors import ContractError, ScorerError, named_line
from protocol.messages import Metadata, Prompt, Scores
from rewards.http.caller import CallError, HttpCaller, require_server
from rewards.http.wire import JSON, MSGPACK
from rewards.images import encode_jpeg, encode_png
from rewards.scores import joined, partly

HARMLESS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
    ("collections", "defaultdict"),
    ("builtins", "list"),
}
"""Everything that a reply's pickle may name: arrays, their numbers, and grouped lists."""


UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that damaged bytes can raise when they are read."""


class FlowGrpoServer:
    """Scores of a server: `scores` of its reply are the values, its other lists of B numbers are components."""

    name = "flow_grpo"
    ready = staticmethod(require_server)

    def __init__(
        self,
        *,
        url: str,
        send: Literal["prompts", "meta_datas"] = "prompts",
        values: str = "scores",
        low: float = float("-inf"),
        high: float = float("inf"),
        only_strict: bool | None = None,
        unpickle: bool = False,
        image_format: Literal["jpeg", "png"] = "jpeg",
        quality: int = 95,
        batch: int = 64,
        timeout_s: float = 120.0,
        tries: int = 4,
        deadline_s: float = 300.0,
    ) -> None:
        """Check the settings; no request is sent.

        Args:
            send: `prompts` (preference models) or `meta_datas` (GenEval).
            values: the key of the reply that holds the scores.
            low: least value that a score can have.
            high: largest value that a score can have.
            only_strict: sent with the request if given (GenEval's servers need it).
            unpickle: read a pickled reply, but build plain data and arrays only.
            image_format: `jpeg`, which the released servers read, or `png`, lossless, for a server that takes it.
            quality: quality of a JPEG, 1 to 100; it has no chroma subsampling.

        Raises:
            ScorerError: a setting is out of range.
        """
        if send not in ("prompts", "meta_datas") or batch < 1:
            raise ScorerError(f"send must be prompts or meta_datas and batch at least 1, got {send!r} and {batch}")
        if image_format not in ("jpeg", "png") or not 1 <= quality <= 100:
            raise ScorerError(
                f"image_format must be jpeg or png and quality 1 to 100, got {image_format!r} and {quality}"
            )
        self._encode = partial(encode_jpeg, quality=quality) if image_format == "jpeg" else encode_png
        self._caller = HttpCaller(url, timeout_s=timeout_s, tries=tries, deadline_s=deadline_s)
        self._send, self._values, self._only_strict = send, values, only_strict
        self._unpickle, self._batch = unpickle, batch
        self.low, self.high = float(low), float(high)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Score B images in requests of `batch`; a request that fails costs its own images their scores.

        Raises:
            ContractError: a reply cannot be read, or does not hold one score for each image.
        """
        requests = [slice(start, start + self._batch) for start in range(0, len(images), self._batch)]
        return joined([self._score_part(images[rows], prompts[rows], metadata[rows]) for rows in requests])

    def _score_part(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        question: dict[str, Any] = {"images": [self._encode(image) for image in images]}
        lines = [{**line, "prompt": prompt} for line, prompt in zip(metadata, prompts, strict=True)]
        question[self._send] = list(prompts) if self._send == "prompts" else lines
        if self._only_strict is not None:
            question["only_strict"] = self._only_strict
        try:
            answer = self._caller.call("POST", "", content=pickle.dumps(question))
        except CallError as error:
            return Scores.missing(len(images), str(error))
        reply = self._read(answer.content, answer.kind)
        lists = {name: numbers for name, part in reply.items() if (numbers := _numbers(part, len(images))) is not None}
        if self._values not in lists:
            raise ContractError(
                f"the server's reply must hold {len(images)} numbers under {self._values!r}, got keys {list(reply)}"
            )
        values = lists.pop(self._values)
        reasons = ["" if np.isfinite(value) else f"the server's score is {value}" for value in values]
        return partly(values, reasons, {name: part for name, part in lists.items() if np.isfinite(part).all()})

    def _read(self, data: bytes, kind: str) -> dict[str, Any]:
        try:
            if kind == JSON:
                reply = json.loads(data)
            elif kind == MSGPACK:
                import msgpack

                reply = msgpack.unpackb(data)
            elif self._unpickle:
                reply = PlainUnpickler(io.BytesIO(data)).load()
            else:
                raise ContractError(
                    f"a reply must be JSON or msgpack, got {kind or 'no content type'}:"
                    " flow_grpo's servers send pickle; unpickle=true reads it, building plain data only"
                )
        except UNREADABLE as error:
            raise ContractError(f"the server's reply cannot be read: {named_line(error)}") from None
        if not isinstance(reply, dict):
            raise ContractError(f"the server's reply must be a dict, got {type(reply).__name__}")
        return reply


class PlainUnpickler(pickle.Unpickler):
    """Reads plain data and NumPy arrays; any other name in the pickle is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise UnpicklingError for all names but `HARMLESS`."""
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which is not plain data")
        return super().find_class(module, name)


def _numbers(part: Any, size: int) -> np.ndarray | None:
    """Return `part` as float32 [size], or None if it is something else."""
    try:
        numbers = np.asarray(part, np.float32)
    except (TypeError, ValueError):
        return None
    return numbers if numbers.shape == (size,) else None

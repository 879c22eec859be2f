"""The messages of the HTTP reward service, as msgpack or JSON. Reading them runs no code.

    POST /v1/score    ScoreCall -> ScoreReply, one answer per item, in order; an item that fails has a reason
    POST /v1/check    CheckCall -> CheckReply
    GET  /v1/scorers  ScorerList

An image is a byte string in msgpack and base64 in JSON; a condition image that several images share is sent once. A
missing number is null, never NaN and never 0.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from protocol.errors import ContractError, plain
from protocol.messages import Scores
from rewards.scores import partly

MSGPACK, JSON = "application/msgpack", "application/json"
Read = TypeVar("Read", bound="Message")
ScorerName = Annotated[str, StringConstraints(max_length=200)]
MOST_ITEMS = 1024
"""Largest number of images, or prompts, of one request."""
REQUEST_PIXELS = 256 * 1024 * 1024
"""Largest number of pixels of a request's images together, as many as `MOST_ITEMS` images of 512 x 512 have."""
MOST_VALUES = 128 * MOST_ITEMS
"""Largest number of values of one message, nested ones included: no other thread runs while a parser makes them. In
JSON, commas in texts count too."""
MOST_CONDITIONS = 16
"""Largest number of condition images of one image."""
MOST_TOGETHER = 8 * MOST_ITEMS
"""Largest number of entries of one list or map in msgpack."""


class Message(BaseModel):
    """Base of all messages: frozen, without unknown keys, bytes as base64 in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Item(Message):
    """One image to score."""

    image: bytes
    """A PNG, JPEG or WebP file."""
    prompt: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    conditions: tuple[int, ...] = Field(default=(), max_length=MOST_CONDITIONS)
    """The condition images, by their index in the call's `conditions`."""


class ScoreCall(Message):
    """The request to score images."""

    scorer: ScorerName
    items: tuple[Item, ...] = Field(min_length=1, max_length=MOST_ITEMS)
    conditions: tuple[bytes, ...] = Field(default=(), max_length=MOST_ITEMS)
    """Condition images, each once: PNG, JPEG or WebP files."""

    @model_validator(mode="after")
    def _finds_conditions(self) -> Self:
        named = {index for item in self.items for index in item.conditions}
        if named - set(range(len(self.conditions))):
            raise ValueError(f"must be indices of {len(self.conditions)} condition images, got {sorted(named)[:9]}")
        return self


class ItemAnswer(Message):
    """The score of one image, or the reason why it has none."""

    value: float | None = Field(default=None, allow_inf_nan=False)
    reason: str = ""
    """Empty where there is a value."""
    components: dict[str, float | None] = Field(default_factory=dict)


class ScoreReply(Message):
    """The answers in the order of the call's items."""

    scorer: str
    items: tuple[ItemAnswer, ...]


class PromptLine(Message):
    """One line of a prompt file."""

    index: int
    text: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    conditions: tuple[str, ...] = Field(default=(), max_length=MOST_CONDITIONS)
    """sha256 of each condition image."""


class CheckCall(Message):
    """The request to check prompts."""

    scorer: ScorerName
    prompts: tuple[PromptLine, ...] = Field(max_length=MOST_ITEMS)


class CheckReply(Message):
    """Why the prompts cannot be scored; empty if they can."""

    problem: str = ""


class ScorerFacts(Message):
    """The name of a scorer and the range of its values."""

    name: str
    low: float | None = None
    """Least value; null if there is none."""
    high: float | None = None
    """Largest value; null if there is none."""
    sees: Literal["image", "group"] = "image"
    """`group`: the images of a request are one group, scored together or not at all."""
    takes_conditions: bool = False
    """Whether it looks at condition images."""


class ScorerList(Message):
    """The scorers of a service."""

    scorers: tuple[ScorerFacts, ...]


def write_message(message: Message, kind: str) -> bytes:
    """Write a message as bytes of content type `kind`."""
    if kind == JSON:
        return message.model_dump_json().encode()
    import msgpack

    data: Any = msgpack.packb(message.model_dump())
    return data


def read_message(cls: type[Read], data: bytes, kind: str) -> Read:
    """Read a message.

    Args:
        kind: content type of the bytes.

    Raises:
        ContractError: another content type, bytes that are no message of this class, or more than `MOST_VALUES` values.
    """
    import msgpack

    try:
        if kind == JSON:
            _bound(sum(data.count(sign) for sign in (b",", b"[", b"{")))
            return cls.model_validate_json(data)
        if kind == MSGPACK:
            return cls.model_validate(_unpacked(data))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:60] for part in problem["loc"])
        raise ContractError(f"{cls.__name__} is malformed: {where}: {problem['msg']}") from None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ContractError(f"{cls.__name__} is not {kind}: {error}") from None
    raise ContractError(f"a message must be {MSGPACK} or {JSON}, got {kind!r}")


def answers_of(scores: Scores) -> tuple[ItemAnswer, ...]:
    """Convert scores to answers, NaN to null."""
    return tuple(
        ItemAnswer(
            value=finite(scores.values[row]),
            reason=scores.reasons[row],
            components={name: finite(part[row]) for name, part in scores.components.items()},
        )
        for row in range(len(scores.reasons))
    )


def scores_of(answers: Sequence[ItemAnswer]) -> Scores:
    """Convert answers to scores, null to NaN.

    Raises:
        ContractError: an answer with both a value and a reason, or with neither.
    """
    for row, item in enumerate(answers):
        if (item.value is None) != bool(item.reason):
            got = f"value {item.value}, reason {item.reason!r}"
            raise ContractError(f"an answer must have a value or a reason, got {got} for image {row}")
    names = dict.fromkeys(name for item in answers for name in item.components)
    return partly(
        [_nan(item.value) for item in answers],
        [plain(item.reason) for item in answers],
        {name: [_nan(item.components.get(name)) for item in answers] for name in names},
    )


def finite(value: float) -> float | None:
    """Return the number as messages hold it; None if it is NaN or infinite."""
    return float(value) if np.isfinite(value) else None


def _unpacked(data: bytes) -> Any:
    import msgpack

    values = 0

    def counted(entries: Any) -> Any:
        nonlocal values
        values += 1 + len(entries)
        _bound(values)
        return entries

    hooks = {"list_hook": counted, "object_hook": counted}
    return msgpack.unpackb(data, **hooks, max_array_len=MOST_TOGETHER, max_map_len=MOST_TOGETHER)


def _bound(values: int) -> None:
    if values > MOST_VALUES:
        raise ContractError(f"a message may have {MOST_VALUES} values besides its images: send fewer at once")


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value

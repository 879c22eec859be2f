"""What a message of the reward service may hold, and that a larger one is refused before it is built."""

import json
import tracemalloc
from typing import Any

import msgpack
import pytest

from protocol.errors import ContractError
from rewards.http.wire import JSON, MOST_ITEMS, MOST_VALUES, MSGPACK, Item, ScoreCall, read_message, write_message

MIB = 1024 * 1024


def call_with(metadata: Any, kind: str) -> bytes:
    tree = {"scorer": "red", "items": [{"image": "", "prompt": "", "metadata": metadata}]}
    return json.dumps(tree).encode() if kind == JSON else msgpack.packb(tree)


@pytest.mark.parametrize("kind", [JSON, MSGPACK])
@pytest.mark.parametrize(
    "metadata",
    [
        {"a": [{}] * 8000, "b": [[{}] * 8000] * 40},
        {"a": [[0] * 8000] * 40},
        {str(i): {str(j): 0 for j in range(400)} for i in range(400)},
    ],
)
def test_a_message_of_too_many_values_is_refused(metadata: Any, kind: str) -> None:
    """Parsing holds Python's lock, so this bounds how long the service does nothing else."""
    with pytest.raises(ContractError, match=f"a message may have {MOST_VALUES} values besides its images"):
        read_message(ScoreCall, call_with(metadata, kind), kind)


@pytest.mark.parametrize("shape", ["flat", "nested", "open"])
def test_a_message_of_too_many_values_is_not_built_first(shape: str) -> None:
    """A million empty maps in one MiB are 64 MiB of objects."""
    body = {
        "flat": b"\xdd" + (10**6).to_bytes(4, "big") + b"\x80" * 10**6,
        "nested": msgpack.packb([[{}] * 1000] * 1000),
        "open": (b"\xdc" + (8000).to_bytes(2, "big") + b"\x80" * 7999) * 125 + b"\x90",
    }[shape]
    tracemalloc.start()
    try:
        with pytest.raises(ContractError):
            read_message(ScoreCall, body, MSGPACK)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * MIB


@pytest.mark.parametrize("kind", [JSON, MSGPACK])
def test_the_largest_honest_message_is_read(kind: str) -> None:
    objects = [{"class": "circle", "count": 2, "color": "red", "position": ["left of", 0]}] * 3
    metadata = {"tag": "position", "include": objects, "exclude": objects[:1], "prompt": "a, b and c"}
    item = Item(image=bytes(range(256)) * 16, prompt="a photo, sharp, of three red circles, " * 12, metadata=metadata)
    call = ScoreCall(scorer="red", items=(item,) * MOST_ITEMS)
    assert read_message(ScoreCall, write_message(call, kind), kind) == call

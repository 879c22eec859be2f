"""Messages check their shapes, cannot be changed and survive the wire; so do errors."""

import dataclasses
import hashlib
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

from protocol import errors, messages
from protocol.errors import ContractError, FlowcreditError
from protocol.messages import Adapter, Prompt, Receipt, Rollout, Scores, ShardRequest, digest_of

REQUEST = ShardRequest(
    iteration=0,
    group=0,
    prompt=Prompt(index=0, text="a"),
    first_member=0,
    members=2,
    adapter_version=1,
    adapter_digest="d",
)


def rollout(**changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "request": REQUEST,
        "steps": (0, 1),
        "latents": np.zeros((2, 4, 1, 2, 2), np.float32),
        "log_probs": np.zeros((2, 2), np.float32),
        "image_index": np.zeros((2, 3), np.int64),
    }
    return Rollout(**fields | changes)


def test_a_rollout_of_right_shapes_is_taken() -> None:
    assert rollout().steps == (0, 1)
    assert rollout(image_index=np.zeros((2, 1), np.int64)).image_index.shape == (2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": np.zeros((3, 4, 1, 2, 2), np.float32)}, "latents of 3 members, request of 2"),
        ({"latents": np.zeros((2, 4, 1, 2, 2))}, "latents must be float32, got float64"),
        ({"latents": np.zeros((2, 4, 1, 2, 2), np.float16)}, "latents must be float32, got float16"),
        ({"log_probs": np.zeros((2, 3), np.float32)}, r"log_probs must be \[2, 2\], got \[2, 3\]"),
        ({"image_index": np.zeros((2, 2), np.int64)}, r"image_index must be \[2, 1 or 3\], got \[2, 2\]"),
    ],
)
def test_a_rollout_of_wrong_shapes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        rollout(**changes)


def test_scores_of_unequal_lengths_are_refused() -> None:
    good = {"values": np.zeros(2, np.float32), "valid": np.ones(2, bool), "reasons": ("", "")}
    assert Scores(**good).components == {}
    for changes, message in (
        ({"values": np.zeros(3, np.float32)}, r"values must be \[2\], got \[3\]"),
        ({"valid": np.ones((2, 1), bool)}, r"valid must be \[2\], got \[2, 1\]"),
        ({"components": {"strict": np.zeros(1, np.float32)}}, r"component strict must be \[2\], got \[1\]"),
    ):
        with pytest.raises(ContractError, match=message):
            Scores(**good | changes)


def test_missing_scores_are_nan_invalid_and_say_why() -> None:
    scores = Scores.missing(3, "deadline")
    assert np.isnan(scores.values).all()
    assert scores.values.dtype == np.float32
    assert scores.valid.tolist() == [False] * 3
    assert scores.reasons == ("deadline",) * 3


def test_a_receipt_must_name_the_wanted_weights() -> None:
    Receipt(adapter_version=1, adapter_digest="d", images=1).require_adapter_of(REQUEST)
    for version, digest in ((2, "d"), (1, "e")):
        with pytest.raises(ContractError, match="images must come from adapter version 1"):
            Receipt(adapter_version=version, adapter_digest=digest, images=1).require_adapter_of(REQUEST)


def test_every_message_is_frozen_slotted_and_keyword_only() -> None:
    classes = [kind for _, kind in inspect.getmembers(messages, dataclasses.is_dataclass)]
    assert classes
    for kind in classes:
        parameters = kind.__dataclass_params__
        assert parameters.frozen, kind
        assert "__slots__" in vars(kind), kind
        assert all(field.kw_only for field in dataclasses.fields(kind)), kind


def test_messages_survive_pickling() -> None:
    sent = rollout(latents=np.arange(32, dtype=np.float32).reshape(2, 4, 1, 2, 2))
    received = pickle.loads(pickle.dumps(sent, protocol=5))
    assert received.request == sent.request
    assert np.array_equal(received.latents, sent.latents)


def test_a_digest_is_sha256_over_names_types_shapes_and_bytes() -> None:
    arrays = {"b": np.array([1.0, 2.0], np.float32), "a": np.array([[3]], np.int64)}
    by_hand = hashlib.sha256()
    by_hand.update(b"a|<i8|(1, 1)|" + np.array([3], "<i8").tobytes())
    by_hand.update(b"b|<f4|(2,)|" + np.array([1, 2], "<f4").tobytes())
    assert digest_of(arrays) == by_hand.hexdigest()
    assert digest_of(arrays) != digest_of({**arrays, "a": np.array([[3]], np.int32)})
    assert digest_of({}) == hashlib.sha256().hexdigest()
    assert Adapter(version=0, arrays=arrays, digest=digest_of(arrays)).version == 0


def test_every_error_belongs_to_the_tree_pickles_and_says_what_it_means() -> None:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert classes
    for kind in classes:
        assert issubclass(kind, FlowcreditError)
        error = pickle.loads(pickle.dumps(kind("rule, value, remedy")))
        assert type(error) is kind
        assert str(error) == "rule, value, remedy"
        assert kind.__doc__

"""Texts that come from elsewhere lose what a terminal would obey, and nothing else."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LONGEST_LINE, one_line, plain, printable
from protocol.status import Event

OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PIECES = st.lists(
    st.sampled_from(
        ["word", "\x1b", "[", "]", "31m", "0;", "\x07", "\x1b\\", "\x9b", "\x9d", "\x9c", "P", "\r", "\n", "é"]
    )
    | st.text(max_size=5)
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a \x1b[1;31mred\x1b[0m word", "a red word"),
        ("\x1b]0;a new title\x07text", "text"),
        ("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;cm0gLXJm\x9ctext", "text"),
        ("\x9b2Jtext\x9d0;title\x07", "text"),
        ("\x1bP1;2q image \x1b\\text", "text"),
        ("\x1b(Btext\x1bc", "text"),
        ("over\rwritten\x08", "overwritten"),
        ("ein Wörtchen – 日本\n\tline", "ein Wörtchen – 日本\n\tline"),
    ],
)
def test_escapes_go_and_words_stay(text: str, kept: str) -> None:
    assert plain(text) == kept
    read = Event.read(json.dumps({"number": 1, "time": 1.0, "kind": "info", "message": text}))
    assert read.message == kept
    assert one_line(RuntimeError(text)) == " ".join(kept.split())


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(pieces=PIECES)
def test_nothing_that_a_terminal_obeys_is_left(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert not OBEYED.search(plain(text))
    assert plain(plain(text)) == plain(text)
    assert len(one_line(text)) <= LONGEST_LINE


def test_a_long_name_loses_its_middle_and_the_remedy_stays() -> None:
    message = printable(f"there is no run {'x' * 5000}: `flowcredit status` lists all runs")
    assert len(message) < 250
    assert message.endswith("x: `flowcredit status` lists all runs")

"""Metadata lines that can be scored, and those that are refused with rule, value and remedy."""

from typing import Any

import pytest

from protocol.errors import PromptError
from rewards.geneval.clauses import Excluded, Included, read_clauses

CIRCLE = {"class": "circle", "count": 1}
SQUARE = {"class": "square", "count": 1}


def test_a_whole_line_is_read() -> None:
    clauses = read_clauses(
        {
            "tag": "position",
            "include": [CIRCLE, {"class": "square", "count": 2, "color": "red", "position": ["above", 0]}],
            "exclude": [{"class": "square", "count": 3}],
            "prompt": "a photo of two red squares above a circle",
        }
    )
    assert clauses.include == (
        Included(label="circle", count=1),
        Included(label="square", count=2, color="red", position=("above", 0)),
    )
    assert clauses.exclude == (Excluded(label="square", count=3),)
    assert clauses.wanted == {"circle": 1, "square": 2}


def test_items_of_one_class_in_two_colours_add_up() -> None:
    line = {"tag": "color_attr", "include": [CIRCLE | {"color": "red"}, CIRCLE | {"color": "blue", "count": 2}]}
    assert read_clauses(line).wanted == {"circle": 3}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"must hold `tag` and `include`, got \[\]: use a .jsonl prompt file, or another reward$"),
        ({"tag": "colours", "include": [CIRCLE]}, r"tag must be .*'colours': did you mean 'colors'\?"),
        ({"include": [CIRCLE]}, r"tag must be one of GenEval's six, got None"),
        ({"tag": "colors", "include": []}, r"include must name at least one class"),
        ({"tag": "colors", "include": CIRCLE}, r"include must be a list of clauses"),
        ({"tag": "colors", "include": ["circle"]}, r"include\[0\] must hold `class` and `count`, got 'circle'"),
        ({"tag": "colors", "include": [{"count": 1}]}, r"include\[0\]\.class must be a class's name, got None"),
        ({"tag": "colors", "include": [CIRCLE | {"colour": "red"}]}, r"key 'colour': did you mean 'color'\?"),
        ({"tag": "colors", "include": [CIRCLE | {"color": 3}]}, r"include\[0\]\.color must be .*, got 3"),
        ({"tag": "counting", "include": [CIRCLE | {"count": 0}]}, r"count must be a whole number .*, got 0"),
        ({"tag": "counting", "include": [CIRCLE | {"count": 2.0}]}, r"count must be a whole number .*, got 2\.0"),
        ({"tag": "counting", "include": [CIRCLE | {"count": True}]}, r"count must be a whole number .*, got True"),
        ({"tag": "counting", "include": [CIRCLE], "exclude": [CIRCLE]}, r"raise the excluded count to 2"),
        ({"tag": "counting", "include": [CIRCLE], "exclude": [SQUARE | {"color": "red"}]}, r"exclude\[0\] .*'color'"),
        ({"tag": "colors", "include": [CIRCLE | {"color": "red"}] * 2}, r"'circle' twice only with different colours"),
        ({"tag": "two_object", "include": [CIRCLE, CIRCLE]}, r"'circle' twice only with different colours"),
        (
            {"tag": "two_object", "include": [CIRCLE, CIRCLE | {"color": "red"}]},
            r"'circle' twice only with different colours",
        ),
        ({"tag": "position", "include": [CIRCLE, SQUARE | {"position": "above"}]}, r"must be \[relation, index\]"),
        ({"tag": "position", "include": [CIRCLE, SQUARE | {"position": ["left", 0]}]}, r"did you mean 'left of'\?"),
        ({"tag": "position", "include": [CIRCLE, SQUARE | {"position": ["above", 1]}]}, r"earlier item .* index 1"),
        ({"tag": "position", "include": [CIRCLE, SQUARE | {"position": ["above", -1]}]}, r"earlier item .* index -1"),
    ],
)
def test_a_malformed_line_is_refused_with_its_rule(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_clauses(metadata)

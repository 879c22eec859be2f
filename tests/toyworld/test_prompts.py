"""The prompt files have GenEval's form, are what the module writes, and do not overlap."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from toyworld.world import prompts
from toyworld.world.captions import Line, describe, draw_line, with_one_fact_wrong
from toyworld.world.scenes import relations, sample_scene
from toyworld.world.vocabulary import COLOURS, OPPOSITE, RELATIONS, SHAPES, TAGS

GENEVAL_COLOURS = {"red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"}


def read(split: str) -> list[Line]:
    """The lines of a shipped file."""
    text = (Path(prompts.FOLDER) / f"{split}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def meaning(line: Line) -> tuple:
    """What a line says, the same for two lines that mean the same."""
    things = [(item["class"], item["count"], item.get("color")) for item in line["include"]]
    if line["tag"] != "position":
        return (line["tag"], tuple(sorted(things, key=str)))
    relation, placed, other = line["include"][1]["position"][0], things[1][0], things[0][0]
    if placed > other:
        relation, placed, other = OPPOSITE[relation], other, placed
    return (line["tag"], placed, relation, other)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_files_are_what_the_command_writes(split: str) -> None:
    assert read(split) == prompts.lines(split)


def test_heldout_has_24_prompts_of_each_kind_and_no_text_comes_twice() -> None:
    heldout, train = read("heldout"), read("train")
    assert Counter(line["tag"] for line in heldout) == dict.fromkeys(TAGS, 24)
    assert Counter(line["tag"] for line in train) == {
        "single_object": 24,
        "two_object": 24,
        "counting": 48,
        "colors": 48,
        "position": 48,
        "color_attr": 48,
    }
    texts = [line["prompt"] for line in heldout + train]
    assert len(set(texts)) == len(texts) == 384


def test_every_line_has_genevals_form() -> None:
    for line in read("train") + read("heldout"):
        assert line["tag"] in TAGS
        assert set(line) == {"tag", "include", "prompt"} | ({"exclude"} if line["tag"] == "counting" else set())
        for index, item in enumerate(line["include"]):
            assert item["class"] in SHAPES
            assert item["count"] >= 1
            assert item.get("color", "red") in GENEVAL_COLOURS
            if "position" in item:
                relation, target = item["position"]
                assert relation in RELATIONS
                assert target == 0 != index
        if line["tag"] == "counting":
            (item,) = line["include"]
            assert line["exclude"] == [{"class": item["class"], "count": item["count"] + 1}]
        assert line["prompt"].endswith(describe(line["include"]))


@pytest.mark.parametrize("tag", ["colors", "position", "color_attr"])
def test_facts_are_disjoint_where_the_vocabulary_allows(tag: str) -> None:
    train, heldout = ({meaning(line) for line in read(split) if line["tag"] == tag} for split in ("train", "heldout"))
    assert train
    assert heldout
    assert not train & heldout


def test_two_object_holds_out_the_order_and_no_phrase_is_shared() -> None:
    train, heldout = read("train"), read("heldout")
    order = [
        {tuple(i["class"] for i in line["include"]) for line in s if line["tag"] == "two_object"}
        for s in (train, heldout)
    ]
    assert not order[0] & order[1]
    phrases = [{line["prompt"].removesuffix(describe(line["include"])) for line in lines} for lines in (train, heldout)]
    assert len(phrases[0]) == len(phrases[1]) == 8
    assert not phrases[0] & phrases[1]


def test_a_wrong_line_contradicts_the_right_one() -> None:
    rng = np.random.default_rng(3)
    for tag in TAGS:
        for _ in range(200):
            line = draw_line(rng, tag)
            wrong = with_one_fact_wrong(line, rng)
            assert meaning(wrong) != meaning(line)
            assert wrong["tag"] == line["tag"]


def test_scenes_satisfy_their_lines() -> None:
    rng = np.random.default_rng(4)
    for tag in TAGS:
        for _ in range(50):
            line = draw_line(rng, tag)
            shapes = sample_scene(line, rng).shapes
            wanted = [(i["class"], i.get("color")) for i in line["include"] for _ in range(i["count"])]
            assert [shape.label for shape in shapes] == [label for label, _ in wanted]
            assert all(color in (None, shape.color) for shape, (_, color) in zip(shapes, wanted, strict=True))
            assert {shape.color for shape in shapes} <= set(COLOURS)
            assert all(0 <= edge <= 32 for shape in shapes for edge in shape.box)
            if tag == "position":
                assert relations(shapes[1].box, shapes[0].box) == {line["include"][1]["position"][0]}


def test_relations_follow_genevals_rule_on_hand_worked_boxes() -> None:
    left, right = (0.0, 10.0, 10.0, 20.0), (20.0, 10.0, 30.0, 20.0)
    assert relations(left, right) == {"left of"}
    assert relations(right, left) == {"right of"}
    assert relations((0.0, 0.0, 10.0, 10.0), (20.0, 20.0, 30.0, 30.0)) == {"left of", "above"}
    assert relations((10.0, 0.0, 20.0, 10.0), (10.0, 1.9, 20.0, 11.9)) == set()
    assert relations((10.0, 0.0, 20.0, 10.0), (10.0, 5.0, 20.0, 15.0)) == {"above"}

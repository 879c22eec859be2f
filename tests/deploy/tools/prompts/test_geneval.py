"""GenEval training prompts: the published forms and shares, and none of the test prompts."""

import json
from collections import Counter

import pytest

from deploy.tools.prompts.geneval import CLASSES, SHARES, TASKS, TEST, geneval_prompts, is_test, quotas
from protocol.config.run import DataConfig
from protocol.ground.resources import resolve
from protocol.prompts import read_prompts
from rewards.geneval.clauses import TAGS, read_clauses

FORMS = {
    "single_object": "a photo of a bench",
    "two_object": "a photo of a bench and an umbrella",
    "counting": "a photo of two buses",
    "colors": "a photo of an orange skis",
    "position": "a photo of an elephant left of a hair drier",
    "color_attr": "a photo of a pink scissors and a yellow dog",
}
"""One prompt of each task by GenEval's forms."""


def test_the_six_tasks_have_the_published_shares():
    assert set(TASKS) == set(SHARES) == set(TAGS)
    assert len(set(CLASSES)) == 80
    assert tuple(SHARES) == ("position", "counting", "color_attr", "colors", "two_object", "single_object")
    assert tuple(quotas(50_000).values()) == (20588, 14706, 8824, 2941, 2941, 0)
    assert [sum(quotas(count).values()) for count in (1, 2, 17, 1001)] == [1, 2, 17, 1001]
    assert Counter(line["tag"] for line in geneval_prompts(170, seed=1)) == {
        "position": 70, "counting": 50, "color_attr": 30, "colors": 10, "two_object": 10,
    }  # fmt: skip


@pytest.mark.parametrize("tag", FORMS)
def test_every_task_makes_each_of_its_prompts_once_in_the_published_form(tag):
    size, make = TASKS[tag]
    step = max(1, size // 6000)  # of the half million of color_attr a hundredth
    made = [make(index)["prompt"] for index in range(0, size, step)]
    assert len(set(made)) == len(made)
    if step == 1:
        assert FORMS[tag] in made


def test_all_test_prompts_but_those_with_two_colours_are_among_what_the_tasks_could_make():
    """So the hashes are those of the published prompts: 553, of which 100 are of the task with two colours."""
    hashes = resolve(TEST).read_text().split()
    assert len(hashes) == len(set(hashes)) == 553
    found = {
        tag: sum(is_test(make(index)["prompt"]) for index in range(size))
        for tag, (size, make) in TASKS.items()
        if size < 10**5
    }
    assert found == {"single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100}


def test_lines_are_readable_repeatable_and_no_test_prompts():
    lines = geneval_prompts(3000, seed=0)
    assert lines == geneval_prompts(3000, seed=0) != geneval_prompts(3000, seed=1)
    assert not any(is_test(line["prompt"]) for line in lines)
    for line in lines[:200]:
        read_clauses(json.loads(json.dumps(line)))
    drawn = Counter(line["prompt"] for line in lines if line["tag"] == "counting")
    assert set(drawn.values()) <= {max(drawn.values()), max(drawn.values()) - 1}, "repeated equally often"


def test_the_command_writes_a_prompt_file(tmp_path, cli):
    out = tmp_path / "train.jsonl"
    assert f"data.train={out}  (34 prompts, " in cli.done("prompts", "geneval", "--count", "34", "--out", str(out))
    assert len(read_prompts(DataConfig(train=str(out), heldout=str(out)), str(out))) == 34
    for words, told in {
        ("geneval",): "--out must name a .jsonl file for `prompts geneval`, got None",
        ("geneval", "--out", str(tmp_path / "no" / "train.jsonl")): "no folder",
        ("genevall",): "unknown prompts 'genevall': did you mean 'geneval'",
        ("drawbench", "--out", str(out)): "--out belongs to `prompts geneval`, got it with drawbench",
    }.items():
        line = cli.refused("prompts", *words)
        assert told in line
    assert "drawbench" in cli.done("prompts")

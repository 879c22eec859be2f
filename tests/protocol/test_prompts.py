"""Prompt files: what a line may be, and which line is named when it is broken."""

import os
import re
from pathlib import Path

import pytest

from protocol.config.run import DataConfig
from protocol.errors import ConfigError, PromptError
from protocol.messages import Prompt
from protocol.prompts import overlap, read_prompts
from protocol.resources import resolve
from tests.support.paths import ROOT


def read(path: Path | str, *tags: str) -> list[Prompt]:
    return read_prompts(DataConfig(train=str(path), heldout="", tags=tags), str(path))


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_holds_a_prompt_a_line_and_blank_lines_count(tmp_path: Path) -> None:
    prompts = read(written(tmp_path, "a.txt", "a red circle \n\n  zwei blaue Würfel\n"))
    assert prompts == [Prompt(index=0, text="a red circle"), Prompt(index=2, text="zwei blaue Würfel")]


def test_prompts_without_a_negative_prompt_take_that_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "negative_prompt": ""}\n')
    (tmp_path / "p.txt").write_text("c\n")
    data = DataConfig(train="", heldout="", negative=" ")
    found = [each for name in ("p.jsonl", "p.txt") for each in read_prompts(data, str(tmp_path / name))]
    assert [each.negative for each in found] == [" ", "", " "]


def test_a_json_line_gives_prompt_negative_and_metadata(tmp_path: Path) -> None:
    line = '{"prompt": "a cat", "negative_prompt": "dog", "tag": "colors", "include": [{"class": "cat"}]}\n'
    (prompt,) = read(written(tmp_path, "a.jsonl", line))
    assert prompt == Prompt(
        index=0, text="a cat", negative="dog", metadata={"tag": "colors", "include": [{"class": "cat"}]}
    )


def test_tags_keep_only_their_prompts_with_the_line_as_index(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"prompt": "a", "tag": "x"}\n{"prompt": "b", "tag": "y"}\n{"prompt": "c"}\n')
    assert [(prompt.index, prompt.text) for prompt in read(path, "y")] == [(1, "b")]
    assert len(read(path)) == 3
    with pytest.raises(
        PromptError, match=r"at least one prompt with a tag in \['z'\], got none; data\.tags=\[\] takes every prompt$"
    ):
        read(path, "z")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "a line must be one JSON object"),
        ("[1, 2]", "a text under `prompt`"),
        ('{"text": "a"}', "a text under `prompt`"),
        ('{"prompt": 3}', "a text under `prompt`"),
        ('{"prompt": "  "}', "a text under `prompt`"),
        ('{"prompt": ' + "1" * 5000 + "}", "a line must be one JSON object"),
        ("[" * 100_000, "a line must be one JSON object"),
        ('{"prompt": "a \\ud800"}', "half a surrogate pair"),
        ('{"prompt": "a", "tag": "\\ud800"}', "half a surrogate pair"),
        ('{"prompt": "a", "negative_prompt": null}', "`negative_prompt` must be a text, got None"),
    ],
    ids=lambda text: text[:40],
)
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    path = written(tmp_path, "a.jsonl", '{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError, match=rf"a\.jsonl:2: .*{re.escape(reason)}"):
        read(path)


def test_a_line_separator_inside_a_json_text_does_not_break_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"prompt": "a\u2028b"}\n{"prompt": "c"}\n')
    assert [(prompt.index, prompt.text) for prompt in read(path)] == [(0, "a\u2028b"), (1, "c")]


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    assert [prompt.text for prompt in read(written(tmp_path, "a.txt", "\ufeffa cat\n"))] == ["a cat"]
    assert [prompt.text for prompt in read(written(tmp_path, "a.jsonl", '\ufeff{"prompt": "a cat"}\n'))] == ["a cat"]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PromptError, match="must hold at least one prompt, got none"):
        read(written(tmp_path, "a.txt", text))


def test_a_missing_a_binary_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="does not exist: name another one in data.train, data.heldout or --prompts"):
        read(tmp_path / "absent.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="cannot be read"):
        read(tmp_path / "binary.txt")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(PromptError, match="must be a regular file, since a run reads it more than once"):
            read(path)


def test_package_paths_lead_into_installed_packages(tmp_path: Path) -> None:
    assert resolve("pkg://protocol/config/run.py").samefile(ROOT / "protocol" / "config" / "run.py")
    assert resolve(str(tmp_path)) == tmp_path
    for path in ("pkg://not_installed_here/x", "pkg://", "pkg://../etc/passwd", "pkg://json.tool/x"):
        with pytest.raises(ConfigError, match="which is not installed"):
            resolve(path)


def test_the_form_is_told_by_content_and_not_by_the_name(tmp_path: Path) -> None:
    (json_line,) = read(written(tmp_path, "a.txt", '\n{"prompt": "a cat", "tag": "colors"}\n'))
    assert json_line == Prompt(index=1, text="a cat", metadata={"tag": "colors"})
    (text,) = read(written(tmp_path, "b.prompts", 'a sign "OPEN"\n'))
    assert text.text == 'a sign "OPEN"'
    assert read(written(tmp_path, "c.txt", "{ an odd prompt }\n"))[0].text == "{ an odd prompt }"


def test_a_file_that_changes_its_form_is_named_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"a\.txt:3: .*must be a prompt, got the JSON object"):
        read(written(tmp_path, "a.txt", 'a cat\na dog\n{"prompt": "a cow"}\n'))
    with pytest.raises(PromptError, match=r"b\.txt:2: a line must be one JSON object"):
        read(written(tmp_path, "b.txt", '{"prompt": "a cow"}\na cat\n'))
    with pytest.raises(PromptError, match=r"c\.jsonl:1: a line must be one JSON object"):
        read(written(tmp_path, "c.jsonl", "a cat\n"))
    with pytest.raises(PromptError, match=r"d\.txt:1: a prompt must be text, got a zero byte"):
        read(written(tmp_path, "d.txt", "a\x00b\n"))


@pytest.mark.parametrize(
    ("name", "scorer", "tags"),
    [("ocr", "ocr", None), ("general", "pickscore", None), ("geneval", None, 6)],
)
def test_shipped_prompt_sets_suit_their_reward_and_split_cleanly(
    name: str, scorer: str | None, tags: int | None
) -> None:
    from rewards.geneval.clauses import read_clauses
    from rewards.scorer import check_prompts

    suffix = "jsonl" if name == "geneval" else "txt"
    train, heldout = (read(f"pkg://deploy/prompts/{name}_{split}.{suffix}") for split in ("train", "heldout"))
    texts = [prompt.text for prompt in (*train, *heldout)]
    assert len(set(texts)) == len(texts), "no prompt twice, and none in both files"
    assert len(train) >= 2 * len(heldout) >= 60
    if scorer:
        check_prompts(scorer, {}, [*train, *heldout])
    else:
        assert len({prompt.metadata["tag"] for prompt in heldout}) == tags
        for prompt in (*train, *heldout):
            read_clauses(prompt.metadata)


def test_the_sign_prompts_suit_the_text_task_and_hold_other_words_out() -> None:
    from rewards.ocr.scorer import quoted_text

    train, heldout = (
        {quoted_text(prompt.text) for prompt in read(f"pkg://toyworld/prompts/signs_{split}.jsonl")}
        for split in ("train", "heldout")
    )
    assert len(train) == 108 and len(heldout) == 36 and not train & heldout
    for words in (train, heldout):
        assert {word[0] for word in words} == {word[1] for word in words} == set("ACEHKLNPRTUX")


@pytest.mark.parametrize(
    ("name", "text", "got"),
    [
        ("a.json", '["a cat", "a dog"]', "one JSON array over the whole file"),
        ("a.txt", '[\n  {"prompt": "a cat"},\n  {"prompt": "a dog"}\n]\n', "one JSON array over the whole file"),
        ("a.json", '{\n  "prompt": "a cat"\n}\n', "one JSON object over the whole file"),
        ("a.csv", "1,a cat\n2,a dog\n", "a table that begins with '1,a cat'"),
        ("a.txt", "id,Prompt\n1,a cat\n", "a table that begins with 'id,Prompt'"),
        ("a.tsv", "a cat\tred\n", "a table that begins with 'a cat"),
    ],
)
def test_what_is_no_list_of_lines_is_refused(tmp_path: Path, name: str, text: str, got: str) -> None:
    with pytest.raises(PromptError, match=re.escape("must hold one prompt on each line, as text or as a JSON")) as said:
        read(written(tmp_path, name, text))
    assert got in str(said.value)


def test_text_may_hold_brackets_commas_and_the_word_prompt(tmp_path: Path) -> None:
    text = "[a cat], a dog\n{braces\nprompt engineering, oil\n"
    assert len(read(written(tmp_path, "a.txt", text))) == 3


def test_shared_prompts_are_counted() -> None:
    a, b = Prompt(index=0, text="a"), Prompt(index=1, text="b")
    assert overlap([a], [b]) is None
    assert overlap([a, b], [b, b]) == "2 of 2 held-out prompts are trained on too, such as 'b'"

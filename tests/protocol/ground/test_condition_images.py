"""Condition images: what a line of a prompt file may name, and which pixels a reader sees."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protocol.config.run import DataConfig
from protocol.errors import PromptError
from protocol.ground import condition_images
from protocol.ground.condition_images import read_condition
from protocol.messages import ConditionImage, Prompt
from protocol.prompts import overlap, read_prompts

RAMP = np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3)


def read(folder: Path, **line: Any) -> Prompt:
    path = folder / "edits.jsonl"
    path.write_text('{"prompt": "first"}\n' + json.dumps({"prompt": "make it red", **line}) + "\n")
    return read_prompts(DataConfig(train=str(path), heldout=""), str(path))[1]


def test_a_line_names_one_image_or_several_from_the_folder_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.fromarray(RAMP).save(tmp_path / "images" / "a.png")
    Image.fromarray(RAMP[:8]).save(tmp_path / "b.webp", lossless=True)
    one = read(tmp_path, image="images/a.png", tag="color")
    sha256 = hashlib.sha256((tmp_path / "images" / "a.png").read_bytes()).hexdigest()
    assert one.conditions == (ConditionImage(path=str(tmp_path / "images" / "a.png"), sha256=sha256),)
    assert one.metadata == {"tag": "color"}
    two = read(tmp_path, images=["b.webp", str(tmp_path / "images" / "a.png")])
    assert [read_condition(each).shape for each in two.conditions] == [(8, 24, 3), (16, 24, 3)]
    np.testing.assert_array_equal(read_condition(two.conditions[1]), RAMP)


def test_pixels_are_turned_as_exif_says_and_have_no_alpha(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 270 degrees
    rgba = np.dstack([RAMP, np.zeros((16, 24), np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_condition(read(tmp_path, image="a.png").conditions[0]), np.rot90(RAMP, -1))


def test_one_instruction_for_two_images_is_two_prompts(tmp_path: Path) -> None:
    prompts = []
    for number in range(2):
        Image.fromarray(RAMP[number:]).save(tmp_path / f"{number}.png")
        prompts.append(read(tmp_path, image=f"{number}.png"))
    assert overlap(prompts[:1], prompts[1:]) is None
    assert "1 of 2" in str(overlap(prompts[:1], prompts))


def test_an_image_that_changes_after_the_prompts_were_read_is_refused(tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "a.png")
    (condition,) = read(tmp_path, image="a.png").conditions
    Image.fromarray(RAMP[::-1]).save(tmp_path / "a.png")
    with pytest.raises(PromptError, match=r"a\.png must not change during a run"):
        read_condition(condition)
    assert read(tmp_path, image="a.png").conditions != (condition,)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"image": "absent.png"}, "absent.png cannot be read: No such file"),
        ({"image": "https://host/a.png"}, "got https://host/a.png: fetch it by `flowcredit prompts "),
        ({"image": 3}, "`image` must be a path, or `images` a list of paths, got [3]"),
        ({"images": []}, "got [[]]"),
        ({"image": "whole.png", "images": ["whole.png"]}, "got ['whole.png', ['whole.png']]"),
        ({"image": "half.png"}, "half.png must be a whole PNG, JPEG or WebP file"),
        ({"image": "text.png"}, "text.png must be a whole PNG, JPEG or WebP file"),
        ({"image": "moving.webp"}, "moving.webp must be one image, got 2 frames"),
        ({"image": "deep.png"}, "deep.png must have 8 bits a channel, got mode I;16"),
        ({"image": "long.png"}, "long.png must have sides of a ratio of at most 8, got 9 x 1"),
        ({"image": "large.png"}, "large.png must have at most 400 pixels, got 25 x 17"),
    ],
    ids=str,
)
def test_a_line_whose_image_cannot_be_used_is_named(
    tmp_path: Path, line: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condition_images, "MOST_PIXELS", 400)
    Image.fromarray(RAMP).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:90])
    (tmp_path / "text.png").write_text("no image")
    frames = [Image.fromarray(RAMP), Image.fromarray(RAMP[::-1])]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:])
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "deep.png")
    Image.new("L", (9, 1)).save(tmp_path / "long.png")
    Image.new("L", (25, 17)).save(tmp_path / "large.png")
    with pytest.raises(PromptError, match=rf"edits\.jsonl:2: .*{re.escape(reason)}"):
        read(tmp_path, **line)

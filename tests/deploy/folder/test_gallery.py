"""The images that people look at."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from deploy.folder.gallery import before_after_text, read_gallery, side_by_side, write_before_after, write_gallery
from deploy.folder.heldout import read_heldout, write_heldout
from deploy.folder.run_folder import open_run_folder
from deploy.monitor.journal import RunJournal
from deploy.monitor.progress import Progress
from learner.loop.evaluate import Evaluation
from protocol.config.run import EvaluationConfig
from protocol.ground.condition_images import condition_of
from protocol.messages import Prompt


def evaluation(shade: int, reading: float) -> Evaluation:
    image = np.full((32, 32, 3), shade, np.uint8)
    gallery = tuple((Prompt(index=i, text=f"a red circle {i}"), image, reading) for i in range(5))
    return Evaluation(score=0.5, by_tag={"colors": 0.5}, missing=0, images=5, gallery=gallery)


def test_before_and_after_stand_side_by_side_with_the_colour_of_their_verdict(tmp_path):
    write_gallery(tmp_path, 0, evaluation(10, 0.0))
    write_gallery(tmp_path, 40, evaluation(200, 1.0))
    path = write_before_after(tmp_path, first=0, last=40)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    counts = {shade: int((pixels == shade).all(1).sum()) for shade in (10, 200)}
    assert counts[10] > 5_000
    assert abs(counts[10] - counts[200]) < 0.02 * counts[10]
    for frame in ((0xC6, 0x28, 0x28), (0x2E, 0x7D, 0x32)):
        assert (pixels == frame).all(1).sum() > 100


def test_the_largest_rise_comes_first_and_the_largest_fall_last(tmp_path):
    for iteration, readings in ((0, (1.0, 0.5, 0.0)), (40, (0.0, 0.5, 1.0))):
        held = zip((10, 100, 200), readings, strict=True)
        gallery = tuple(
            (Prompt(index=i, text=f"a circle {i}"), np.full((32, 32, 3), shade, np.uint8), reading)
            for i, (shade, reading) in enumerate(held)
        )
        write_gallery(tmp_path, iteration, replace(evaluation(0, 0.0), gallery=gallery))
    pixels = np.asarray(Image.open(write_before_after(tmp_path, first=0, last=40)).convert("RGB"))
    fell, stayed, rose = (np.nonzero((pixels == shade).all(2))[1].mean() for shade in (10, 100, 200))
    assert rose < stayed < fell


def test_the_image_to_edit_is_on_the_left_and_the_wanted_one_on_the_right(tmp_path):
    """Another size is padded, and two prompts of one text stay two; a prompt without an image has a white one."""
    Image.fromarray(np.full((16, 32, 3), 60, np.uint8)).save(tmp_path / "wide.png")
    named = condition_of(tmp_path / "wide.png")
    prompts = (
        Prompt(index=0, text="make it dark", conditions=(named, named), wanted=named),
        Prompt(index=1, text="make it dark"),
    )
    for iteration, shade in ((0, 120), (9, 200)):
        gallery = tuple((prompt, np.full((32, 32, 3), shade, np.uint8), 1.0) for prompt in prompts)
        write_gallery(tmp_path, iteration, replace(evaluation(0, 0.0), gallery=gallery))
    first, second = read_gallery(tmp_path, 9).items()
    assert (first[0], second[0]) == ("make it dark", "make it dark (2)")
    assert first[1].condition[[0, 16], 0, 0].tolist() == [255, 60]
    assert first[1].wanted[16, 16, 0] == 60 and (second[1].wanted == 255).all()
    assert side_by_side(first[1])[16, [1, 40, 75], 0].tolist() == [60, 200, 60]
    pixels = np.asarray(Image.open(write_before_after(tmp_path, first=0, last=9)).convert("RGB"))
    columns = [np.unique(np.nonzero((pixels == shade).all(2))[1]) for shade in (60, 120, 200)]
    edited = columns[0][columns[0] < columns[1].min()]
    assert len(edited) and columns[1].min() < columns[2].min() < columns[0].max()


def test_no_partial_image_is_left(tmp_path):
    write_gallery(tmp_path, 3, evaluation(10, float("nan")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_000003.npz", "iteration_000003.png"]


def test_galleries_of_different_size_are_paired_by_prompt(tmp_path):
    few = evaluation(10, 0.0)
    write_gallery(tmp_path, 0, replace(few, gallery=few.gallery[:2]))
    write_gallery(tmp_path, 9, evaluation(200, 1.0))
    width, height = Image.open(write_before_after(tmp_path, first=0, last=9)).size
    assert width > 2 * height


def test_scores_that_are_no_verdicts_have_no_colour_of_right_and_wrong(tmp_path):
    write_gallery(tmp_path, 0, evaluation(10, 0.5))
    write_gallery(tmp_path, 40, evaluation(200, 1.0))
    path = write_before_after(tmp_path, first=0, last=40)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    for frame in ((0xC6, 0x28, 0x28), (0x2E, 0x7D, 0x32)):
        assert not (pixels == frame).all(1).any()


def test_a_prompt_is_drawn_as_it_stands_and_not_read_as_a_formula(tmp_path):
    held = evaluation(10, 1.0)
    prompt = Prompt(index=0, text='a neon sign "$ave $$$" or $\\frac{')
    held = replace(held, gallery=((prompt, *held.gallery[0][1:]), *held.gallery[1:]))
    for iteration in (0, 9):
        write_gallery(tmp_path, iteration, held)
    assert write_before_after(tmp_path, first=0, last=9).is_file()


def test_a_damaged_gallery_is_told(tmp_path):
    write_gallery(tmp_path, 0, evaluation(10, 1.0))
    path = tmp_path / "iteration_000000.npz"
    whole = path.read_bytes()
    assert len(read_gallery(tmp_path, 0)) == 5
    for damaged in (b"", b"damaged", whole[:500], whole[:-30], whole.replace(b"prompts", b"PROMPTS")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="iteration_000000.npz cannot be read"):
            read_gallery(tmp_path, 0)
    with pytest.raises(ValueError, match="iteration_000007.npz cannot be read"):
        read_gallery(tmp_path, 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((2, 8, 8, 3))},
        {"images": np.zeros((2, 8, 8), np.uint8)},
        {"images": np.zeros((2, 0, 8, 3), np.uint8)},
        {"images": np.zeros((1, 8, 8, 3), np.uint8)},
        {"readings": np.array(["x", "y"])},
        {"readings": np.zeros(3)},
        {"prompts": np.array([["a"], ["b"]])},
    ],
    ids=lambda changes: ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in changes.items()),
)
def test_a_gallery_of_something_else_is_told(tmp_path, changes):
    held = {"prompts": np.array(["a", "b"]), "images": np.zeros((2, 8, 8, 3), np.uint8), "readings": np.zeros(2)}
    np.savez(tmp_path / "iteration_000000.npz", **held)
    assert list(read_gallery(tmp_path, 0)) == ["a", "b"]
    np.savez(tmp_path / "iteration_000000.npz", **(held | changes))
    with pytest.raises(ValueError, match="must hold a prompt, an image and a reading"):
        read_gallery(tmp_path, 0)


def test_an_evaluation_whose_images_cannot_be_drawn_keeps_its_score(tiny_config, tmp_path):
    held = evaluation(10, 1.0)
    run = open_run_folder(tmp_path / "run", tiny_config())
    journal = RunJournal(run, Progress())
    asyncio.run(journal.evaluated(0, replace(held, gallery=())))
    asyncio.run(journal.evaluated(1, held))
    run.close()
    assert run.evaluation_scores() == {0: 0.5, 1: 0.5}
    said = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [(line["type"], line["holds"], line["reason"]) for line in said] == [
        ("GalleryWritten", False, "DrawingFailed"),
        ("GalleryWritten", True, "Written"),
    ]


def test_the_title_says_what_all_images_score_and_that_diversity_fell(tmp_path):
    """Eight images of two prompts: one right before, three after; the first of a prompt is wrong, then right."""
    (tmp_path / "gallery").mkdir()
    prompts = tuple(Prompt(index=i, text=f"a circle {i}") for i in range(2))
    for iteration, scores, diversity in ((0, [[0, 1, 0, 0], [0] * 4], 0.5), (9, [[1, 0, 1, 0], [1, 0, 0, 0]], 0.2)):
        tables = {"score": np.array(scores, float), "diversity": np.full((2, 4), diversity)}
        gallery = tuple(
            (p, np.zeros((8, 8, 3), np.uint8), float(np.mean(row))) for p, row in zip(prompts, scores, strict=True)
        )
        found = replace(evaluation(0, 0.0), gallery=gallery, prompts=prompts, by_image=tables)
        write_gallery(tmp_path / "gallery", iteration, found)
        write_heldout(tmp_path / "gallery", iteration, found, EvaluationConfig())
    held, both = read_heldout(tmp_path), [[0.25, 0.5], [0.0, 0.25]]
    said = before_after_text(held, both, first=0, last=9, diversity="diversity")
    assert said == "score of all 8 images: 0.125 → 0.375; diversity falls: 0.500 → 0.200"
    one = before_after_text(held, both[:1], first=0, last=9, diversity=None)
    assert one == "mean of the 1 shown: 0.250 → 0.500; score of all 8 images: 0.125 → 0.375"
    assert write_before_after(tmp_path / "gallery", first=0, last=9, diversity="diversity").is_file()


def test_many_prompts_stay_one_sheet(tmp_path):
    """48 pairs have eight columns, so the sheet is wider than high."""
    many = tuple((Prompt(index=i, text=f"p{i}"), np.zeros((8, 8, 3), np.uint8), 1.0) for i in range(48))
    for iteration in (0, 9):
        write_gallery(tmp_path, iteration, replace(evaluation(0, 0.0), gallery=many))
    width, height = Image.open(write_before_after(tmp_path, first=0, last=9)).size
    assert width > 2 * height

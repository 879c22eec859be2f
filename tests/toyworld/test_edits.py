"""Toy edits: prompt files that are disjoint, scenes that hold what they ask for, and a scorer with worked numbers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console

from benchmarks.pretraining import editor, training
from benchmarks.pretraining import edits as recipe
from protocol.config.run import DataConfig
from protocol.errors import PromptError
from protocol.prompts import read_prompts
from tests.support.killed_console import KilledConsole
from tests.support.paths import ROOT
from toyworld.world import edits
from toyworld.world.detector import ShapeDetector
from toyworld.world.edit_scorer import EditVerdict, ShapesEdit, judge
from toyworld.world.edits import Edit, draw_edit, draw_example
from toyworld.world.scenes import Scene, Shape, render
from toyworld.world.vocabulary import GROUND, PALETTE

CIRCLE = Shape(label="circle", color="blue", rgb=PALETTE["blue"], center=(9.0, 9.0), radius=5.0)
SQUARE = Shape(label="square", color="red", rgb=PALETTE["red"], center=(23.0, 23.0), radius=5.0)
BOTH = Scene(shapes=(CIRCLE, SQUARE))


def judged(edit: Edit, *after: Shape, before: Scene = BOTH) -> EditVerdict | None:
    """The verdict on an image of these shapes."""
    images = [render(before), render(Scene(shapes=after))]
    shapes, found = ShapeDetector().detect(np.stack(images))
    return judge(edit, *images, shapes_before=shapes, shapes_after=found)


def recoloured(shape: Shape, color: str) -> Shape:
    return replace(shape, color=color, rgb=PALETTE[color])


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_files_are_what_the_command_writes(split: str) -> None:
    path = str(edits.FOLDER / f"edit_{split}.jsonl")
    made = edits.lines(split)
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == [line for line, _ in made]
    for line, example in made:
        assert np.array_equal(np.asarray(Image.open(edits.FOLDER / line["image"])), render(example.before))
    read = read_prompts(DataConfig(train=path, heldout=path), path)
    ShapesEdit.check(read)
    assert all(len(prompt.conditions) == 1 and bool(prompt.wanted) == (split == "heldout") for prompt in read)


def test_no_instruction_and_no_fact_is_in_both_files() -> None:
    train, heldout = edits.lines("train"), edits.lines("heldout")
    assert Counter(line["tag"] for line, _ in train) == dict.fromkeys(edits.KINDS, 36)
    assert Counter(line["tag"] for line, _ in heldout) == dict.fromkeys(edits.KINDS, 12)
    texts = [{line["prompt"] for line, _ in lines} for lines in (train, heldout)]
    assert not texts[0] & texts[1] and list(map(len, texts)) == [144, 48]
    for kind in edits.KINDS:
        trained, held = (
            {example.edit for _, example in lines if example.edit.kind == kind} for lines in (train, heldout)
        )
        assert trained and held and not trained & held


def test_wanted_scenes_follow_their_instructions_exactly_and_doing_nothing_follows_none() -> None:
    rng = np.random.default_rng(2)
    for kind in edits.KINDS:
        for _ in range(30):
            example = draw_example(draw_edit(rng, kind), rng)
            verdict = judged(example.edit, *example.wanted.shapes, before=example.before)
            assert verdict is not None and (verdict.followed, verdict.exact) == (1, 1) and verdict.over_edit < 0.02
            assert judged(example.edit, *example.before.shapes, before=example.before) == (0, 0, 0)


def test_a_recoloured_shape_of_another_class_follows_half_and_a_bystander_that_vanished_is_over_editing() -> None:
    edit = Edit(kind="color", label="circle", was="blue", color="green")
    assert judged(edit, recoloured(CIRCLE, "green"), SQUARE) == (1, 0, 1)
    assert judged(edit, replace(recoloured(CIRCLE, "green"), label="square"), SQUARE) == (0.5, 0, 0)
    assert judged(edit, recoloured(CIRCLE, "yellow"), SQUARE) == (0, 0, 0)
    assert judged(edit, recoloured(CIRCLE, "green")) == (1, 1, 0)  # every pixel of the only other shape changed


def test_a_bystander_that_moves_by_half_its_width_counts_by_its_pixels() -> None:
    """The square of 9 x 9 pixels moves 4 to the left: 36 pixels are ground now, and 36 of the ground are red."""
    square = replace(SQUARE, radius=9 / 2 / 0.8862, center=(23.5, 23.5))
    moved = replace(square, center=(19.5, 23.5))
    before = Scene(shapes=(CIRCLE, square))
    verdict = judged(Edit(kind="remove", label="circle", was="blue"), moved, before=before)
    assert verdict == pytest.approx((1, 72 / (81 + 36), 0))


def test_a_half_removed_shape_is_half_removed() -> None:
    before = render(BOTH)
    after = before.copy()
    after[:, :9] = GROUND
    shapes, found = ShapeDetector().detect(np.stack([before, after]))
    verdict = judge(
        Edit(kind="remove", label="circle", was="blue"), before, after, shapes_before=shapes, shapes_after=found
    )
    assert verdict == pytest.approx((0.5, 0, 0), abs=0.01)


def test_an_added_shape_has_three_facts_and_a_second_one_is_over_editing() -> None:
    edit = Edit(kind="add", label="triangle", color="green", side="right")
    wanted = Shape(label="triangle", color="green", rgb=PALETTE["green"], center=(25.0, 14.0), radius=4.5)
    square = replace(SQUARE, center=(12.0, 24.0))
    before = Scene(shapes=(square,))
    for after, followed in (
        (wanted, 1),
        (recoloured(wanted, "blue"), 2 / 3),
        (replace(wanted, label="circle"), 2 / 3),
        (replace(recoloured(wanted, "blue"), center=(7.0, 9.0)), 1 / 3),
    ):
        assert judged(edit, square, after, before=before) == pytest.approx((followed, 0, float(followed == 1)))
    second = replace(wanted, label="circle", center=(8.0, 8.0))
    verdict = judged(edit, square, wanted, second, before=before)
    assert verdict is not None and verdict.followed == 1 and verdict.over_edit > 0.3 and not verdict.exact


def test_the_score_is_what_was_followed_times_what_was_kept() -> None:
    scorer = ShapesEdit()
    line = Edit(kind="color", label="circle", was="blue", color="green").metadata()
    images = np.stack([render(Scene(shapes=(recoloured(CIRCLE, "green"), SQUARE))), render(BOTH)])
    scores = scorer.score(images, ["make the circle green"] * 2, [line] * 2, [[render(BOTH)]] * 2)
    assert scores.values.tolist() == [1, 0] and scores.components["exact"].tolist() == [1, 0]
    none = scorer.score(images[:1], ["x"], [line], [[render(Scene(shapes=(SQUARE,)))]])
    assert not none.valid[0] and "condition image" in none.reasons[0]


def test_a_line_of_another_task_is_refused() -> None:
    with pytest.raises(PromptError, match="'tag': 'color', 'class': 'circle', 'was': None, 'color': None"):
        Edit.of({"tag": "color", "class": "circle"})


def test_pairs_come_from_their_seed_and_an_edit_too_much_leaves_all_other_shapes() -> None:
    pairs, again = recipe.draw_pairs(300, seed=3), recipe.draw_pairs(300, seed=3)
    assert np.array_equal(pairs.after, again.after) and pairs.instructions == again.instructions
    rng = np.random.default_rng(4)
    example = draw_example(Edit(kind="remove", label="circle", was="blue"), rng)
    assert {other.label for other in recipe.others(example.edit, example.before)} <= {"square", "triangle"}
    more = recipe.with_one_shape_more(example.edit, example.wanted, rng)
    assert len(set(more.shapes) & set(example.wanted.shapes)) == len(example.wanted.shapes) - 1


def test_every_word_is_one_token_for_both_encoders_and_the_longest_instruction_fits() -> None:
    longest = "replace the yellow triangle by a square"
    _, t5 = editor.both_ids([longest, "set a yellow triangle on the right"])
    assert t5.shape == (2, editor.MAX_SEQUENCE_LENGTH)
    assert (t5 != 0).sum(1).tolist() == [8, 8]
    built = editor.t5_tokenizer()
    assert all(len(built.tokenize(word)) == 1 for word in edits.words())
    assert all(len(editor.clip_tokenizer().tokenize(word)) == 1 for word in edits.words())
    assert built.decode(t5[0], skip_special_tokens=True) == longest


@pytest.mark.whole
def test_the_recipe_makes_a_pipeline_that_diffusers_loads_and_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FluxKontextPipeline

    monkeypatch.setattr(editor, "BATCH", 4)
    monkeypatch.setattr(training, "SAVE_EVERY_S", 0.0)
    written = recipe.EditRecipe(pairs=256, steps=2)

    def pretrain(name: str, console: Console, wanted: recipe.EditRecipe = written) -> None:
        recipe.pretrain(
            wanted,
            work=tmp_path / f"{name}_work",
            folder=tmp_path / name,
            shapes=ROOT / "toyworld/model",
            console=console,
        )

    pretrain("whole", Console(quiet=True))
    with pytest.raises(KeyboardInterrupt):
        pretrain("killed", KilledConsole("editor: step 2/2"))
    pretrain("killed", Console(quiet=True))
    whole, resumed = (FluxKontextPipeline.from_pretrained(tmp_path / name) for name in ("whole", "killed"))
    for part in ("transformer", "text_encoder", "text_encoder_2"):
        one, other = (getattr(pipe, part).state_dict() for pipe in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(typer.BadParameter, match="steps must stay 2"):
        pretrain("whole", Console(quiet=True), written.model_copy(update={"steps": 3}))

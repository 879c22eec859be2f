"""The recipe of the toy editor: `python -m benchmarks.pretraining.edits`.

It draws pairs of images with instructions from the seed, encodes them with the autoencoder of the shapes' pipeline, and
trains the editor. It writes a checkpoint every minute; after a kill, the same command continues and ends with the same
weights. The shipped weights had 2,600 of their steps with instructions that did not name the edited shape's colour.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline
from jaxtyping import UInt8
from pydantic import Field
from rich.console import Console

from benchmarks.pretraining import autoencoder, editor
from benchmarks.pretraining.export import SHIFT, TOYWORLD, replacing
from benchmarks.pretraining.training import Recipe, Stage, Threads, Words
from benchmarks.pretraining.transformer import LATENT_SIZE
from toyworld.world.edits import HELDOUT_PHRASES, KINDS, TRAIN_PHRASES, Edit, applied, draw_edit, draw_example, facts
from toyworld.world.scenes import Scene, fits, render

WRONG_SHARE = 0.1
"""Share of pairs whose instruction asks for another edit than the one that was made."""
OVER_SHARE = 0.2
"""Share of pairs in which one more shape was changed, so that the editor changes too much."""


class EditRecipe(Recipe):
    """Sizes and steps."""

    pairs: int = Field(default=12_000, ge=256)
    """Pairs of images in the pretraining set."""
    steps: int = Field(default=5_600, ge=1)
    """Optimizer steps of transformer and text encoders, batch 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Images before and after edits with the instructions; made by `draw_pairs`."""

    before: UInt8[np.ndarray, "B H W 3"]
    after: UInt8[np.ndarray, "B H W 3"]
    instructions: list[str]


def draw_pairs(count: int, *, seed: int) -> Pairs:
    """Draw `count` pairs from a seed; WRONG_SHARE of the instructions and OVER_SHARE of the edits are wrong."""
    rng = np.random.default_rng(seed)
    before, after, instructions = [], [], []
    for _ in range(count):
        example = draw_example(draw_edit(rng), rng)
        wrong = others(example.edit, example.before)
        said = wrong[int(rng.integers(len(wrong)))] if rng.random() < WRONG_SHARE else example.edit
        phrases = TRAIN_PHRASES[said.kind] + HELDOUT_PHRASES[said.kind]
        before.append(render(example.before))
        is_over = rng.random() < OVER_SHARE
        after.append(render(with_one_shape_more(example.edit, example.wanted, rng) if is_over else example.wanted))
        instructions.append(said.instruction(str(rng.choice(phrases))))
    return Pairs(before=np.stack(before), after=np.stack(after), instructions=instructions)


def others(edit: Edit, before: Scene) -> list[Edit]:
    """Return the other edits of the same kind that a scene allows."""
    return [other for other in facts(edit.kind) if other != edit and _is_possible(other, before)]


def with_one_shape_more(edit: Edit, wanted: Scene, rng: np.random.Generator) -> Scene:
    """Return the wanted scene with one more shape changed; the same scene if no such change fits."""
    more = [
        applied(other, wanted)
        for kind in KINDS
        if kind != "add"
        for other in facts(kind)
        if other.label not in (edit.label, edit.to) and _is_possible(other, wanted)
    ]
    fitting = [scene for scene in more if fits(scene)]
    return fitting[int(rng.integers(len(fitting)))] if fitting else wanted


def _is_possible(edit: Edit, scene: Scene) -> bool:
    colours = {shape.label: shape.color for shape in scene.shapes}
    if edit.kind == "add":
        return edit.label not in colours
    return colours.get(edit.label) == edit.was and edit.to not in colours


def pretrain(recipe: EditRecipe, *, work: Path, folder: Path, shapes: Path, console: Console) -> None:
    """Train the editor and write the pipeline.

    Args:
        recipe: seed and sizes.
        work: folder of the checkpoint; it is created, or training continues from it.
        folder: path of the pipeline; an older one is replaced.
        shapes: the shapes' pipeline, whose autoencoder the editor has.
        console: receives the progress.

    Raises:
        typer.BadParameter: the work folder belongs to another recipe.
    """
    recipe.claim(work)
    console.print(f"drawing {recipe.pairs} pairs")
    pairs = draw_pairs(recipe.pairs, seed=recipe.seed)
    vae = AutoencoderTiny.from_pretrained(shapes / "vae", dtype=torch.float32)
    console.print("encoding them")
    conditions, latents = (autoencoder.normalised_latents(vae, images) for images in (pairs.before, pairs.after))
    stage = Stage(name="editor", steps=recipe.steps, seed=recipe.seed, folder=work, console=console)
    model = editor.train(conditions, latents, pairs.instructions, stage)
    write_pipeline(vae, model, folder)
    console.print(f"pipeline written to {folder}")


def write_pipeline(vae: AutoencoderTiny, model: editor.Editor, folder: Path) -> None:
    """Save the pipeline as `folder` in float16, and replace an older one; `FluxKontextPipeline` loads it."""
    model.transformer.register_to_config(sample_size=LATENT_SIZE)  # as SD3's: the size that it was trained for
    parts: dict[str, Any] = {
        "transformer": model.transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        "vae": vae,
        "text_encoder": model.text_encoder,
        "tokenizer": editor.clip_tokenizer(),
        "text_encoder_2": model.text_encoder_2,
        "tokenizer_2": editor.t5_tokenizer(),
    }
    pipeline = FluxKontextPipeline(**parts)
    with replacing(folder) as partial:
        pipeline.to(torch.float16).save_pretrained(partial, safe_serialization=True)
    pipeline.to(torch.float32)


def main(
    words: Words = None,
    work: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("runs/edits"),
    folder: Annotated[Path, typer.Option(help="Folder of the pipeline.")] = TOYWORLD / "edit_model",
    shapes: Annotated[Path, typer.Option(help="Pipeline whose autoencoder is used.")] = TOYWORLD / "model",
    threads: Threads = 2,
) -> None:
    """Pretrain the toy editor; continue from the checkpoint of the work folder if there is one."""
    torch.set_num_threads(threads)
    pretrain(EditRecipe.of(words or ()), work=work, folder=folder, shapes=shapes, console=Console())


if __name__ == "__main__":
    typer.run(main)

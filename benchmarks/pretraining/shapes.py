"""The recipe that made the shipped model and CLIP: `python -m benchmarks.pretraining.shapes`.

It draws the pretraining set from the seed, then trains autoencoder, velocity model and CLIP one after the other. Each
stage writes a checkpoint every minute; after a kill, the same command continues and ends with the same weights.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import Field
from rich.console import Console

from benchmarks.pretraining import autoencoder, clip, transformer
from benchmarks.pretraining.dataset import draw_examples
from benchmarks.pretraining.export import TOYWORLD, write_pipeline
from benchmarks.pretraining.training import Recipe, Stage, Threads, Words


class ShapeRecipe(Recipe):
    """Sizes and steps."""

    images: int = Field(default=40_000, ge=256)
    """Images in the pretraining set."""
    autoencoder_steps: int = Field(default=2_400, ge=1)
    """Optimizer steps of the autoencoder, batch 64."""
    transformer_steps: int = Field(default=7_600, ge=1)
    """Optimizer steps of transformer and text encoders, batch 128."""
    clip_steps: int = Field(default=1_500, ge=1)
    """Optimizer steps of the CLIP, batch 128."""


def pretrain(recipe: ShapeRecipe, *, work: Path, model_folder: Path, clip_folder: Path, console: Console) -> None:
    """Train all parts and write the pipeline and the CLIP.

    Args:
        recipe: seed and sizes.
        work: folder of the stages' checkpoints; it is created, or training continues from it.
        model_folder: path of the Stable-Diffusion-3 pipeline; an older one is replaced.
        clip_folder: path of the CLIP; an older one is replaced.
        console: receives the progress.

    Raises:
        typer.BadParameter: the work folder belongs to another recipe.
    """
    recipe.claim(work)
    stage = partial(Stage, seed=recipe.seed, folder=work, console=console)
    console.print(f"drawing {recipe.images} images")
    examples = draw_examples(recipe.images, seed=recipe.seed)
    vae = autoencoder.train(examples.images, stage(name="autoencoder", steps=recipe.autoencoder_steps))
    latents = autoencoder.normalised_latents(vae, examples.images)
    model = transformer.train(latents, examples.captions, stage(name="transformer", steps=recipe.transformer_steps))
    write_pipeline(vae, model, model_folder)
    console.print(f"pipeline written to {model_folder}")
    clip.write(clip.train(examples, stage(name="clip", steps=recipe.clip_steps)), clip_folder)
    console.print(f"CLIP written to {clip_folder}")


def main(
    words: Words = None,
    work: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/toyworld"),
    model_folder: Annotated[Path, typer.Option(help="Folder of the pipeline.")] = TOYWORLD / "model",
    clip_folder: Annotated[Path, typer.Option(help="Folder of the CLIP.")] = TOYWORLD / "clip",
    threads: Threads = 2,
) -> None:
    """Pretrain the toy world's pipeline and CLIP; continue from the checkpoints of the work folder if there are any."""
    torch.set_num_threads(threads)
    recipe = ShapeRecipe.of(words or ())
    pretrain(recipe, work=work, model_folder=model_folder, clip_folder=clip_folder, console=Console())


if __name__ == "__main__":
    typer.run(main)

"""The recipe that made the shipped model and CLIP: `python -m benchmarks.pretraining.shapes`.

It draws the pretraining set from the seed, then trains autoencoder, velocity model and CLIP one after the other. Each
stage writes a checkpoint every minute; after a kill, the same command continues and ends with the same weights.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from benchmarks.pretraining import autoencoder, clip, transformer
from benchmarks.pretraining.dataset import draw_examples
from benchmarks.pretraining.export import TOYWORLD, write_pipeline


class Recipe(BaseModel):
    """The settings that decide the weights; a work folder keeps its recipe and refuses any other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    """Seed of images, captions, weights, batches and noise."""
    images: int = Field(default=40_000, ge=256)
    """Images in the pretraining set."""
    autoencoder_steps: int = Field(default=2_400, ge=1)
    """Optimizer steps of the autoencoder, batch 64."""
    transformer_steps: int = Field(default=7_600, ge=1)
    """Optimizer steps of transformer and text encoders, batch 128."""
    clip_steps: int = Field(default=1_500, ge=1)
    """Optimizer steps of the CLIP, batch 128."""


def pretrain(recipe: Recipe, *, work: Path, model_folder: Path, clip_folder: Path, console: Console) -> None:
    """Train all parts and write the pipeline and the CLIP.

    Args:
        recipe: seed and sizes.
        work: folder of the stages' checkpoints; it is created, or training continues from it.
        model_folder: path of the Stable-Diffusion-3 pipeline; an older one is replaced.
        clip_folder: path of the CLIP; an older one is replaced.
        console: receives the progress.

    Raises:
        ValueError: the work folder belongs to another recipe.
    """
    claim(work, recipe)
    console.print(f"drawing {recipe.images} images")
    examples = draw_examples(recipe.images, seed=recipe.seed)
    vae = autoencoder.train(
        examples.images, steps=recipe.autoencoder_steps, seed=recipe.seed, folder=work, console=console
    )
    latents = autoencoder.normalised_latents(vae, examples.images)
    model = transformer.train(
        latents, examples.captions, steps=recipe.transformer_steps, seed=recipe.seed, folder=work, console=console
    )
    write_pipeline(vae, model, model_folder)
    console.print(f"pipeline written to {model_folder}")
    trained = clip.train(examples, steps=recipe.clip_steps, seed=recipe.seed, folder=work, console=console)
    clip.write(trained, clip_folder)
    console.print(f"CLIP written to {clip_folder}")


def claim(work: Path, recipe: BaseModel) -> None:
    """Write the recipe into the work folder, or check that the folder holds the same one.

    The numbers of steps may not change either, because the learning rates depend on them.

    Raises:
        ValueError: the folder's recipe differs.
    """
    path = work / "recipe.json"
    if path.exists():
        before = type(recipe).model_validate_json(path.read_text())
        for name, value in recipe.model_dump().items():
            if getattr(before, name) != value:
                raise ValueError(
                    f"{name} must stay {getattr(before, name)} in {work}, got {value}: "
                    "choose another --work folder, or delete this one"
                )
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe.model_dump(), indent=2) + "\n")


def main(
    work: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/toyworld"),
    model_folder: Annotated[Path, typer.Option(help="Folder of the pipeline.")] = TOYWORLD / "model",
    clip_folder: Annotated[Path, typer.Option(help="Folder of the CLIP.")] = TOYWORLD / "clip",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = Recipe().seed,
    images: Annotated[int, typer.Option(help="Images in the pretraining set.")] = Recipe().images,
    autoencoder_steps: Annotated[int, typer.Option(help="Optimizer steps of batch 64.")] = Recipe().autoencoder_steps,
    transformer_steps: Annotated[int, typer.Option(help="Optimizer steps of batch 128.")] = Recipe().transformer_steps,
    clip_steps: Annotated[int, typer.Option(help="Optimizer steps of batch 128.")] = Recipe().clip_steps,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.", min=1)] = 2,
) -> None:
    """Pretrain the toy world's pipeline and CLIP; continue from the checkpoints of the work folder if there are any."""
    torch.set_num_threads(threads)
    console = Console()
    try:
        recipe = Recipe(
            seed=seed,
            images=images,
            autoencoder_steps=autoencoder_steps,
            transformer_steps=transformer_steps,
            clip_steps=clip_steps,
        )
        pretrain(recipe, work=work, model_folder=model_folder, clip_folder=clip_folder, console=console)
    except ValidationError as error:
        first = error.errors()[0]
        console.print(f"error: {first['loc'][0]}: {first['msg'].lower()}, got {first['input']}")
        raise typer.Exit(2) from None
    except ValueError as error:
        console.print(f"error: {error}")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)

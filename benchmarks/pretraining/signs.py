"""The recipe of the text task's pipeline: `python -m benchmarks.pretraining.signs`.

It trains the same parts as the shape world's recipe (`autoencoder`, `transformer` and the tokenizer, which splits a
word of capitals into letters) on signs instead of scenes. Each stage writes a checkpoint every minute; after a kill,
the same command continues and ends with the same weights. On two cores a step of the autoencoder takes 0.38 s, one of
the transformer 0.47 to 0.56.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from pydantic import Field
from rich.console import Console

from benchmarks.pretraining import autoencoder, transformer
from benchmarks.pretraining.export import TOYWORLD, write_pipeline
from benchmarks.pretraining.training import Recipe, Stage, Threads, Words
from toyworld.world.words import draw_signs, words

MISLABELLED_SHARE = 0.6
"""Share of captions that name a random word, in the last stage of pretraining; in all stages a quarter have one wrong
letter (`toyworld.world.words.WRONG_SHARE`). The pipeline then generates crisp signs, but fewer than half show the word
of their prompt, so reinforcement learning has something to learn."""


class SignRecipe(Recipe):
    """Sizes and steps."""

    images: int = Field(default=20_000, ge=256)
    """Images in the pretraining set."""
    autoencoder_steps: int = Field(default=1_500, ge=1)
    """Optimizer steps of the autoencoder, batch 64."""
    transformer_steps: int = Field(default=6_000, ge=1)
    """Optimizer steps of transformer and text encoders, batch 128."""
    web_steps: int = Field(default=1_200, ge=1)
    """Optimizer steps of the same parts on captions of which most name another word, batch 128."""


def mislabelled(captions: Sequence[str], *, seed: int) -> list[str]:
    """Return the captions with MISLABELLED_SHARE of them naming a random word of this world."""
    rng = np.random.default_rng(seed)
    names = words()
    return [
        re.sub('"(.*)"', f'"{rng.choice(names)}"', line) if rng.random() < MISLABELLED_SHARE else line
        for line in captions
    ]


def pretrain(recipe: SignRecipe, *, work: Path, folder: Path, console: Console) -> None:
    """Train all parts and write the pipeline.

    Args:
        recipe: seed and sizes.
        work: folder of the stages' checkpoints; it is created, or training continues from it.
        folder: path of the pipeline; an older one is replaced.
        console: receives the progress.

    Raises:
        typer.BadParameter: the work folder belongs to another recipe.
    """
    recipe.claim(work)
    stage = partial(Stage, seed=recipe.seed, folder=work, console=console)
    console.print(f"drawing {recipe.images} signs")
    signs = draw_signs(recipe.images, seed=recipe.seed)
    vae = autoencoder.train(signs.images, stage(name="autoencoder", steps=recipe.autoencoder_steps))
    latents = autoencoder.normalised_latents(vae, signs.images)
    model = transformer.train(latents, signs.captions, stage(name="transformer", steps=recipe.transformer_steps))
    captions = mislabelled(signs.captions, seed=recipe.seed)
    last = stage(name="web", steps=recipe.web_steps, seed=recipe.seed + 1)
    write_pipeline(vae, transformer.train(latents, captions, last, start=model), folder)
    console.print(f"pipeline written to {folder}")


def main(
    words: Words = None,
    work: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/signs"),
    folder: Annotated[Path, typer.Option(help="Folder of the pipeline.")] = TOYWORLD / "sign_model",
    threads: Threads = 2,
) -> None:
    """Pretrain the sign pipeline; continue from the checkpoints of the work folder if there are any."""
    torch.set_num_threads(threads)
    pretrain(SignRecipe.of(words or ()), work=work, folder=folder, console=Console())


if __name__ == "__main__":
    typer.run(main)

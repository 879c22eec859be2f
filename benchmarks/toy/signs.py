"""How well OCR reads the toy world's signs: `python -m benchmarks.toy.signs`.

It reads the drawn signs, the same signs after the sign pipeline's autoencoder, and after noise on the latents, which is
about what a sampler leaves.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from diffusers import AutoencoderTiny
from rich.console import Console

from rewards.ocr.scorer import Ocr
from toyworld.pretraining import autoencoder
from toyworld.world import words


def main(
    vae: Annotated[
        Path | None, typer.Option(help="Folder of the autoencoder; by default the shipped one, if it exists.")
    ] = None,
    count: Annotated[int, typer.Option(help="Signs to draw.", min=1)] = 200,
    noise: Annotated[float, typer.Option(help="Std of the noise on normalised latents.", min=0.0)] = 0.1,
) -> None:
    """Print the share of words read exactly and the mean reward."""
    signs = words.draw_signs(count, seed=77)
    rows = {"true signs": signs.images}
    folder = vae or Path(words.__file__).parents[1] / "sign_model" / "vae"
    if folder.exists():
        model = AutoencoderTiny.from_pretrained(folder).float().eval()
        rows["autoencoded"] = autoencoder.reconstruct(model, signs.images)
        latents = autoencoder.normalised_latents(model, signs.images)
        generator = torch.Generator().manual_seed(0)
        noisy = latents + noise * torch.randn(latents.shape, generator=generator)
        rows[f"with latent noise {noise:g}"] = autoencoder.decode_normalised(model, noisy)
    reader, prompts = Ocr(), [f'"{word}"' for word in signs.words]
    for name, images in rows.items():
        scores = reader.score(images, prompts, [{}] * count)
        exact = float(np.mean(scores.components["exact"]))
        Console().print(f"{name:26} exact {exact:.3f}, reward {scores.values.mean():.3f}")


if __name__ == "__main__":
    typer.run(main)

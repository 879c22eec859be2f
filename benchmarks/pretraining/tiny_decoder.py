"""The tiny decoder of the toy world: `python -m benchmarks.pretraining.tiny_decoder`.

It takes about a third of the seconds of the pipeline's own decoder and is trained to give the same images: of encoded
scenes with noise, and of mixtures of two scenes, which look like completions of noisy points. It takes the
transformer's latents as they are, as taesd3 and taef1 do, so its scaling factor is 1 and its shift 0.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from diffusers import AutoencoderTiny
from jaxtyping import Float, UInt8
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from benchmarks.pretraining import autoencoder
from benchmarks.pretraining.dataset import draw_examples
from benchmarks.pretraining.export import TOYWORLD, replacing
from benchmarks.pretraining.training import Stage, Threads, learning_rate

BATCH = 64
CHANNELS = 16
BLOCKS = (1, 1, 1)
MOST_NOISE = 0.3
"""Largest std of the noise that training adds to latents."""
MIXED = 0.3
"""Share of the examples that are mixtures of two scenes."""


def build() -> AutoencoderTiny:
    """Return an untrained tiny autoencoder; only its decoder is used, so its encoder is as small as it can be."""
    return AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(CHANNELS,) * 3,
        num_encoder_blocks=(0, 0, 0),
        num_decoder_blocks=BLOCKS,
        latent_channels=autoencoder.LATENT_CHANNELS,
    )


def draw_pairs(
    teacher: AutoencoderTiny, latents: Float[Tensor, "B 4 h w"], *, count: int, seed: int
) -> tuple[Float[Tensor, "N 4 h w"], UInt8[np.ndarray, "N H W 3"]]:
    """Draw latents, and what the teacher makes of them.

    Args:
        teacher: the pipeline's VAE.
        latents: the transformer's latents of scenes.
        count: N.
        seed: of mixtures and noise.

    Returns:
        The latents and their images.
    """
    generator = torch.Generator().manual_seed(seed)
    one, other = (latents[torch.randint(len(latents), (count,), generator=generator)] for _ in range(2))
    share = torch.rand(count, 1, 1, 1, generator=generator)
    share[torch.rand(count, generator=generator) > MIXED] = 1.0
    noise = MOST_NOISE * torch.rand(count, 1, 1, 1, generator=generator)
    drawn = share * one + (1 - share) * other + noise * torch.randn(one.shape, generator=generator)
    return drawn, np.concatenate([autoencoder.decode_normalised(teacher, part) for part in drawn.split(256)])


def distil(latents: Float[Tensor, "N 4 h w"], images: UInt8[np.ndarray, "N H W 3"], stage: Stage) -> AutoencoderTiny:
    """Train a tiny decoder on a teacher's images.

    Args:
        latents: the transformer's latents.
        images: the teacher's images of them.
        stage: its steps, seed and checkpoint.

    Returns:
        The trained tiny autoencoder.
    """
    torch.manual_seed(stage.seed)
    model = build().train()
    model.to(memory_format=torch.channels_last)  # pyrefly: ignore[missing-argument]
    optimizer = torch.optim.AdamW(model.decoder.parameters(), lr=1e-3, weight_decay=0.0)

    def loss_of(generator: torch.Generator) -> Float[Tensor, ""]:
        index = torch.randint(len(latents), (BATCH,), generator=generator)
        wanted = autoencoder.to_model_range(images[index.numpy()])
        drawn = model.decode(latents[index], return_dict=False)[0]
        edges = sum(functional.l1_loss(drawn.diff(dim=dim), wanted.diff(dim=dim)) for dim in (2, 3))
        return functional.l1_loss(drawn, wanted) + edges

    stage.run(model, optimizer, loss_of=loss_of, rate=partial(learning_rate, peak=5e-3))
    return model.eval().requires_grad_(requires_grad=False)


def main(
    work: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("runs/tiny_decoder"),
    pipeline: Annotated[Path, typer.Option(help="Folder of the pipeline whose decoder is the teacher.")] = TOYWORLD
    / "model",
    folder: Annotated[Path, typer.Option(help="Folder of the tiny decoder.")] = TOYWORLD / "tiny_decoder",
    steps: Annotated[int, typer.Option(help="Optimizer steps of batch 64.", min=1)] = 2_500,
    scenes: Annotated[int, typer.Option(help="Scenes to draw.", min=256)] = 6_000,
    count: Annotated[int, typer.Option(help="Latents to draw from the scenes.", min=256)] = 10_000,
    threads: Threads = 2,
) -> None:
    """Train the tiny decoder; continue from the checkpoint of the work folder if there is one."""
    torch.set_num_threads(threads)
    console = Console()
    teacher = AutoencoderTiny.from_pretrained(pipeline / "vae", dtype=torch.float32).requires_grad_(requires_grad=False)
    scene_latents = autoencoder.normalised_latents(teacher, draw_examples(scenes, seed=0).images)
    latents, images = draw_pairs(teacher, scene_latents, count=count, seed=0)
    stage = Stage(name="tiny_decoder", steps=steps, seed=0, folder=work, console=console)
    model = distil(latents, images, stage)
    with replacing(folder) as partial:
        model.half().save_pretrained(partial)
    console.print(f"tiny decoder written to {folder}")


if __name__ == "__main__":
    typer.run(main)

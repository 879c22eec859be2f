"""The tiny decoder of the toy world: `python -m toyworld.pretraining.tiny_decoder`.

It has a tenth of the operations of the pipeline's own decoder and is trained to give the same images: of encoded scenes
with noise, and of mixtures of two scenes, which look like completions of noisy points. It takes the transformer's
latents as they are, as taesd3 and taef1 do, so its scaling factor is 1 and its shift 0.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import AutoencoderTiny
from jaxtyping import Float
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from toyworld.pretraining import autoencoder
from toyworld.pretraining.dataset import draw_examples
from toyworld.pretraining.export import replacing
from toyworld.pretraining.training import learning_rate, run_stage, set_learning_rate, step_generator

HERE = Path(__file__).parents[1]
BATCH = 64
CHANNELS = 12
MOST_NOISE = 0.4
"""Largest std of the noise that training adds to latents."""
MIXED = 0.5
"""Share of the batch in which each row is a mixture of two scenes."""


def build() -> AutoencoderTiny:
    """Return an untrained tiny autoencoder; only its decoder is used, so its encoder is as small as it can be."""
    return AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(CHANNELS,) * 3,
        num_encoder_blocks=(0, 0, 0),
        num_decoder_blocks=(2, 1, 0),
        latent_channels=autoencoder.LATENT_CHANNELS,
    )


def distil(
    teacher: AutoencoderTiny,
    latents: Float[Tensor, "B 4 h w"],
    *,
    steps: int,
    seed: int,
    folder: Path,
    console: Console,
) -> AutoencoderTiny:
    """Train a tiny decoder on the images of another; continue from the checkpoint `tiny_decoder` in `folder`.

    Args:
        teacher: the pipeline's VAE.
        latents: the transformer's latents of scenes.
        steps: total number of optimizer steps.
        seed: seed of weights, batches, mixtures and noise.
        folder: folder of the checkpoint.
        console: receives the progress.

    Returns:
        The trained tiny autoencoder.
    """
    torch.manual_seed(seed)
    model = build().train()
    optimizer = torch.optim.AdamW(model.decoder.parameters(), lr=1e-3, weight_decay=0.0)

    def take_step(step: int) -> float:
        generator = step_generator(seed, step)
        set_learning_rate(optimizer, learning_rate(step, steps, peak=4e-3))
        batch = _batch(latents, generator)
        with torch.no_grad():
            raw = batch / teacher.config["scaling_factor"] + teacher.config["shift_factor"]
            wanted = teacher.decode(raw, return_dict=False)[0].clamp(-1, 1)
        drawn = model.decode(batch, return_dict=False)[0]
        edges = sum(functional.l1_loss(drawn.diff(dim=dim), wanted.diff(dim=dim)) for dim in (2, 3))
        loss = functional.l1_loss(drawn, wanted) + edges
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    run_stage(
        "tiny_decoder",
        steps=steps,
        parts={"model": model, "optimizer": optimizer},
        take_step=take_step,
        folder=folder,
        console=console,
    )
    return model.eval().requires_grad_(requires_grad=False)


def _batch(latents: Float[Tensor, "B 4 h w"], generator: torch.Generator) -> Float[Tensor, "64 4 h w"]:
    one, other = (latents[torch.randint(len(latents), (BATCH,), generator=generator)] for _ in range(2))
    share = torch.rand(BATCH, 1, 1, 1, generator=generator)
    share[torch.rand(BATCH, generator=generator) > MIXED] = 1.0
    noise = MOST_NOISE * torch.rand(BATCH, 1, 1, 1, generator=generator)
    return share * one + (1 - share) * other + noise * torch.randn(one.shape, generator=generator)


def main(
    work: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("runs/tiny_decoder"),
    pipeline: Annotated[Path, typer.Option(help="Folder of the pipeline whose decoder is the teacher.")] = HERE
    / "model",
    folder: Annotated[Path, typer.Option(help="Folder of the tiny decoder.")] = HERE / "tiny_decoder",
    steps: Annotated[int, typer.Option(help="Optimizer steps of batch 64.", min=1)] = 1_500,
    images: Annotated[int, typer.Option(help="Scenes to draw.", min=256)] = 6_000,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.", min=1)] = 2,
) -> None:
    """Train the tiny decoder; continue from the checkpoint of the work folder if there is one."""
    torch.set_num_threads(threads)
    console = Console()
    teacher = AutoencoderTiny.from_pretrained(pipeline / "vae", dtype=torch.float32).requires_grad_(requires_grad=False)
    latents = autoencoder.normalised_latents(teacher, draw_examples(images, seed=0).images)
    model = distil(teacher, latents, steps=steps, seed=0, folder=work, console=console)
    with replacing(folder) as partial:
        model.half().save_pretrained(partial)
    console.print(f"tiny decoder written to {folder}")


if __name__ == "__main__":
    typer.run(main)

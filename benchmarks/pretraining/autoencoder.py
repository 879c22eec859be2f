"""The autoencoder of the toy world: an AutoencoderTiny that encodes 32x32 images as 8x8x4 latents and decodes them.

`build` makes it, `train` trains it on rendered scenes. Its latents have about zero mean and unit variance.
"""

from functools import partial

import numpy as np
import torch
from diffusers import AutoencoderTiny
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from benchmarks.pretraining.training import Stage, learning_rate

BATCH = 64
CHANNELS = 24
LATENT_CHANNELS = 4
LATENT_NOISE = 0.12
"""Std of the noise that training adds to latents, so that the decoder tolerates small errors of a sampler."""


def build() -> AutoencoderTiny:
    """Return an untrained autoencoder with three levels (factor 4) of 24 channels."""
    return AutoencoderTiny(
        encoder_block_out_channels=(CHANNELS,) * 3,
        decoder_block_out_channels=(CHANNELS,) * 3,
        num_encoder_blocks=(1, 1, 2),
        num_decoder_blocks=(2, 1, 1),
        latent_channels=LATENT_CHANNELS,
    )


def to_model_range(images: UInt8[np.ndarray, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
    """Convert uint8 images to float32 in [-1, 1], channels first."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def to_images(images: Float[Tensor, "B 3 H W"]) -> UInt8[np.ndarray, "B H W 3"]:
    """Convert float images in [-1, 1] to uint8 images, clipped and rounded."""
    scaled = images.clamp(-1, 1).add(1).mul(127.5).round()
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def train(images: np.ndarray, stage: Stage) -> AutoencoderTiny:
    """Train the autoencoder.

    The loss has three terms: the mean absolute error of reconstructions from noisy latents, the same error of the
    differences between neighbouring pixels (which keeps edges sharp), and a penalty that pulls the latents to zero mean
    and unit variance.

    Args:
        images: training images, uint8 [B, 32, 32, 3].
        stage: its steps, seed and checkpoint.

    Returns:
        The trained autoencoder, frozen, with its scaling and shift factor.
    """
    torch.manual_seed(stage.seed)
    model = build().train()
    model.to(memory_format=torch.channels_last)  # pyrefly: ignore[missing-argument]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def loss_of(generator: torch.Generator) -> Float[Tensor, ""]:
        index = torch.randint(len(images), (BATCH,), generator=generator)
        batch = to_model_range(images[index.numpy()]).contiguous(memory_format=torch.channels_last)
        return _loss(model, batch, generator)

    stage.run(model, optimizer, loss_of=loss_of, rate=partial(learning_rate, peak=2e-3))
    return calibrate(model, images[:4096])


@torch.no_grad()
def calibrate(model: AutoencoderTiny, images: np.ndarray) -> AutoencoderTiny:
    """Set scaling_factor and shift_factor so that `normalised_latents` have zero mean and unit std; freeze the
    model."""
    model.eval().requires_grad_(requires_grad=False)
    latents = torch.cat([_encode(model, to_model_range(part)) for part in _parts(images)])
    model.register_to_config(
        scaling_factor=round(1 / latents.std().item(), 4), shift_factor=round(latents.mean().item(), 4)
    )
    return model


@torch.no_grad()
def normalised_latents(model: AutoencoderTiny, images: np.ndarray) -> Float[Tensor, "B 4 h w"]:
    """Encode images as the transformer's latents: (encoded - shift_factor) * scaling_factor."""
    latents = torch.cat([_encode(model, to_model_range(part)) for part in _parts(images)])
    return (latents - model.config["shift_factor"]) * model.config["scaling_factor"]


@torch.no_grad()
def reconstruct(model: AutoencoderTiny, images: np.ndarray) -> UInt8[np.ndarray, "B H W 3"]:
    """Encode and decode images."""
    return np.concatenate([to_images(_decode(model, _encode(model, to_model_range(part)))) for part in _parts(images)])


@torch.no_grad()
def decode_normalised(model: AutoencoderTiny, latents: Float[Tensor, "B 4 h w"]) -> UInt8[np.ndarray, "B H W 3"]:
    """Decode the transformer's latents to images."""
    raw = latents / model.config["scaling_factor"] + model.config["shift_factor"]
    return to_images(_decode(model, raw))


def _loss(model: AutoencoderTiny, images: Float[Tensor, "B 3 H W"], generator: torch.Generator) -> Float[Tensor, ""]:
    latents = _encode(model, images)
    noise = torch.randn(latents.shape, generator=generator)
    decoded = _decode(model, latents + LATENT_NOISE * noise)
    rows = functional.l1_loss(decoded.diff(dim=2), images.diff(dim=2))
    columns = functional.l1_loss(decoded.diff(dim=3), images.diff(dim=3))
    mean, variance = latents.mean((0, 2, 3)), latents.var((0, 2, 3))
    tidy = mean.square().mean() + (variance - 1).square().mean()
    return functional.l1_loss(decoded, images) + rows + columns + 0.01 * tidy


def _encode(model: AutoencoderTiny, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B 4 h w"]:
    return model.encode(images, return_dict=False)[0]


def _decode(model: AutoencoderTiny, latents: Float[Tensor, "B 4 h w"]) -> Float[Tensor, "B 3 H W"]:
    return model.decode(latents, return_dict=False)[0]


def _parts(images: np.ndarray, size: int = 512) -> list[np.ndarray]:
    return [images[start : start + size] for start in range(0, len(images), size)]

"""The velocity model of the toy world: a small SD3 transformer, trained together with its two text encoders.

`build` makes the untrained parts, `train` trains them with flow matching on latents and web captions.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from diffusers import SD3Transformer2DModel
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection

from benchmarks.pretraining import text_encoders as textencoders
from benchmarks.pretraining.autoencoder import LATENT_CHANNELS
from benchmarks.pretraining.tokenizer import build as build_tokenizer
from benchmarks.pretraining.training import Stage, WeightAverage

BATCH = 128
WIDTH = 128
LAYERS = 4
LATENT_SIZE = 8
CAPTION_DROPOUT = 0.1
"""Share of captions that training replaces by the empty caption, so that guidance works."""

PEAK_RATE, WARMUP = 1e-3, 200
DECAY_SHARE = 0.2
"""Share of the steps, at the end, over which the learning rate falls to zero; images become sharp there."""

AVERAGE_DECAY = 0.998


class VelocityModel(nn.Module):
    """The three parts that are trained together; `build` makes them, and each is exported separately.

    Args:
        transformer: predicts the velocity.
        text_encoder: the first CLIP text encoder.
        text_encoder_2: the second one, of the same size.
    """

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        text_encoder: CLIPTextModelWithProjection,
        text_encoder_2: CLIPTextModelWithProjection,
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.text_encoder_2 = text_encoder_2

    def forward(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], ids: Int[Tensor, "B L"]
    ) -> Float[Tensor, "B C H W"]:
        """Predict the velocity: noise minus clean latents.

        Args:
            latents: noisy latents [B, C, H, W].
            sigma: noise level of each row, in [0, 1] [B].
            ids: token ids of the captions [B, L].

        Returns:
            The velocity [B, C, H, W].
        """
        features, pooled = textencoders.encode((self.text_encoder, self.text_encoder_2), ids)
        return self.transformer(
            latents,
            encoder_hidden_states=features,
            pooled_projections=pooled,
            timestep=1000 * sigma,
            return_dict=False,
        )[0]


def build(seed: int) -> VelocityModel:
    """Return untrained parts; every block starts as the identity (adaLN-Zero), and the output as zero."""
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=WIDTH // 4,
        num_attention_heads=4,
        joint_attention_dim=2 * textencoders.WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * textencoders.WIDTH,
        pos_embed_max_size=LATENT_SIZE // 2,
        qk_norm="rms_norm",
    )
    start_as_identity(transformer)
    tokenizer = build_tokenizer()
    return VelocityModel(transformer, textencoders.build(tokenizer), textencoders.build(tokenizer))


def start_as_identity(transformer: nn.Module) -> None:
    """Zero the modulation of every block and the output layer, as adaLN-Zero does."""
    parts: Any = transformer
    modulations = [norm.linear for block in parts.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    modulations += [block.norm.linear for block in getattr(parts, "single_transformer_blocks", ())]
    for layer in (*modulations, parts.norm_out.linear, parts.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def train(
    latents: Float[Tensor, "images C H W"], captions: list[str], stage: Stage, *, start: VelocityModel | None = None
) -> VelocityModel:
    """Train the velocity model.

    The loss is the mean squared error of the velocity over batch and latent elements.

    Args:
        latents: normalised latents of the training images [images, C, H, W].
        captions: one caption for each image.
        stage: its steps, seed and checkpoint.
        start: trained parts to continue with, changed in place; untrained ones if none are given.

    Returns:
        The model with the running average of its weights.
    """
    model = start or build(stage.seed)
    tokenizer = build_tokenizer()
    ids, no_caption = textencoders.token_ids(tokenizer, captions), textencoders.token_ids(tokenizer, [""])

    def loss_of(generator: torch.Generator) -> Float[Tensor, ""]:
        index = torch.randint(len(latents), (BATCH,), generator=generator)
        is_dropped = torch.rand(BATCH, 1, generator=generator) < CAPTION_DROPOUT
        return flow_matching_loss(model, latents[index], torch.where(is_dropped, no_caption, ids[index]), generator)

    return averaged(model, stage, loss_of)


Model = TypeVar("Model", bound=nn.Module)


def averaged(model: Model, stage: Stage, loss_of: Callable[[torch.Generator], Float[Tensor, ""]]) -> Model:
    """Train a velocity model by Adam; return it with the running average of its weights."""
    average = WeightAverage(model.train(), AVERAGE_DECAY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    stage.run(model, optimizer, loss_of=loss_of, rate=rate, shift=1, average=average)
    model.load_state_dict(average.state_dict(), strict=False)
    return model.eval()


def rate(step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, plateau at PEAK_RATE, linear decay to zero over the last
    DECAY_SHARE."""
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY_SHARE * steps))


def draw_sigmas(count: int, generator: torch.Generator) -> Float[Tensor, " B"]:
    """Draw noise levels: logit-normal(0.5, 1.2), but one in five uniform, so that training covers both ends."""
    normal = torch.sigmoid(0.5 + 1.2 * torch.randn(count, generator=generator))
    uniform = torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.2, uniform, normal)


def flow_matching_loss(
    model: Callable[..., Float[Tensor, "B C H W"]],
    clean: Float[Tensor, "B C H W"],
    ids: Int[Tensor, "B L"] | tuple[Int[Tensor, "B _"], ...],
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    """Return the mean squared error of the velocity at random noise levels.

    x_s = (1 - s) x_0 + s e,   loss = mean over batch and elements of (v(x_s, s, caption) - (e - x_0))^2

    Args:
        model: the velocity model, called with latents, noise levels and ids.
        clean: clean latents x_0 [B, C, H, W].
        ids: token ids of the captions [B, L], for each tokenizer if there are several.
        generator: source of noise levels s and noise e.

    Returns:
        The loss, a scalar.
    """
    noise = torch.randn(clean.shape, generator=generator)
    sigma = draw_sigmas(len(clean), generator)
    weight = sigma[:, None, None, None]
    velocity = model((1 - weight) * clean + weight * noise, sigma, ids)
    return (velocity - (noise - clean)).square().mean()

"""The velocity model of the toy editor: a small FLUX transformer, trained together with its CLIP and its T5.

It reads the condition image as FLUX.1-Kontext does: its latents are further tokens behind those of the noisy image.
`build` makes the untrained parts, `train` trains them with flow matching on pairs of images and instructions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from benchmarks.pretraining import tokenizer as tokenizers
from benchmarks.pretraining.autoencoder import LATENT_CHANNELS
from benchmarks.pretraining.text_encoders import WIDTH as TEXT_WIDTH
from benchmarks.pretraining.text_encoders import config_of, token_ids
from benchmarks.pretraining.training import Stage
from benchmarks.pretraining.transformer import averaged, flow_matching_loss, start_as_identity
from flow.models.backbones.flux import PACK, pack, unpack
from toyworld.world.edits import words

BATCH = 64
WIDTH, HEADS = 128, 4
DOUBLE_BLOCKS, SINGLE_BLOCKS = 2, 2
AXES = (8, 12, 12)
"""Rotary channels of image index, row and column; they add up to a head's width."""
MAX_SEQUENCE_LENGTH = 8
"""Tokens of T5: the longest instruction has seven words and an end token."""


class Editor(nn.Module):
    """The parts that are trained together; `build` makes them, and each is exported separately."""

    def __init__(
        self, transformer: FluxTransformer2DModel, text_encoder: CLIPTextModel, text_encoder_2: T5EncoderModel
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.text_encoder_2 = text_encoder_2

    def forward(
        self,
        latents: Float[Tensor, "B C H W"],
        sigma: Float[Tensor, " B"],
        ids: tuple[Int[Tensor, "B L"], Int[Tensor, "B M"]],
        *,
        condition: Float[Tensor, "B C H W"],
    ) -> Float[Tensor, "B C H W"]:
        """Predict the velocity: noise minus clean latents.

        Args:
            latents: noisy latents of the edited image.
            sigma: noise level of each row, in [0, 1].
            ids: token ids of the instructions, for CLIP and for T5.
            condition: latents of the image to edit.
        """
        height, width = latents.shape[-2:]
        tokens = [pack(each) for each in (latents, condition)]
        positions = _positions(height, width)
        predicted = self.transformer(
            hidden_states=torch.cat(tokens, dim=1),
            encoder_hidden_states=self.text_encoder_2(ids[1])[0],
            pooled_projections=self.text_encoder(ids[0]).pooler_output,
            timestep=sigma,
            img_ids=torch.cat([positions, positions + torch.tensor([1.0, 0.0, 0.0])]),
            txt_ids=torch.zeros(ids[1].shape[1], 3),
            return_dict=False,
        )[0]
        return unpack(predicted[:, : tokens[0].shape[1]], height=height, width=width)


def build(seed: int) -> Editor:
    """Return untrained parts; every block starts as the identity, and the output as zero."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=PACK**2 * LATENT_CHANNELS,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=AXES,
    )
    start_as_identity(transformer)
    t5 = T5Config(
        vocab_size=len(t5_tokenizer()),
        d_model=TEXT_WIDTH,
        d_kv=TEXT_WIDTH // 2,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
    )
    return Editor(transformer, CLIPTextModel(config_of(clip_tokenizer())), T5EncoderModel(t5))


def clip_tokenizer() -> CLIPTokenizer:
    return tokenizers.build(words())


def t5_tokenizer() -> T5Tokenizer:
    """Return a tokenizer in which every word of an instruction is one token; any other word becomes letters."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*(("▁" + word, -1.0) for word in words()), ("▁", -4.0), *((letter, -5.0) for letter in letters)]
    marks: Any = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5Tokenizer(vocab=marks + pieces, extra_ids=0)


def both_ids(instructions: list[str]) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B M"]]:
    """Return the token ids of instructions for CLIP and for T5, as the pipeline makes them."""
    t5 = t5_tokenizer()(
        instructions, padding="max_length", max_length=MAX_SEQUENCE_LENGTH, truncation=True, return_tensors="pt"
    )
    return token_ids(clip_tokenizer(), instructions), t5.input_ids


def train(
    conditions: Float[Tensor, "images C H W"],
    latents: Float[Tensor, "images C H W"],
    instructions: Sequence[str],
    stage: Stage,
) -> Editor:
    """Train the editor.

    Args:
        conditions: normalised latents of the images to edit.
        latents: normalised latents of the edited images.
        instructions: one for each pair.
        stage: its steps, seed and checkpoint.

    Returns:
        The model with the running average of its weights.
    """
    model = build(stage.seed)
    clip_ids, t5_ids = both_ids(list(instructions))

    def loss_of(generator: torch.Generator) -> Float[Tensor, ""]:
        index = torch.randint(len(latents), (BATCH,), generator=generator)
        edited = partial(model, condition=conditions[index])
        return flow_matching_loss(edited, latents[index], (clip_ids[index], t5_ids[index]), generator)

    return averaged(model, stage, loss_of)


def _positions(height: int, width: int) -> Float[Tensor, "tokens 3"]:
    rows, columns = torch.meshgrid(torch.arange(height // PACK), torch.arange(width // PACK), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()

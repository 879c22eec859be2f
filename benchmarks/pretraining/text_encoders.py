"""The two small CLIP text encoders of the toy pipeline, used as StableDiffusion3Pipeline uses them.

`build` makes one, `encode` turns token ids into the transformer's two text inputs.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks.pretraining.tokenizer import CONTEXT_LENGTH, mark_ids

WIDTH = 64
MAX_SEQUENCE_LENGTH = 1
"""Zero tokens that the pipeline appends instead of T5's tokens; the `max_sequence_length` for generating images."""


def config_of(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    """Return the sizes of a text encoder of width 64 for the tokenizer's vocabulary.

    It has two layers, because the pipeline reads the second last hidden state, which is the first layer's.
    """
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        **mark_ids(tokenizer),
    )


def build(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Return an untrained text encoder for the tokenizer's vocabulary."""
    return CLIPTextModelWithProjection(config_of(tokenizer))


def token_ids(tokenizer: CLIPTokenizer, captions: list[str]) -> Int[Tensor, "B L"]:
    """Return the captions' token ids, padded and truncated to CONTEXT_LENGTH."""
    return tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids


def encode(
    encoders: tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection], ids: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B P"]]:
    """Compute token features and pooled features, as StableDiffusion3Pipeline.encode_prompt does without T5.

    Returns:
        Token features [B, L + MAX_SEQUENCE_LENGTH, 2 * WIDTH]: the second last hidden states of both encoders side by
        side, then zeros; and pooled features [B, 2 * WIDTH]: the projections of both.
    """
    outputs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    features = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    features = torch.nn.functional.pad(features, (0, 0, 0, MAX_SEQUENCE_LENGTH))
    return features, torch.cat([output.text_embeds for output in outputs], dim=-1)

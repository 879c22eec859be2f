"""Prompts of different length in one shape: embeddings padded to `model.max_sequence_length`, with a mask.

The padding reaches no transformer: `trimmed` cuts a batch to its longest prompt. Rollout and learner cut the same batch
to the same length, so the ratio stays exactly 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flow.models.contract import Conditioning

EMBEDS = "encoder_hidden_states"
MASK = "mask"


def padded(embeds: Float[Tensor, "1 tokens D"], length: int) -> Conditioning:
    """Return one prompt's embeddings with zeros up to `length` tokens, and their mask: bool [1, L], true for tokens."""
    tokens = embeds.shape[1]
    whole = torch.nn.functional.pad(embeds, (0, 0, 0, length - tokens))
    return {EMBEDS: whole, MASK: torch.arange(length, device=embeds.device)[None] < tokens}


def trimmed(conditioning: Conditioning) -> tuple[Float[Tensor, "B longest D"], list[int]]:
    """Return embeddings cut to the longest prompt of a batch, and how many tokens each row has.

    Without a mask, as in a family's `example`, all tokens count.
    """
    embeds, mask = conditioning[EMBEDS], conditioning.get(MASK)
    lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(1).tolist()
    return embeds[:, : max(lengths)], lengths

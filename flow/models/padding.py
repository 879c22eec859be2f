"""Prompts of different length in one shape: embeddings padded to `model.max_sequence_length`, with a mask.

`trimmed` cuts a batch to its longest prompt, so the padding reaches no transformer, except one with compiled blocks,
which masks it. Rollout and learner cut the same batch to the same length, so the ratio stays exactly 1. Masks stay in
host memory, so that no forward waits for a GPU to tell how long its prompts are.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flow.models.contract import Conditioning

EMBEDS = "encoder_hidden_states"
MASK = "mask"
SHORTEST = 64
"""Tokens of the shortest embeddings of compiled blocks."""


def padded(embeds: Float[Tensor, "1 tokens D"], length: int) -> Conditioning:
    """Return one prompt's embeddings with zeros up to `length` tokens, and their mask: bool [1, L], true for tokens."""
    tokens = embeds.shape[1]
    whole = torch.nn.functional.pad(embeds, (0, 0, 0, length - tokens))
    return {EMBEDS: whole, MASK: torch.arange(length)[None] < tokens}


def trimmed(conditioning: Conditioning, *, is_compiled: bool = False) -> tuple[Float[Tensor, "B longest D"], list[int]]:
    """Cut embeddings to the longest prompt of a batch.

    Args:
        conditioning: the embeddings [B, L, D] and their mask; without a mask, as in `example`, all tokens count.
        is_compiled: whether the blocks are compiled. They have graphs for each length, so the length is then rounded up
            to a power of two, at least `SHORTEST`.

    Returns:
        The embeddings, and how many tokens each row has.
    """
    embeds, mask = conditioning[EMBEDS], conditioning.get(MASK)
    lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(1).tolist()
    longest = max(lengths)
    if is_compiled:
        longest = max(SHORTEST, 1 << (longest - 1).bit_length())
    return embeds[:, :longest], lengths

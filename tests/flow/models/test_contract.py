"""Embeddings of prompts of different length in one batch."""

import torch

from flow.models.contract import EMBEDS, Conditioning, stack


def prompt(*values: float) -> Conditioning:
    """One token of width 1 for each value."""
    return Conditioning.of(
        {EMBEDS: torch.tensor(values)[None, :, None], "pooled_projections": torch.tensor([values[:1]])}
    )


def test_a_batch_is_as_long_as_its_longest_prompt_and_knows_the_tokens_of_each_row() -> None:
    both = stack([prompt(1, 2), prompt(3, 4, 5)])
    assert both.lengths == (2, 3)
    assert both.tensors[EMBEDS].squeeze(2).tolist() == [[1, 2, 0], [3, 4, 5]]
    assert both.tensors["pooled_projections"].tolist() == [[1], [3]]
    more = stack([both, prompt(6, 7, 8, 9)])
    assert more.lengths == (2, 3, 4)
    assert more.tensors[EMBEDS].shape == (3, 4, 1)


def test_some_rows_of_a_batch_lose_the_padding_of_the_others() -> None:
    batch = stack([prompt(1, 2).repeat(2), prompt(3, 4, 5, 6)])
    assert batch.lengths == (2, 2, 4)
    short = batch.rows(slice(0, 2))
    assert short.lengths == (2, 2)
    assert short.tensors[EMBEDS].squeeze(2).tolist() == [[1, 2], [1, 2]]
    assert batch.rows(slice(1, 3)).tensors[EMBEDS].shape == (2, 4, 1)

"""The CLIP tokenizer of the toy world: byte-pair encoding in which every word of the vocabulary is one token.

Any other word becomes letters, so a caption with other words is valid, but the model cannot understand it.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

from transformers import CLIPTokenizer

from toyworld.world.vocabulary import words

CONTEXT_LENGTH = 12
"""Tokens of a caption with its start and end token; the longest caption of the vocabulary has exactly this many."""

END = "</w>"


def build(vocabulary: list[str] | None = None) -> CLIPTokenizer:
    """Return a tokenizer of these words, by default those of captions; it pads and truncates to CONTEXT_LENGTH."""
    merges: Any = learn_merges(vocabulary or words())
    letters = _byte_letters()
    pieces = [*letters, *(letter + END for letter in letters), *(a + b for a, b in merges)]
    tokens = [*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"]
    ids = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=ids, merges=merges, model_max_length=CONTEXT_LENGTH)


def mark_ids(tokenizer: CLIPTokenizer) -> dict[str, Any]:
    """Return the ids of the start, end and padding token by their names in transformers' text configs."""
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def learn_merges(vocabulary: list[str]) -> list[tuple[str, str]]:
    """Return byte-pair merges, most frequent pair first (ties by spelling), until each word is one piece."""
    split = [[*word[:-1], word[-1] + END] for word in vocabulary]
    merges: list[tuple[str, str]] = []
    while any(len(pieces) > 1 for pieces in split):
        pairs = Counter(pair for pieces in split for pair in pairwise(pieces))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = [_merge(pieces, best) for pieces in split]
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Join each occurrence of the pair, from left to right."""
    joined: list[str] = []
    for piece in pieces:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _byte_letters() -> list[str]:
    """Return a printable character for each of the 256 bytes, as in GPT-2's byte-level encoding."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]

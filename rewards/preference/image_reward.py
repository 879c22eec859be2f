"""ImageReward: how much would people like this image for this prompt? (Xu et al. 2023, arXiv 2304.05977)

scorer = build_scorer("imagereward")                                  # the published weights
scorer = build_scorer("imagereward", model="weights/ImageReward.pt")  # a file or a folder that holds it

BLIP's image encoder encodes the image's patches, BLIP's text encoder reads the prompt and attends to them, and a head
of linear layers turns its first state h into a number: score = (head(h) - MEAN) / STD.
"""

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np

from protocol.errors import ScorerError
from protocol.messages import Metadata, Prompt, Scores
from rewards.checkpoint import checkpoint_outline, holds_tensors, linear_head, numbers, read_tensors, require_checkpoint
from rewards.pretrained import load_pretrained, require_pretrained
from rewards.scores import scored

MODEL = "zai-org/ImageReward"
FILE = "ImageReward.pt"
TOKENIZER = "google-bert/bert-base-uncased"
ADDED_TOKENS = ("[DEC]", "[ENC]")
"""BLIP's own tokens, which follow BERT's vocabulary; ImageReward's prompts contain neither."""
LENGTH = 35
"""Tokens of a prompt, with [CLS] and [SEP]; a longer prompt is cut, a shorter one padded."""
HEAD_WIDTH = 64
"""Width of an attention head, in both encoders."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the head's output in the authors' data."""
PIXEL_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
PIXEL_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
UNUSED = re.compile(r"blip\.(text_encoder\.embeddings\.position_ids|(vision|text)_proj\.(weight|bias))")
"""Tensors of the published file that the score does not need."""


class ImageReward:
    """ImageReward: mean 0 and standard deviation 1 in its authors' data, most often in [-2, 2], unbounded.

    It sees the middle square of an image, at 224 pixels with the published weights, and 35 tokens of a prompt.

    Weights: `ImageReward.pt` of `zai-org/ImageReward` (1.8 GB, Apache-2.0), in the layout of the authors' package, and
    the tokenizer of `google-bert/bert-base-uncased`. All sizes are read from the tensors.
    """

    name = "imagereward"
    low = float("-inf")
    high = float("inf")

    def __init__(
        self, *, model: str = MODEL, tokenizer: str = TOKENIZER, device: str | None = None, batch: int = 16
    ) -> None:
        """Load the weights.

        Args:
            model: a file `*.pt`, a folder that holds `ImageReward.pt`, a `pkg://` path of either, or a hub id.
            tokenizer: folder, `pkg://` path or hub id of BERT's uncased tokenizer.
            batch: images of one forward on a GPU, at least 1. On a CPU each image has its own forward.

        Raises:
            ScorerError: the weights or the tokenizer cannot be loaded, or do not fit each other.
        """
        import torch
        from transformers import BertTokenizer

        from flow.device import best_device

        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}: raise it")
        self._torch = torch
        self._device = device or best_device()
        self._batch = batch if torch.device(self._device).type != "cpu" else 1
        self._network, self._side = _network_of(load_pretrained(read_tensors, model, file=FILE), model)
        self._network.to(self._device).eval().requires_grad_(requires_grad=False)
        self._tokenizer: Any = load_pretrained(BertTokenizer.from_pretrained, tokenizer)
        self._tokenizer.add_tokens(list(ADDED_TOKENS), special_tokens=True)
        words = self._network["text"].config.vocab_size
        if len(self._tokenizer) != words:
            raise ScorerError(
                f"the tokenizer must have {words - len(ADDED_TOKENS)} tokens for the weights {model!r}, got"
                f" {len(self._tokenizer) - len(ADDED_TOKENS)} in {tokenizer!r}: give BERT's uncased tokenizer"
            )

    @staticmethod
    def ready(*, model: str = MODEL, tokenizer: str = TOKENIZER, **_: Any) -> None:
        """Check that weights and tokenizer exist, and that the weights are ImageReward's (ScorerError)."""
        require_checkpoint(model, file=FILE)
        require_pretrained(tokenizer, "tokenizer.json", "vocab.txt")
        import torch

        if saved := checkpoint_outline(model, file=FILE):
            with torch.device("meta"):
                _network_of(saved, model)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        pixels = self._torch.from_numpy(np.stack([_pixels(image, self._side) for image in images]))
        # Whole batches only: the last one is filled up with the first images.
        rows = np.arange(len(images) + -len(images) % self._batch) % len(images)
        parts = [
            self._rated(pixels[part], tokens.input_ids[part], tokens.attention_mask[part])
            for part in rows.reshape(-1, self._batch)
        ]
        rated = np.concatenate(parts)[: len(images)].astype(np.float64)
        return scored((rated - MEAN) / STD)

    def _rated(self, pixels: Any, ids: Any, mask: Any) -> np.ndarray:
        """Return the head's numbers [N] for images [N, 3, S, S] with the tokens of their prompts [N, L]."""
        with self._torch.inference_mode():
            seen = self._network["vision"](pixels.to(self._device)).last_hidden_state
            states = self._network["text"](
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device), encoder_hidden_states=seen
            ).last_hidden_state
            return self._network["head"](states[:, 0])[:, 0].cpu().numpy()


def _pixels(image: np.ndarray, side: int) -> np.ndarray:
    """Return the middle square of an image uint8 [H, W, 3], its shorter side resized, as float32 [3, side, side]."""
    from PIL import Image

    height, width = image.shape[:2]
    short = min(height, width)
    size = (int(side * width / short), int(side * height / short))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = round((resized.width - side) / 2), round((resized.height - side) / 2)
    square = np.asarray(resized.crop((left, top, left + side, top + side)), np.float32) / 255
    return ((square - PIXEL_MEAN) / PIXEL_STD).transpose(2, 0, 1)


def _network_of(saved: Mapping[str, Any], source: str) -> tuple[Any, int]:
    """Build transformers' modules for the tensors of the authors' checkpoint and load them.

    Returns:
        A module dictionary of `vision`, `text` and `head`; the side in pixels of the images that it takes.

    Raises:
        ScorerError: a tensor is missing, is of another shape, or has a name that ImageReward does not have.
    """
    with holds_tensors(source, "ImageReward", f"give {FILE} of {MODEL}") as require_names:
        network, side = _empty_network({name: tuple(tensor.shape) for name, tensor in saved.items()})
        names = {ours: _published(ours) for ours in network.state_dict()}
        foreign = set(saved) - set(names.values())
        require_names(set(names.values()) - set(saved), (name for name in foreign if not UNUSED.fullmatch(name)))
        network.load_state_dict({ours: saved[name].float() for ours, name in names.items()})
    return network, side


def _empty_network(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, int]:
    """Build the modules in a checkpoint's sizes, and return the side of its images; KeyError: a tensor is missing."""
    from torch import nn
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    seen, read = "blip.visual_encoder", "blip.text_encoder"
    width, patch = shapes[f"{seen}.patch_embed.proj.weight"][::2]
    side = patch * isqrt(shapes[f"{seen}.pos_embed"][1] - 1)
    vision = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=shapes[f"{seen}.blocks.0.mlp.fc1.weight"][0],
        num_hidden_layers=len(numbers(shapes, f"{seen}.blocks")),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=side,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    words, inner = shapes[f"{read}.embeddings.word_embeddings.weight"]
    text = BlipTextConfig(
        vocab_size=words,
        hidden_size=inner,
        encoder_hidden_size=width,
        intermediate_size=shapes[f"{read}.encoder.layer.0.intermediate.dense.weight"][0],
        num_hidden_layers=len(numbers(shapes, f"{read}.encoder.layer")),
        num_attention_heads=inner // HEAD_WIDTH,
        max_position_embeddings=shapes[f"{read}.embeddings.position_embeddings.weight"][0],
        is_decoder=True,  # gives the layers their cross-attention; the masks stay an encoder's
    )
    head = linear_head(shapes, "mlp.layers", inputs=inner, outputs=1)
    modules = {"vision": BlipVisionModel(vision), "text": BlipTextModel(text, add_pooling_layer=False), "head": head}
    return nn.ModuleDict(modules), side


VISION = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding": "patch_embed.proj",
    "encoder.layers": "blocks",
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    "layer_norm": "norm",
    "post_layernorm": "norm",
}
"""Maps transformers' names in the image encoder to the authors'; in the text encoder both names are the same."""


def _published(ours: str) -> str:
    """Return the authors' name of a tensor of our modules."""
    part, _, name = ours.partition(".")
    if part == "text":
        return f"blip.text_encoder.{name}"
    if part == "head":
        return f"mlp.layers.{name}"
    for word, theirs in VISION.items():
        name = name.replace(word, theirs)
    return f"blip.visual_encoder.{name}"

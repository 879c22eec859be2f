"""The small CLIP of the toy world, trained to prefer true captions to captions with one wrong fact.

`train` trains it. `write` saves a folder that transformers' CLIPModel and CLIPProcessor load, for a PickScore reward.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPVisionConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.pretraining.autoencoder import to_model_range
from benchmarks.pretraining.dataset import Examples
from benchmarks.pretraining.export import replacing
from benchmarks.pretraining.text_encoders import WIDTH, config_of, token_ids
from benchmarks.pretraining.tokenizer import build as build_tokenizer
from benchmarks.pretraining.training import Stage, learning_rate
from toyworld.world.scenes import SIZE

BATCH = 128
PATCH = 4


def build() -> CLIPModel:
    """Return an untrained CLIP of width 64 with 65 image tokens and 12 text tokens."""
    text = config_of(build_tokenizer())
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
    )
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=WIDTH))


def train(examples: Examples, stage: Stage) -> CLIPModel:
    """Train the CLIP.

    Args:
        examples: images with one true and one wrong line each; their web captions are not used.
        stage: its steps, seed and checkpoint.

    Returns:
        The trained CLIP.
    """
    torch.manual_seed(stage.seed)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    tokenizer = build_tokenizer()
    right = token_ids(tokenizer, [line["prompt"] for line in examples.true_lines])
    wrong = token_ids(tokenizer, [line["prompt"] for line in examples.wrong_lines])

    def loss_of(generator: torch.Generator) -> Float[Tensor, ""]:
        index = torch.randint(len(right), (BATCH,), generator=generator)
        pixels = to_model_range(examples.images[index.numpy()])
        pixels = pixels + 0.05 * torch.randn(pixels.shape, generator=generator)
        output = model(input_ids=torch.cat([right[index], wrong[index]]), pixel_values=pixels)
        return contrastive_loss(output.logits_per_image)

    stage.run(model, optimizer, loss_of=loss_of, rate=partial(learning_rate, peak=1e-3), shift=2)
    return model.eval()


def contrastive_loss(logits: Float[Tensor, "B 2B"]) -> Float[Tensor, ""]:
    """Return CLIP's loss with wrong captions: three cross-entropies, averaged.

    They classify each image's caption among all true and wrong captions, each true caption's image among all images,
    and each image's true caption against its own wrong one.

    Args:
        logits: similarity of image i and caption j [B, 2B]; columns 0..B-1 are the images' true captions in order,
            B..2B-1 their wrong ones.

    Returns:
        The mean of the three cross-entropies, each a mean over the batch.
    """
    count = len(logits)
    truth = torch.arange(count)
    to_caption = functional.cross_entropy(logits, truth)
    to_image = functional.cross_entropy(logits[:, :count].T, truth)
    own = torch.stack([logits.diagonal(), logits[:, count:].diagonal()], dim=1)
    return (to_caption + to_image + functional.cross_entropy(own, torch.zeros_like(truth))) / 3


def write(model: CLIPModel, folder: Path) -> None:
    """Save model (float16), tokenizer and image processor as `folder`, and replace an older one."""
    size = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(
        size=size, do_center_crop=False, crop_size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    with replacing(folder) as partial:
        CLIPProcessor(images, build_tokenizer()).save_pretrained(partial)
        model.half().save_pretrained(partial)
    model.float()


@torch.no_grad()
def pair_accuracy(model: CLIPModel, processor: CLIPProcessor, examples: Examples) -> dict[str, float]:
    """Measure how often an image's true caption scores above its wrong one.

    Args:
        model: the CLIP.
        processor: its tokenizer and image processor.
        examples: images with one true and one wrong line each.

    Returns:
        The share of images in [0, 1], by task kind.
    """
    won: dict[str, list[bool]] = {}
    options: dict[str, Any] = {"return_tensors": "pt", "padding": "max_length"}
    for start in range(0, len(examples.images), 256):
        part = slice(start, start + 256)
        lines = [*examples.true_lines[part], *examples.wrong_lines[part]]
        texts, images = [line["prompt"] for line in lines], list(np.asarray(examples.images[part]))
        inputs = processor(text=texts, images=images, **options)
        logits = model(**inputs).logits_per_image
        half = len(logits)
        for line, right, wrong in zip(lines, logits.diagonal(), logits[:, half:].diagonal(), strict=False):
            won.setdefault(line["tag"], []).append(bool(right > wrong))
    return {tag: sum(wins) / len(wins) for tag, wins in won.items()}

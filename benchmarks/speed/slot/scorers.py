"""The scorers of photographs with random weights: GenEval's detector, and CLIP by precision."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import flow.device
from benchmarks.speed.slot.part import Figures, Where, tried
from benchmarks.speed.slot.timing import seconds_of
from rewards.clip.features import ClipFeatures
from rewards.geneval.photo_detector import PhotoDetector

OBJECTS = 6
"""Objects that the detector finds in its first image, more or less as in a generated one."""
SWIN_SMALL: dict[str, Any] = {"embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24], "window_size": 7}
TINY_SWIN: dict[str, Any] = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
STAGES: dict[str, Any] = {"out_features": [f"stage{number}" for number in range(1, 5)]}
TINY_HEAD: dict[str, Any] = {
    "feature_size": 32,
    "mask_feature_size": 32,
    "hidden_dim": 32,
    "encoder_feedforward_dim": 32,
    "dim_feedforward": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_attention_heads": 2,
}
VIT_L: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
VIT_H: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}
TINY_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def scorers(where: Where) -> Iterator[Figures]:
    """Measure images per second of the detector by the size of its input, and of CLIP by model and precision."""
    torch.use_deterministic_algorithms(mode=False)  # as in a reward actor: Mask2Former needs a cumsum
    images = np.random.default_rng(0).integers(0, 256, (16, *([32] * 2 if where.is_tiny else [512] * 2), 3), np.uint8)
    with TemporaryDirectory() as folder:
        clip = _write_clip(Path(folder) / "clip", where)
        for side in (64, 96) if where.is_tiny else (384, 800):
            segmenter = _write_segmenter(Path(folder) / str(side), side, where)
            yield tried(f"detector, {side} px", partial(_detector, segmenter, clip, images, where.device))
        features = ClipFeatures(str(clip), device=where.device)
        yield {"CLIP-L as a scorer, images/s of 16": 16 / seconds_of(lambda: features.of_images(images), rounds=3)}
    yield from _precisions(where)


def _detector(segmenter: Path, clip: Path, images: np.ndarray, device: str) -> Figures:
    """Measure it with a threshold at which the random model finds `OBJECTS` objects in the first image."""
    paths = {"model": str(segmenter), "clip": str(clip), "device": device}
    plain = [frozenset[str]()] * len(images)
    (all_found,) = PhotoDetector(**paths, threshold=0.0).detect(images[:1], plain[:1])
    scores = sorted((each.score for each in all_found), reverse=True)
    threshold = scores[min(OBJECTS, len(scores) - 1)]
    detector = PhotoDetector(**paths, threshold=threshold)
    found = detector.detect(images, plain)
    figures = {"objects an image": sum(map(len, found)) / len(images)}
    every = [frozenset(each.label for each in objects) for objects in found]
    with patch.object(flow.device, "tf32", lambda _: nullcontext()):
        exact = PhotoDetector(**paths, threshold=threshold).detect(images, every)
    of_exact, of_found = (
        [sorted((each.label, each.color or "") for each in objects) for objects in side]
        for side in (exact, detector.detect(images, every))
    )
    changed = sum(one != other for one, other in zip(of_exact, of_found, strict=True))
    figures[f"of {len(images)} images with other labels or colours in TF32"] = float(changed)
    for name, colored in ((f"images/s of {len(images)}", plain), ("images/s with every object's colour", every)):
        figures[name] = len(images) / seconds_of(partial(detector.detect, images, colored), rounds=1)
    return figures


def _precisions(where: Where) -> Iterator[Figures]:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    shape = TINY_VIT if where.is_tiny else VIT_H
    config = CLIPVisionConfig(**shape, image_size=224, patch_size=14, projection_dim=shape["hidden_size"] * 4 // 5)
    with torch.device(where.device):
        model: Any = CLIPVisionModelWithProjection(config).eval()
    normalize = torch.nn.functional.normalize
    seen, texts = torch.randn(16, 3, 224, 224), normalize(torch.randn(2000, config.projection_dim), dim=-1)
    exact: Any = None
    for name, dtype in (("float32", torch.float32), ("TF32", torch.float32), ("bfloat16", torch.bfloat16)):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "TF32"
        model.to(dtype)
        with torch.inference_mode():
            cosines = normalize(model(seen.to(where.device, dtype)).image_embeds.float().cpu(), dim=-1) @ texts.T
        exact = cosines if exact is None else exact
        yield {f"CLIP-H in {name}, most that a cosine changes": float((cosines - exact).abs().max())}
        for count in (1, 16):
            pixels = torch.randn(count, 3, 224, 224, device=where.device, dtype=dtype)
            work = torch.inference_mode()(partial(model, pixels))
            yield {f"CLIP-H in {name}, images/s of {count}": count / seconds_of(work, rounds=3)}


def _write_segmenter(folder: Path, side: int, where: Where) -> Path:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    swin = SwinConfig(**(TINY_SWIN if where.is_tiny else SWIN_SMALL), **STAGES, image_size=side)
    names = {index: f"thing {index}" for index in range(80)}
    config = Mask2FormerConfig(
        backbone_config=swin,
        id2label=names,
        label2id={name: index for index, name in names.items()},
        **(TINY_HEAD if where.is_tiny else {}),
    )
    with torch.device(where.device):
        model = Mask2FormerForUniversalSegmentation(config)
        torch.nn.init.normal_(model.class_predictor.weight, std=0.5)  # some queries are sure of their class
    model.save_pretrained(folder)
    longest = side * 2
    Mask2FormerImageProcessorPil(size={"shortest_edge": side, "longest_edge": longest}).save_pretrained(folder)
    return folder


def _write_clip(folder: Path, where: Where) -> Path:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from benchmarks.pretraining import tokenizer as words

    tokenizer = words.build()
    tokenizer.model_max_length = 77
    text = CLIPTextConfig(
        vocab_size=len(tokenizer), max_position_embeddings=77, **TINY_VIT, **words.mark_ids(tokenizer)
    )
    vision = CLIPVisionConfig(**(TINY_VIT if where.is_tiny else VIT_L), image_size=224, patch_size=14)
    with torch.device(where.device):
        model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    return folder

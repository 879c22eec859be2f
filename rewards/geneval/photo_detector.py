"""GenEval's detector for photographs, by pip alone: Mask2Former finds COCO's objects, CLIP names their colours.

    scorer = build_scorer("geneval", detector="rewards.geneval.photo_detector:PhotoDetector")

The original uses the same two models through mmdetection 2 and open_clip; here both come from transformers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from protocol.messages import Detection
from rewards.clip.features import ClipFeatures
from rewards.clip.pretrained import load_pretrained

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
GENEVAL_NAMES = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
}
"""What GenEval calls classes that label files of COCO call otherwise."""
GREY = 0x99
"""What stands around an object when its colour is asked for."""
MOST_INSTANCES = 100


class Instance(NamedTuple):
    """One object that the segmentation model found."""

    label: int
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray
    """bool [H, W]"""


class PhotoDetector:
    """Mask2Former (Swin-S, COCO instances) with CLIP ViT-L/14; weights are loaded when the first image comes.

    Weights: `facebook/mask2former-swin-small-coco-instance` (0.3 GB), `openai/clip-vit-large-patch14` (1.7 GB).
    """

    colors = frozenset(COLORS)

    def __init__(
        self,
        *,
        model: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "openai/clip-vit-large-patch14",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        per_class: int = 16,
        device: str | None = None,
    ) -> None:
        """Read the model's class names.

        Args:
            model: Mask2Former folder, `pkg://` path or hub id, trained for instances.
            clip: the CLIP that names colours.
            threshold: score above which an instance is an object.
            counting_threshold: score that an object needs where a prompt asks to count.
            per_class: objects of one class that are kept, best score first.
            device: torch device; default the GPU if there is one.

        Raises:
            ScorerError: no such model.
        """
        from transformers import Mask2FormerConfig

        config: Any = load_pretrained(Mask2FormerConfig.from_pretrained, model)
        self._names: dict[int, str] = {
            int(index): GENEVAL_NAMES.get(str(name), str(name)) for index, name in config.id2label.items()
        }
        self.labels = frozenset(self._names.values())
        self.counting_threshold = counting_threshold
        self._threshold = threshold
        self._per_class = per_class
        self._model_source, self._clip_source, self._device = model, clip, device
        self._colour_texts: dict[str, np.ndarray] = {}

    def detect(self, images: np.ndarray) -> list[list[Detection]]:
        """The objects of each image uint8 [B, H, W, 3], best score first, with their colours."""
        return [self._detect_one(image) for image in images]

    @cached_property
    def _segmenter(self) -> tuple[Any, Any, str]:
        import torch
        from transformers import Mask2FormerForUniversalSegmentation
        from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

        from flow.device import best_device

        device = self._device or best_device()
        model: Any = load_pretrained(
            Mask2FormerForUniversalSegmentation.from_pretrained, self._model_source, dtype=torch.float32
        )
        processor: Any = load_pretrained(Mask2FormerImageProcessorPil.from_pretrained, self._model_source)
        return model.to(device).eval().requires_grad_(requires_grad=False), processor, device

    @cached_property
    def _clip(self) -> ClipFeatures:
        return ClipFeatures(self._clip_source, device=self._device, batch=1)

    def _detect_one(self, image: np.ndarray) -> list[Detection]:
        import torch

        model, processor, device = self._segmenter
        inputs = processor(images=[image], return_tensors="pt").to(device)
        with torch.inference_mode():
            output = model(pixel_values=inputs.pixel_values, pixel_mask=inputs.pixel_mask)
        found = instances(
            output.class_queries_logits[0].cpu(),
            output.masks_queries_logits[0].cpu(),
            pixel_mask=inputs.pixel_mask[0].cpu(),
            size=(image.shape[0], image.shape[1]),
            threshold=self._threshold,
        )
        kept = _best_of_each_class(found, self._per_class)
        return [
            Detection(
                label=self._names[item.label],
                color=self._colour(image, item),
                box=item.box,
                score=item.score,
            )
            for item in kept
        ]

    def _colour(self, image: np.ndarray, item: Instance) -> str:
        """The colour whose sentences are nearest to the object on grey, all else cut away."""
        label = self._names[item.label]
        if label not in self._colour_texts:
            self._colour_texts[label] = np.stack([self._sentences(color, label) for color in COLORS])
        left, top, right, bottom = (int(edge) for edge in item.box)
        alone = np.where(item.mask[..., None], image, np.uint8(GREY))[top:bottom, left:right]
        return COLORS[int((self._colour_texts[label] @ self._clip.of_images(alone[None])[0]).argmax())]

    def _sentences(self, color: str, label: str) -> np.ndarray:
        """Mean direction of the templates for one colour of one class, of length 1."""
        mean = self._clip.of_texts([template.format(color=color, label=label) for template in TEMPLATES]).mean(0)
        return mean / np.linalg.norm(mean)


def instances(
    class_logits: Any, mask_logits: Any, *, pixel_mask: Any, size: tuple[int, int], threshold: float
) -> list[Instance]:
    """Mask2Former's instances (Cheng et al. 2022, arXiv 2112.01527), best score first.

        score = softmax(class)_c * mean of sigmoid(mask) over the pixels where mask > 0

    over the best 100 pairs of query and class; the box is the mask's extent. An empty mask is no instance.

    Args:
        class_logits: float [Q, C + 1], the last class being "nothing".
        mask_logits: float [Q, h, w] over the padded input.
        pixel_mask: int [H', W'], 1 where the input is image and not padding.
        size: H, W of the image.
        threshold: scores must be above it.
    """
    from torch.nn import functional

    queries, classes = len(class_logits), class_logits.shape[-1] - 1
    shares = class_logits.softmax(-1)[:, :-1].flatten()
    best = shares.topk(min(MOST_INSTANCES, queries * classes)).indices
    best = best[shares[best] > threshold]
    padded = functional.interpolate(mask_logits[None], size=tuple(pixel_mask.shape), mode="bilinear")[0]
    rows, columns = int(pixel_mask[:, 0].sum()), int(pixel_mask[0].sum())
    full = functional.interpolate(padded[None, :, :rows, :columns], size=size, mode="bilinear")[0]
    found = []
    for index in best.tolist():
        query, label = divmod(index, classes)
        inside = full[query] > 0
        if not inside.any():
            continue
        score = float(shares[index] * full[query].sigmoid()[inside].mean())
        ys, xs = np.nonzero(inside.numpy())
        box = (float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1))
        if score > threshold:
            found.append(Instance(label, score, box, inside.numpy()))
    return sorted(found, key=lambda item: -item.score)


def _best_of_each_class(found: Sequence[Instance], most: int) -> list[Instance]:
    seen: dict[int, int] = {}
    kept = []
    for item in found:
        seen[item.label] = seen.get(item.label, 0) + 1
        if seen[item.label] <= most:
            kept.append(item)
    return kept

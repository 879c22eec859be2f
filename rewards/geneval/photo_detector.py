"""GenEval's detector for photographs: Mask2Former finds COCO's objects, CLIP names their colours.

    scorer = build_scorer("geneval", detector="rewards.geneval.photo_detector:PhotoDetector")

Both models come from transformers, so pip can install everything. The original uses the same two models through
mmdetection 2 and open_clip.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from protocol.messages import Detection
from rewards.clip.features import VIT_L, ClipFeatures
from rewards.pretrained import WEIGHTS, load_pretrained, require_pretrained, require_whole

MODEL = "facebook/mask2former-swin-small-coco-instance"
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
"""GenEval's names of classes that have other names in COCO's label files."""
GREY = 0x99
"""Grey level (0-255) of the background of an object whose colour is classified."""
MOST_INSTANCES = 100
"""Largest number of pairs of query and class that are considered, best score first."""


class Instance(NamedTuple):
    """One object that the segmentation model found."""

    label: int
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray
    """bool [H, W]"""


class PhotoDetector:
    """Mask2Former (Swin-S, COCO instances) with CLIP ViT-L/14; the first image loads the weights.

    Weights: `facebook/mask2former-swin-small-coco-instance` (0.3 GB), `openai/clip-vit-large-patch14` (1.7 GB).
    """

    colors = frozenset(COLORS)

    def __init__(
        self,
        *,
        model: str = MODEL,
        clip: str = VIT_L,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        per_class: int = 16,
        device: str | None = None,
    ) -> None:
        """Read the model's class names.

        Args:
            model: folder, `pkg://` path or hub id of a Mask2Former for instance segmentation.
            clip: folder, `pkg://` path or hub id of the CLIP that names colours.
            threshold: an instance with a score above it is an object, in [0, 1].
            counting_threshold: the same for counting prompts, in [0, 1].
            per_class: most objects of one class, best score first.
            device: torch device; by default the GPU if there is one.

        Raises:
            ScorerError: the model's config cannot be loaded.
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

    @staticmethod
    def ready(*, model: str = MODEL, clip: str = VIT_L, **_: Any) -> None:
        """Raise ScorerError if the weights of one of the two models are missing."""
        require_pretrained(model, *WEIGHTS)
        from transformers import Mask2FormerForUniversalSegmentation

        require_whole(Mask2FormerForUniversalSegmentation.from_pretrained, model)
        ClipFeatures.ready(clip)

    def detect(self, images: np.ndarray) -> list[list[Detection]]:
        """Detect the objects of each image uint8 [B, H, W, 3], with their colours, best score first."""
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
        """Return the colour whose sentences are nearest to the object, cropped and on a grey background."""
        label = self._names[item.label]
        if label not in self._colour_texts:
            self._colour_texts[label] = np.stack([self._sentences(color, label) for color in COLORS])
        left, top, right, bottom = (int(edge) for edge in item.box)
        alone = np.where(item.mask[..., None], image, np.uint8(GREY))[top:bottom, left:right]
        return COLORS[int((self._colour_texts[label] @ self._clip.of_images(alone[None])[0]).argmax())]

    def _sentences(self, color: str, label: str) -> np.ndarray:
        """Return the mean text feature of the templates for one colour of one class, normalised to length 1."""
        mean = self._clip.of_texts([template.format(color=color, label=label) for template in TEMPLATES]).mean(0)
        return mean / np.linalg.norm(mean)


def instances(
    class_logits: Any, mask_logits: Any, *, pixel_mask: Any, size: tuple[int, int], threshold: float
) -> list[Instance]:
    """Compute Mask2Former's instances (Cheng et al. 2022, arXiv 2112.01527) from its outputs for one image.

        score = softmax(class)_c * mean of sigmoid(mask) over the pixels where mask > 0

    Only the best 100 pairs of query and class are considered. The box is the extent of the mask. An empty mask is not
    an instance.

    Args:
        class_logits: float [Q, C + 1]; the last class means "no object".
        mask_logits: float [Q, h, w] over the padded input.
        pixel_mask: int [H', W'], 1 for pixels of the image and 0 for padding.
        size: H, W of the image in pixels.
        threshold: an instance's score must be above it.

    Returns:
        The instances, best score first.
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

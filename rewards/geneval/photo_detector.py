"""GenEval's detector for photographs: Mask2Former finds COCO's objects, CLIP names their colours.

    scorer = build_scorer("geneval", detector="rewards.geneval.photo_detector:PhotoDetector")

Both models come from transformers, so pip can install everything. The original uses the same two models through
mmdetection 2 and open_clip.
"""

from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from protocol.errors import ScorerError
from protocol.ground.resources import resolve
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
    box: tuple[int, int, int, int]
    mask: np.ndarray
    """bool [H, W]"""


class PhotoDetector:
    """Mask2Former (Swin-S, COCO instances) with CLIP ViT-L/14; the first image loads the weights.

    Both are float32; on a GPU they multiply in TF32. There images go in batches of one fixed shape, the last one filled
    up with black images; on a CPU they go one by one. So what is found in an image does not depend on its neighbours.

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
        batch: int = 8,
    ) -> None:
        """Read the model's class names.

        Args:
            model: folder, `pkg://` path or hub id of a Mask2Former for instance segmentation.
            clip: folder, `pkg://` path or hub id of the CLIP that names colours.
            threshold: an instance with a score above it is an object, in [0, 1].
            counting_threshold: the same for counting prompts, in [0, 1].
            per_class: most objects of one class, best score first.
            batch: images of one forward on a GPU, at least 1; 8 of 800 pixels at once need, by count, 5.4 GiB beside
                the weights.

        Raises:
            ScorerError: the model's config cannot be loaded.
        """
        from transformers import Mask2FormerConfig

        if batch < 1:
            raise ScorerError(f"batch of the detector must be at least 1, got {batch}: raise it")
        config: Any = load_pretrained(Mask2FormerConfig.from_pretrained, model)
        self._names: dict[int, str] = {
            int(index): GENEVAL_NAMES.get(str(name), str(name)) for index, name in config.id2label.items()
        }
        self.labels = frozenset(self._names.values())
        self.counting_threshold = counting_threshold
        self._threshold = threshold
        self._per_class = per_class
        self._model_source, self._clip_source, self._device, self._batch = model, clip, device, batch
        self._colour_texts: dict[str, np.ndarray] = {}

    @staticmethod
    def ready(*, model: str = MODEL, clip: str = VIT_L, **_: Any) -> None:
        """Raise ScorerError if one of the two models is missing or not whole."""
        require_pretrained(model, *WEIGHTS)
        require_pretrained(model, "preprocessor_config.json", "processor_config.json")
        from transformers import Mask2FormerForUniversalSegmentation
        from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

        require_whole(Mask2FormerForUniversalSegmentation.from_pretrained, model)
        if resolve(model).is_dir():
            load_pretrained(Mask2FormerImageProcessorPil.from_pretrained, model)
        ClipFeatures.ready(clip)

    def detect(self, images: np.ndarray, colored: Sequence[Set[str]]) -> list[list[Detection]]:
        """Detect the objects of each image uint8 [B, H, W, 3], best score first; see `Detector`."""
        size = self.images_per_forward
        return [
            objects
            for start in range(0, len(images), size)
            for objects in self._detect(images[start : start + size], colored[start : start + size])
        ]

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
        return ClipFeatures(self._clip_source, device=self._device, batch=self._batch)

    @property
    def images_per_forward(self) -> int:
        """Images of one forward: on a CPU the rounding of a row may depend on its position in the batch."""
        return 1 if self._segmenter[2] == "cpu" else self._batch

    def _detect(self, images: np.ndarray, colored: Sequence[Set[str]]) -> list[list[Detection]]:
        kept = [_best_of_each_class(objects, self._per_class) for objects in self._instances(images)]
        named = [[(self._names[item.label], item) for item in objects] for objects in kept]
        asked = [
            (label, item, image)
            for image, objects, labels in zip(images, named, colored, strict=True)
            for label, item in objects
            if label in labels
        ]
        colors = iter(self._colors(asked))
        return [
            [
                Detection(label=label, color=next(colors) if label in labels else None, box=item.box, score=item.score)
                for label, item in objects
            ]
            for objects, labels in zip(named, colored, strict=True)
        ]

    def _instances(self, images: np.ndarray) -> list[list[Instance]]:
        import torch

        from flow.device import tf32

        model, processor, device = self._segmenter
        filled = np.zeros((self.images_per_forward, *images.shape[1:]), np.uint8)
        filled[: len(images)] = images
        pixels, pixel_mask = prepared(processor, filled, device)
        with torch.inference_mode(), tf32(device):
            output = model(pixel_values=pixels, pixel_mask=pixel_mask.to(device))
        classes = output.class_queries_logits.cpu()
        return [
            instances(
                classes[row],
                output.masks_queries_logits[row],
                pixel_mask=pixel_mask[row],
                size=(images.shape[1], images.shape[2]),
                threshold=self._threshold,
            )
            for row in range(len(images))
        ]

    def _colors(self, asked: Sequence[tuple[str, Instance, np.ndarray]]) -> list[str]:
        """Return the colour of each object whose sentences are nearest to it, cropped and on a grey background."""
        if not asked:
            return []
        alone = []
        for _, item, image in asked:
            left, top, right, bottom = item.box
            inside = item.mask[top:bottom, left:right, None]
            alone.append(np.where(inside, image[top:bottom, left:right], np.uint8(GREY)))
        features = self._clip.of_images(alone)
        texts = [self._of_colors(label) for label, _, _ in asked]
        return [COLORS[int((text @ feature).argmax())] for text, feature in zip(texts, features, strict=True)]

    def _of_colors(self, label: str) -> np.ndarray:
        """Return the features of a class's sentences, one row for each of `COLORS`."""
        if label not in self._colour_texts:
            self._colour_texts[label] = np.stack([self._sentences(color, label) for color in COLORS])
        return self._colour_texts[label]

    def _sentences(self, color: str, label: str) -> np.ndarray:
        """Return the mean text feature of the templates for one colour of one class, normalised to length 1."""
        mean = self._clip.of_texts([template.format(color=color, label=label) for template in TEMPLATES]).mean(0)
        return mean / np.linalg.norm(mean)


def prepared(processor: Any, images: np.ndarray, device: str) -> tuple[Any, Any]:
    """Resize images as the processor does; scale and normalise them on the device, where it costs the CPU nothing.

    Args:
        processor: the model's image processor.
        images: uint8 [B, H, W, 3].
        device: torch device of the pixels.

    Returns:
        Pixels float32 [B, 3, H', W'], 0 in the padding, and the pixel mask int [B, H', W'] on the CPU.
    """
    import torch

    whole = processor(images=list(images), do_rescale=False, do_normalize=False, return_tensors="pt")
    mean, std = (
        torch.tensor(each, device=device)[:, None, None] for each in (processor.image_mean, processor.image_std)
    )
    pixels = (whole.pixel_values.to(device) * processor.rescale_factor - mean) / std
    return pixels * whole.pixel_mask.to(device)[:, None], whole.pixel_mask


def instances(
    class_logits: Any, mask_logits: Any, *, pixel_mask: Any, size: tuple[int, int], threshold: float
) -> list[Instance]:
    """Compute Mask2Former's instances (Cheng et al. 2022, arXiv 2112.01527) from its outputs for one image.

        score = softmax(class)_c * mean of sigmoid(mask) over the pixels where mask > 0

    Only the best 100 pairs of query and class are considered. The box is the extent of the mask. An empty mask is not
    an instance.

    Args:
        class_logits: float [Q, C + 1] on the CPU; the last class means "no object".
        mask_logits: float [Q, h, w] over the padded input, on any device.
        pixel_mask: int [H', W'], 1 for pixels of the image and 0 for padding.
        size: H, W of the image in pixels.
        threshold: an instance's score must be above it.

    Returns:
        The instances, best score first.
    """
    import torch
    from torch.nn import functional

    queries, classes = len(class_logits), class_logits.shape[-1] - 1
    shares = class_logits.softmax(-1)[:, :-1].flatten()
    best = shares.topk(min(MOST_INSTANCES, queries * classes)).indices
    best = best[shares[best] > threshold]
    if not len(best):
        return []
    kept, slots = (best // classes).unique(return_inverse=True)
    chosen = mask_logits[kept.to(mask_logits.device)][None]
    chosen = chosen.contiguous(memory_format=torch.channels_last)  # a CPU then interpolates twice as fast
    padded = functional.interpolate(chosen, size=tuple(pixel_mask.shape), mode="bilinear")
    rows, columns = int(pixel_mask[:, 0].sum()), int(pixel_mask[0].sum())
    full = functional.interpolate(padded[:, :, :rows, :columns], size=size, mode="bilinear")[0].contiguous()
    inside = full > 0
    masks = inside.cpu().numpy()
    means = full.sigmoid_().mul_(inside).sum((1, 2)).cpu() / torch.from_numpy(np.count_nonzero(masks, (1, 2)))
    scores = shares[best] * means[slots]  # NaN for an empty mask
    found = []
    for index, slot, score in zip(best.tolist(), slots.tolist(), scores.tolist(), strict=True):
        if score > threshold:
            sides = (masks[slot].any(1), masks[slot].any(0))
            top, bottom, left, right = (int(edge) for side in sides for edge in np.flatnonzero(side)[[0, -1]])
            found.append(Instance(index % classes, score, (left, top, right + 1, bottom + 1), masks[slot]))
    return sorted(found, key=lambda item: -item.score)


def _best_of_each_class(candidates: Sequence[Instance], most: int) -> list[Instance]:
    seen: dict[int, int] = {}
    kept = []
    for item in candidates:
        seen[item.label] = seen.get(item.label, 0) + 1
        if seen[item.label] <= most:
            kept.append(item)
    return kept

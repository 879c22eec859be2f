"""How much of the first condition image an edited image keeps: by features, or pixel by pixel outside a mask."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.errors import PromptError
from protocol.messages import Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards.images import resized
from rewards.pretrained import WEIGHTS, load_pretrained, require_pretrained, require_whole
from rewards.scores import partly, scored

DINO = "facebook/dino-vits16"
MEAN, STD = (np.array(each, np.float32) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
GOOD_DB = 50.0
"""PSNR that counts as 1; two images that differ by rounding in every pixel have 48 dB."""
MOST_DB = 100.0
"""PSNR that is reported for equal images."""


class Consistency:
    """The cosine of DINO's ViT-S/16 features of both images, as MagicBrush computes it (arXiv 2306.10012)."""

    name = "consistency"
    low, high = -1.0, 1.0
    components = ()

    def __init__(self, *, model: str = DINO, device: str | None = None) -> None:
        """Load the weights.

        Args:
            model: folder, `pkg://` path or hub id of a ViT.

        Raises:
            ScorerError: they cannot be loaded.
        """
        self._dino = Dino(model, device=device)

    @staticmethod
    def ready(*, model: str = DINO, **_: Any) -> None:
        Dino.ready(model)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],  # noqa: ARG002
        metadata: Sequence[Metadata],  # noqa: ARG002
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        return scored([self._dino.cosine(image, row[0]) for image, row in zip(images, conditions, strict=True)])


class MaskedPsnr:
    """PSNR of what a mask leaves out, as PIE-Bench computes it (arXiv 2310.01506), divided by 50 dB and at most 1.

    The mask's pixels and a rim of one pixel are black in both images, and the mean runs over all pixels; the edited
    image is resized to the other. The component `psnr` is in dB. Metadata: `mask`, what the edit may change,
    `{"size": [rows, columns], "runs": [start, length, …]}` over the pixels row by row, PIE-Bench's form; it may have
    fewer pixels than the image. `mask_runs` writes one.

    Worked number: one channel that changes by 51 of 255 in one of 4 x 6 pixels makes 32.55 dB.
    """

    name = "masked_psnr"
    low, high = 0.0, 1.0
    components = ("psnr",)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that every prompt has a mask (PromptError names the line of one without)."""
        check_each(prompts, lambda prompt: mask_of(prompt.metadata))

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],  # noqa: ARG002
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        decibels = [
            psnr_outside(resized(image, *row[0].shape[:2]), row[0], mask_of(facts))
            for image, row, facts in zip(images, conditions, metadata, strict=True)
        ]
        reasons = ["the mask leaves nothing to compare" if math.isnan(each) else "" for each in decibels]
        return partly([min(each, GOOD_DB) / GOOD_DB for each in decibels], reasons, {"psnr": decibels})


class Dino:
    """DINO's feature of an image; images go through the model one by one, so no other image changes it."""

    def __init__(self, model: str, *, device: str | None) -> None:
        import torch
        from transformers import ViTModel

        from flow.device import best_device

        self._torch, self._device = torch, device or best_device()
        loaded: Any = load_pretrained(ViTModel.from_pretrained, model, dtype=torch.float32, add_pooling_layer=False)
        self._model: Any = loaded.to(self._device).eval().requires_grad_(requires_grad=False)

    @staticmethod
    def ready(model: str) -> None:
        """Check that the weights are there and whole (ScorerError)."""
        from transformers import ViTModel

        require_pretrained(model, "config.json")
        require_pretrained(model, *WEIGHTS)
        require_whole(ViTModel.from_pretrained, model, add_pooling_layer=False)

    def cosine(self, one: np.ndarray, other: np.ndarray) -> float:
        """Return the cosine of the features of two images uint8 [H, W, 3]."""
        first, second = self._feature(one), self._feature(other)
        return float(np.clip(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)), -1, 1))

    def _feature(self, image: np.ndarray) -> np.ndarray:
        """Return the state of the class token, of the middle square as MagicBrush cuts it."""
        side = self._model.config.image_size
        shorter = side * 256 // 224
        height, width = image.shape[:2]
        scale = shorter / min(height, width)
        size = (shorter, int(width * scale)) if height <= width else (int(height * scale), shorter)
        whole = resized(image, *size)
        top, left = (round((edge - side) / 2) for edge in size)
        pixels = (whole[top : top + side, left : left + side] / np.float32(255) - MEAN) / STD
        tensor = self._torch.from_numpy(pixels).permute(2, 0, 1)[None].to(self._device)
        with self._torch.inference_mode():
            state = self._model(pixel_values=tensor).last_hidden_state[0, 0]
        return state.float().cpu().numpy().astype(np.float64)


def psnr_outside(edited: np.ndarray, source: np.ndarray, mask: np.ndarray) -> float:
    """Return the PSNR in dB of two images outside a mask, at most `MOST_DB`; NaN if the mask leaves nothing.

    Args:
        edited: uint8 [H, W, 3].
        source: of the same shape.
        mask: bool [h, w], True where the images may differ; it is stretched to the images.
    """
    height, width = source.shape[:2]
    rows, columns = (np.arange(edge) * small // edge for edge, small in zip((height, width), mask.shape, strict=True))
    outside = ~mask[rows][:, columns]
    outside[[0, -1]] = outside[:, [0, -1]] = False
    if not outside.any():
        return math.nan
    apart = (edited.astype(np.float64) - source) / 255
    error = float(np.square(apart * outside[..., None]).mean())
    return min(-10 * math.log10(error), MOST_DB) if error else MOST_DB


def mask_of(facts: Metadata) -> np.ndarray:
    """Read the mask of a prompt, bool [rows, columns] (PromptError: there is none, or it has another form)."""
    found = facts.get("mask")
    try:
        rows, columns = map(int, found["size"])  # type: ignore[index]
        runs = np.array(found["runs"], np.int64).reshape(-1, 2)  # type: ignore[index]
        mask = np.zeros(rows * columns, bool)
        if (runs < 0).any() or (runs[:, 0] >= max(mask.size, 1)).any() or not mask.size:
            raise ValueError
    except (TypeError, ValueError, KeyError, OverflowError):
        raise PromptError(
            'masked_psnr needs mask, {"size": [rows, columns], "runs": [start, length, …]} with runs inside, got'
            f" {str(found)[:80]!r}"
        ) from None
    for start, length in runs:
        mask[start : start + length] = True
    return mask.reshape(rows, columns)


def mask_runs(mask: np.ndarray) -> dict[str, list[int]]:
    """Write a mask, bool [rows, columns], as metadata."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.ravel().astype(np.int8), [0]])))
    runs = np.stack([edges[::2], edges[1::2] - edges[::2]], 1)
    return {"size": list(mask.shape), "runs": runs.ravel().tolist()}

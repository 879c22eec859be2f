"""CLIP features that do not depend on the other images and texts of a call, and the base class of their scorers.

Weights and features are float32; on a GPU matrices are multiplied in TF32. There images go through the model in batches
of one fixed shape; the last batch is filled up. On a CPU they go through it one by one, because there the rounding of a
row may depend on its position in the batch (MKL's AVX2 kernels). Texts always go one by one. Text features are cached,
because the prompts of a run repeat.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from protocol.errors import ScorerError
from protocol.ground.pretrained import require_vocabulary
from protocol.ground.resources import resolve
from protocol.messages import Prompt
from rewards.pretrained import WEIGHTS, load_pretrained, require_pretrained, require_whole

VIT_L = "openai/clip-vit-large-patch14"
ROUNDING = 1e-4
"""Relative tolerance of a score's bounds, for rounding in float32 sums."""
TEXTS_KEPT = 8192
"""Largest number of texts whose features are cached; each takes 4 KiB at width 1,024."""


class ClipFeatures:
    """A frozen float32 CLIP with its processor; its only state is the cache of text features.

    TF32, imitated on a CPU, changes PickScore by 2e-4; bfloat16 would by 1.8e-3, more than the 1e-3 that we allow.

    clip = ClipFeatures("openai/clip-vit-large-patch14")
    cosines = clip.cosines(images, prompts)
    """

    def __init__(
        self,
        model: str,
        *,
        processor: str | None = None,
        device: str | None = None,
        batch: int = 16,
        fits: bool = False,
    ) -> None:
        """Load the weights.

        Args:
            model: CLIP folder in transformers' format, `pkg://` path or hub id.
            processor: source of tokenizer and image processor; by default `model`.
            batch: images of one forward on a GPU, at least 1.
            fits: whether to see the whole image (`letterboxed`), not the middle square that the processor cuts out.

        Raises:
            ScorerError: weights or processor cannot be loaded.
        """
        import torch
        from transformers import CLIPModel

        from flow.device import best_device, tf32

        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}: raise it")
        self._torch, self._tf32 = torch, tf32
        self._device = device or best_device()
        loaded: Any = load_pretrained(CLIPModel.from_pretrained, model, dtype=torch.float32)
        self._model = loaded.to(self._device).eval().requires_grad_(requires_grad=False)
        self._tokenizer, self._images = _read_processor(processor or model, loaded)
        self._length = loaded.config.text_config.max_position_embeddings
        self._fits = fits
        self._batch = batch if self._torch.device(self._device).type != "cpu" else 1
        self._of_text = lru_cache(maxsize=TEXTS_KEPT)(self._encode_text)

    @staticmethod
    def ready(model: str, processor: str | None = None) -> Any:
        """Check weights and processor; the arguments are the constructor's.

        Returns:
            The model without memory; None if its weights are not here.

        Raises:
            ScorerError: they are missing or not whole.
        """
        require_pretrained(model, *WEIGHTS)
        require_pretrained(processor or model, "preprocessor_config.json", "processor_config.json")
        from transformers import CLIPModel

        outline = require_whole(CLIPModel.from_pretrained, model)
        if resolve(processor or model).is_dir():
            _read_processor(processor or model, outline)
        return outline

    @property
    def width(self) -> int:
        """Length of a feature."""
        return self._model.config.projection_dim

    @property
    def scale(self) -> float:
        """exp(logit_scale), the factor by which CLIP multiplies its cosines."""
        return float(self._model.logit_scale.exp())

    def of_images(self, images: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
        """Return features float32 [B, D] of length 1, of images uint8 [H, W, 3], which may differ in size."""
        given = (
            [letterboxed(image, self._images.crop_size["height"]) for image in images] if self._fits else list(images)
        )
        whole = {"do_resize": False, "do_center_crop": False, "do_rescale": False} if self._fits else {}
        pixels = self._images(images=given, return_tensors="pt", **whole).pixel_values
        filling = -len(pixels) % self._batch
        filled = self._torch.cat([pixels, pixels.new_zeros(filling, *pixels.shape[1:])])
        with self._torch.inference_mode(), self._tf32(self._device):
            parts = [self._model.get_image_features(part.to(self._device)) for part in filled.split(self._batch)]
        features = self._torch.cat([part.pooler_output for part in parts])[: len(pixels)]
        return _numpy(_unit(features))

    def of_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return features float32 [B, D] of length 1; a text is truncated to the model's context."""
        return np.stack([self._of_text(text) for text in texts])

    def cosines(self, images: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """Return the cosine float32 [B] of each image uint8 [B, H, W, 3] and its text."""
        return (self.of_images(images) * self.of_texts(texts)).sum(-1)

    def _encode_text(self, text: str) -> np.ndarray:
        options = {"padding": "max_length", "max_length": self._length, "truncation": True, "return_tensors": "pt"}
        tokens = self._tokenizer([text], **options).to(self._device)
        with self._torch.inference_mode(), self._tf32(self._device):
            output = self._model.get_text_features(
                input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
            ).pooler_output
        return _numpy(_unit(output))[0]


def letterboxed(image: np.ndarray, side: int) -> np.ndarray:
    """Fit an image into a square: its longer side gets `side` pixels, and the rest is black.

    Args:
        image: uint8 [H, W, 3].
        side: height and width of the square in pixels.

    Returns:
        float32 [3, side, side], 0 to 1 but for the overshoot of bicubic resizing with antialiasing.
    """
    import torch
    from torch.nn import functional

    longest = max(image.shape[:2])
    size = [round(edge * (side / longest)) for edge in image.shape[:2]]
    pixels = torch.tensor(image).permute(2, 0, 1)[None] / 255
    inner = functional.interpolate(pixels, size=size, mode="bicubic", antialias=True)[0]
    down, across = side - size[0], side - size[1]
    return functional.pad(inner, (across // 2, across - across // 2, down // 2, down - down // 2)).numpy()


class ClipScorer:
    """Base class of the scorers with CLIP features; it has no `score` itself."""

    def __init__(self, *, model: str = VIT_L, device: str | None = None, batch: int = 16) -> None:
        self._clip = ClipFeatures(model, device=device, batch=batch)

    @staticmethod
    def ready(*, model: str = VIT_L, **_: Any) -> None:
        ClipFeatures.ready(model)

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...


def _read_processor(source: str, model: Any) -> tuple[Any, Any]:
    """Read tokenizer and image processor, and check that they fit the model; None checks nothing."""
    from transformers import CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer: Any = load_pretrained(CLIPTokenizer.from_pretrained, source)
    images: Any = load_pretrained(CLIPImageProcessorPil.from_pretrained, source)
    if model is not None:
        what = f"the tokenizer of {source!r}"
        require_vocabulary(tokenizer, model.text_model, what=what, error=ScorerError)
        side = model.config.vision_config.image_size
        if images.crop_size["height"] != side:
            raise ScorerError(
                f"the image processor of {source!r} must crop images to the model's {side} pixels, got"
                f" {images.crop_size['height']}: give this model's own"
            )
    return tokenizer, images


def _unit(features: Any) -> Any:
    return features / features.norm(dim=-1, keepdim=True)


def _numpy(features: Any) -> np.ndarray:
    return features.float().cpu().numpy()

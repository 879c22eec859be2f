"""Further scorers that use CLIP features: CLIPScore, HPSv2, the LAION aesthetic predictor, and diversity.

scorer = build_scorer("clipscore", model="openai/clip-vit-large-patch14")
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.messages import Metadata, Scores
from rewards.checkpoint import holds_tensors, linear_head, read_tensors
from rewards.clip.features import ROUNDING, VIT_L, ClipFeatures, ClipScorer
from rewards.pretrained import load_pretrained, require_pretrained
from rewards.scores import partly, scored


class ClipScore(ClipScorer):
    """CLIPScore (Hessel et al. 2021, arXiv 2104.08718): 2.5 max(cos(text, image), 0), in [0, 2.5].

    Weights: a CLIP, by default `openai/clip-vit-large-patch14` (1.7 GB).
    """

    name = "clipscore"
    low = 0.0
    high = 2.5 * (1 + ROUNDING)

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        return scored(2.5 * np.maximum(self._clip.cosines(images, prompts), 0.0))


class HPSv2(ClipScorer):
    """Human Preference Score v2 (Wu et al. 2023, arXiv 2306.09341): cos(text, image), in [-1, 1].

    As in the release (`light_augmentation` in github.com/tgxs002/HPSv2) an image is fitted into CLIP's square, not cut.

    Weights: HPSv2's ViT-H/14 as a CLIP folder of transformers. The authors publish an open_clip checkpoint;
    `python -m rewards.clip.openclip HPS_v2.1_compressed.pt FOLDER` converts it.
    """

    name = "hpsv2"
    low = -1.0 - ROUNDING
    high = 1.0 + ROUNDING

    def __init__(self, *, model: str, processor: str | None = None, device: str | None = None, batch: int = 16) -> None:
        """
        Args:
            model: CLIP folder with HPSv2's weights, `pkg://` path or hub id.
            processor: source of tokenizer and image processor; by default `model`.
        """
        self._clip = ClipFeatures(model, processor=processor, device=device, batch=batch, fits=True)

    @staticmethod
    def ready(*, model: str, processor: str | None = None, **_: Any) -> None:  # pyrefly: ignore[bad-override]
        ClipFeatures.ready(model, processor)

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        return scored(self._clip.cosines(images, prompts))


class Aesthetic(ClipScorer):
    """LAION's aesthetic predictor: a small network on CLIP's image features of length 1; about 1 to 10, unbounded.

    Weights: `openai/clip-vit-large-patch14` (1.7 GB), and the head `sac+logos+ava1-l14-linearMSE` (4 MB) as a
    `.safetensors` or `.pth` file with `layers.N.weight` and `layers.N.bias`. The head is a sequence of linear layers;
    its dropout layers do nothing in inference.
    """

    name = "aesthetic"
    low = float("-inf")
    high = float("inf")

    def __init__(self, *, head: str, model: str = VIT_L, device: str | None = None, batch: int = 16) -> None:
        """Load the weights.

        Args:
            model: folder, `pkg://` path or hub id of the CLIP that computes the head's input.

        Raises:
            ScorerError: a file cannot be read, or the head does not fit this CLIP.
        """
        super().__init__(model=model, device=device, batch=batch)
        self._head = _read_head(head, inputs=self._clip.width).double()

    @staticmethod
    def ready(*, head: str, model: str = VIT_L, **_: Any) -> None:  # pyrefly: ignore[bad-override]
        """Check that the files exist, and that the head fits this CLIP (ScorerError)."""
        require_pretrained(head)
        clip = ClipFeatures.ready(model)
        _read_head(head, inputs=clip and clip.config.projection_dim, is_outline=True)

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        import torch

        with torch.inference_mode():
            return scored(self._head(torch.from_numpy(self._clip.of_images(images)).double())[:, 0].numpy())


class Diversity(ClipScorer):
    """How far an image lies from the others of its group: mean of 1 - cosine of CLIP's image features, in [0, 2].

    Weights: a CLIP, by default `openai/clip-vit-large-patch14` (1.7 GB). For the held-out images of a prompt, with
    `use: evaluate`; a prompt whose images cannot be scored is left out.

    Worked number: images with the features (1, 0) and (0, 1) have 1 each, those of a prompt with (1, 0) twice 0; the
    mean over both prompts is ½.
    """

    name = "diversity"
    low = -ROUNDING
    high = 2.0 + ROUNDING
    sees = "group"

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        if len(images) < 2:
            return partly([0.0] * len(images), ["it has no other image in its group"] * len(images))
        features = self._clip.of_images(images).astype(np.float64)
        cosines = features @ features.T
        return scored(1 - (cosines.sum(1) - cosines.diagonal()) / (len(images) - 1))


def _read_head(path: str, *, inputs: int | None, is_outline: bool = False) -> Any:
    """Return the head's linear layers; `inputs` is the width of the features, None if it is unknown."""
    import torch

    tensors = load_pretrained(read_tensors, path, file=path, is_outline=is_outline)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with holds_tensors(path, "an aesthetic head", "give the head of this CLIP") as require_names:
        with torch.device("meta" if is_outline else "cpu"):
            head = linear_head(shapes, "layers", inputs=inputs or shapes["layers.0.weight"][1], outputs=1)
        names = {f"layers.{name}" for name in head.state_dict()}
        require_names(names - shapes.keys(), shapes.keys() - names)
        head.load_state_dict({name.removeprefix("layers."): tensor.float() for name, tensor in tensors.items()})
    return head

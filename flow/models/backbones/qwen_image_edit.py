"""The models of Qwen-Image that edit: Qwen-Image-Edit with one condition image, Edit-2509 and 2511 with several.

Qwen2.5-VL reads the images with the text. As latents they follow the tokens of the image that is made. With
transformers 5, diffusers' pipelines number the image tokens in Qwen2.5-VL like words (its issue 14194); ours does not.
Where torchvision is installed a pipeline resizes the images for Qwen2.5-VL with it instead of Pillow, which differs by
rounding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flow.models.backbones.qwen_image import QwenImage
from flow.models.contract import EMBEDS, Conditioning
from flow.models.families import QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS
from flow.models.located import Sizes
from protocol.config.model import ModelConfig


class QwenImageEdit(QwenImage):
    """A `QwenImageEditPipeline` as a `Backbone`. A prompt has one condition image."""

    family = QWEN_IMAGE_EDIT
    read_as = ""
    """What the template lacks for each image before the text; `{}` is its number."""

    @classmethod
    def read_size(cls, width: int, height: int, side: int) -> tuple[int, int]:
        """Return width and height in pixels of a condition image for Qwen2.5-VL."""
        return _dimensions(width, height, side)

    @classmethod
    def condition_size(cls, width: int, height: int, *, side: int, sizes: Sizes) -> tuple[int, int]:
        """Keep the ratio of the sides, which become multiples of 32."""
        del sizes
        return _dimensions(width, height, side)

    @classmethod
    @torch.no_grad()
    def encode_whole(
        cls, pipeline: Any, text: str, images: Sequence[np.ndarray], config: ModelConfig, device: torch.device
    ) -> Conditioning:
        """Encode a prompt and its images together, then the latents of the images.

        Returns:
            Embeddings [1, tokens, D] of text and images, without the template before them.
        """
        shown = [Image.fromarray(each) for each in images]
        words = "".join(cls.read_as.format(number) for number, _ in enumerate(shown, 1)) + text
        read = []
        for image in shown:
            width, height = cls.read_size(image.width, image.height, config.condition_side)
            read.append(pipeline.image_processor.resize(image, height, width))
        inputs = pipeline.processor(
            text=[pipeline.prompt_template_encode.format(words)], images=read, padding=True, return_tensors="pt"
        )
        states = pipeline.text_encoder(**inputs.to(device), output_hidden_states=True).hidden_states[-1]
        embeds = states[:, pipeline.prompt_template_encode_start_idx :].contiguous()
        latents = [cls.encode_condition(pipeline, each, config) for each in shown]
        return Conditioning.of({EMBEDS: embeds}).given(latents)

    @classmethod
    def encode_pixels(cls, pipeline: Any, pixels: Float[Tensor, "1 3 H W"]) -> Float[Tensor, "1 C h w"]:
        """Encode an image as a video of one frame."""
        return pipeline._encode_vae_image(pixels[:, :, None], None)[:, :, 0]

    def _example_words(self, count: int) -> Conditioning:
        """Return random embeddings of `count` prompts of the greatest length with their images."""
        words, side = super()._example_words(count), self._config.condition_side
        rows, columns = (round(each / READ_TOKEN) for each in self.read_size(side, side, side))
        embeds = words.tensors[EMBEDS]
        read = torch.randn(count, self.example_conditions * rows * columns, embeds.shape[2], device=self._device)
        return Conditioning.of({EMBEDS: torch.cat([embeds, read], dim=1)})


class QwenImageEditPlus(QwenImageEdit):
    """A `QwenImageEditPlusPipeline` as a `Backbone`. A prompt has one condition image or several."""

    family = QWEN_IMAGE_EDIT_PLUS
    read_as = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"

    @classmethod
    def read_size(cls, width: int, height: int, side: int) -> tuple[int, int]:
        """Return width and height of the fixed area with which the model reads images, whatever `side` is."""
        del side
        return _dimensions(width, height, READ_SIDE)


READ_SIDE = 384
"""Side in pixels of the square whose area an image has that Edit-2509 and 2511 read."""
LEAST_SIDE = 32
"""Of an image that is resized, in pixels; its sides are multiples."""
READ_TOKEN = 28
"""Side in pixels of a token of Qwen2.5-VL."""


def _dimensions(width: int, height: int, side: int) -> tuple[int, int]:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    wide, high = calculate_dimensions(side * side, width / height)
    return max(LEAST_SIDE, wide), max(LEAST_SIDE, high)

"""Plain diffusers pipelines of every family, asked for what our sampler draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor
from transformers import Qwen2Tokenizer

from flow.models.backbones.flux import pack, unpack
from flow.models.families import QWEN_IMAGE_21
from flow.models.located import locate
from flow.models.parts import read_text_parts, text_arguments
from protocol.config.model import ModelConfig
from tests.support.worlds.tiny_models import frozen, write_flux, write_kontext, write_sd35
from tests.support.worlds.tiny_qwen import (
    write_flux2_klein,
    write_qwen_edit,
    write_qwen_edit_plus,
    write_qwen_image,
    write_qwen_image_21,
    write_z_image,
)

Guided = Callable[[Any, float, str, int], dict[str, Any]]
"""From pipeline, weight w, negative prompt and number of prompts to the pipeline's arguments."""


def klein_embeddings(pipeline: Any, text: str, tokens: int) -> Tensor:
    """The text embeddings of a FLUX.2-klein pipeline."""
    return pipeline.encode_prompt(prompt=text, max_sequence_length=tokens)[0]


@dataclass(frozen=True)
class Side:
    """How a pipeline is asked for what ours computes."""

    write: Callable[[Path], Path]
    tokens: int
    """Maximum tokens of a prompt. Of Qwen-Image's own template many stay in front of the prompt, since each letter is a
    token."""
    shape: tuple[int, int, int]
    """Latents of an image of 16 x 16."""
    guided: Guided
    is_packed: bool = False

    def options(self, height: int, width: int, tokens: int) -> dict[str, Any]:
        """Return the pipeline's arguments for an image's size and the longest prompt."""
        return {"height": height, "width": width, "max_sequence_length": tokens}

    def packed(self, latents: Tensor) -> Tensor:
        """Return latents as the pipeline takes them."""
        return pack(latents) if self.is_packed else latents

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """The pipeline of a folder."""
        diffusers_logging.disable_progress_bar()
        loaded = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype, **self.parts(folder))
        loaded.set_progress_bar_config(disable=True)
        return frozen(loaded)

    def parts(self, folder: Path) -> dict[str, Any]:
        """Return the parts of a folder that the pipeline cannot read."""
        del folder
        return {}

    def draw(
        self,
        pipeline: Any,
        initial: Tensor,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: float,
        negative: str,
        height: int,
        width: int,
        output: str = "latent",
        **more: Any,
    ) -> tuple[list[Tensor], Any]:
        """The pipeline's latents after each step, as ours are [B, C, h, w], and its images.

        Args:
            pipeline: from `load`.
            initial: latents to start from, one for each prompt.
            prompts: the prompts; a single one is drawn as often as there are latents.
            steps: number of steps.
            guidance: weight w of guidance; 1 for none.
            negative: the negative prompt.
            height: of the image in pixels.
            width: of the image in pixels.
            output: `output_type` of the pipeline.
            more: further arguments of the pipeline.
        """
        seen: list[Tensor] = []
        rows, columns = initial.shape[2:]

        def watch(_: Any, step: int, timestep: Any, held: dict[str, Tensor]) -> dict[str, Tensor]:
            latents = held["latents"].clone()
            if self.is_packed:
                latents = unpack(latents, height=rows, width=columns)
            elif latents.ndim == 3:
                latents = latents.transpose(1, 2).unflatten(2, (rows, columns))
            seen.append(latents)
            return held

        images = pipeline(
            prompt=list(prompts),
            num_inference_steps=steps,
            num_images_per_prompt=len(initial) // len(prompts),
            latents=self.packed(initial),
            output_type=output,
            callback_on_step_end=watch,
            **self.guided(pipeline, guidance, negative, len(prompts)),
            **self.options(height, width, self.tokens),
            **more,
        ).images
        return seen, images


class QwenImage21Side(Side):
    """Its pipeline has no limit of tokens, takes flat latents, and cannot read its processor without torchvision.

    It takes 16 pixels for the side of a latent, whatever the VAE's scale is; that of the tiny model is 2.
    """

    def options(self, height: int, width: int, tokens: int) -> dict[str, Any]:
        del tokens
        return {"height": 8 * height, "width": 8 * width, "use_kv_cache": False}

    def packed(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)

    def parts(self, folder: Path) -> dict[str, Any]:
        tokenizer = Qwen2Tokenizer.from_pretrained(folder / "processor")
        return {"processor": text_arguments(QWEN_IMAGE_21, {"processor": tokenizer})["processor"]}


def _true_cfg(pipeline: Any, w: float, negative: str, prompts: int) -> dict[str, Any]:
    return {"true_cfg_scale": w, "negative_prompt": [negative] * prompts}


SIDES = {
    "sd35": Side(
        write=write_sd35,
        tokens=6,
        shape=(4, 8, 8),
        guided=lambda pipeline, w, negative, prompts: {"guidance_scale": w, "negative_prompt": [negative] * prompts},
    ),
    "flux": Side(write=write_flux, tokens=6, shape=(4, 8, 8), guided=_true_cfg, is_packed=True),
    "flux2_klein": Side(
        write=write_flux2_klein,
        tokens=80,
        shape=(16, 4, 4),
        guided=lambda pipeline, w, negative, prompts: {
            "guidance_scale": w,
            "negative_prompt_embeds": klein_embeddings(pipeline, negative, 80).repeat(prompts, 1, 1),
        },
    ),
    "qwen_image": Side(write=write_qwen_image, tokens=240, shape=(4, 8, 8), guided=_true_cfg, is_packed=True),
    "qwen_image_21": QwenImage21Side(
        write=write_qwen_image_21,
        tokens=240,
        shape=(4, 8, 8),
        guided=_true_cfg,
    ),
    "z_image": Side(
        write=write_z_image,
        tokens=80,
        shape=(4, 8, 8),
        guided=lambda pipeline, w, negative, prompts: {
            "guidance_scale": w - 1,
            "negative_prompt": [negative] * prompts,
        },
    ),
}
"""By family."""


class KontextSide(Side):
    """Its pipeline scales the image that it makes to an area, and T5 encodes at most 512 tokens."""

    def options(self, height: int, width: int, tokens: int) -> dict[str, Any]:
        return {**super().options(height, width, tokens), "max_area": height * width}


class QwenEditSide(Side):
    """Its pipeline cannot read its processor without torchvision, and forgets to say which tokens are images.

    That is diffusers' issue 14194: a text encoder of transformers 5 then numbers them like words.
    """

    def parts(self, folder: Path) -> dict[str, Any]:
        return {"processor": read_text_parts(locate(ModelConfig(path=str(folder))))["processor"]}

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        pipeline = super().load(folder, dtype)
        forward, image = pipeline.text_encoder.forward, pipeline.processor.image_token_id

        def told(input_ids: Tensor, **options: Any) -> Any:
            return forward(input_ids=input_ids, mm_token_type_ids=(input_ids == image).int(), **options)

        pipeline.text_encoder.forward = told
        return pipeline


EDITING = {
    "flux_kontext": KontextSide(write=write_kontext, tokens=6, shape=(4, 8, 8), guided=_true_cfg, is_packed=True),
    "qwen_image_edit": QwenEditSide(
        write=write_qwen_edit, tokens=240, shape=(4, 8, 8), guided=_true_cfg, is_packed=True
    ),
    "qwen_image_edit_plus": QwenEditSide(
        write=write_qwen_edit_plus, tokens=240, shape=(4, 8, 8), guided=_true_cfg, is_packed=True
    ),
    "flux2_klein": SIDES["flux2_klein"],
}
"""By family of those that edit."""

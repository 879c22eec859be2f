"""The VAE's dtype against diffusers' own decoding, and the choice of an attention back end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flow.maths.noise import normal
from flow.models.load import load_backbone
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig
from protocol.errors import ModelError, NonFiniteError
from tests.support.worlds.tiny_models import write_flux


def loaded(folder: Path, **settings: Any) -> PipelineBackbone:
    backbone = load_backbone(ModelConfig(path=str(folder), max_sequence_length=2, height=16, width=16, **settings))
    assert isinstance(backbone, PipelineBackbone)
    return backbone


def latents_of(backbone: PipelineBackbone) -> torch.Tensor:
    return torch.stack([normal("clean", number, shape=backbone.latent_shape) for number in range(3)])


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"vae_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "vae_dtype": "float32"}, torch.float32),
    ],
    ids=str,
)
def test_images_are_those_of_diffusers_own_decoding_in_the_same_dtype(
    tiny_sd3: Path, settings: dict[str, str], dtype: torch.dtype
) -> None:
    from diffusers import AutoencoderKL
    from diffusers.image_processor import VaeImageProcessor

    backbone = loaded(tiny_sd3, **settings)
    latents = latents_of(backbone)
    vae = AutoencoderKL.from_pretrained(tiny_sd3, subfolder="vae", torch_dtype=dtype)
    scaled = (latents / vae.config["scaling_factor"] + vae.config["shift_factor"]).to(dtype)
    with torch.no_grad():
        unit = VaeImageProcessor().postprocess(vae.decode(scaled, return_dict=False)[0], output_type="np")
    assert backbone.vae.dtype == dtype
    np.testing.assert_array_equal(backbone.decode(latents), (unit * 255).round().astype(np.uint8))


def test_a_vae_that_overflows_ends_with_a_line_that_says_what_to_set(tiny_sd3: Path) -> None:
    backbone = loaded(tiny_sd3, vae_dtype="float16")
    with pytest.raises(NonFiniteError, match=r"in torch.float16: set model.vae_dtype=float32$"):
        backbone.decode(latents_of(backbone) * 1e6)


def test_an_attention_back_end_is_used_or_refused_with_one_line(tiny_sd3: Path, tmp_path: Path) -> None:
    flux = write_flux(tmp_path / "flux")
    plain, chosen = loaded(flux), loaded(flux, attention="native")
    latents, sigma = latents_of(plain), torch.full((3,), 0.5)
    conditioning = plain.example(3)
    ours, theirs = (each.velocity(latents, sigma, conditioning) for each in (plain, chosen))
    assert torch.equal(ours, theirs)
    with pytest.raises(ModelError, match="must be one of diffusers' back ends, got 'nativ': did you mean 'native'"):
        loaded(flux, attention="nativ")
    with pytest.raises(ModelError, match="attention=sage cannot be used here"):
        loaded(flux, attention="sage")
    with pytest.raises(ModelError, match="must not be set for StableDiffusion3Pipeline"):
        loaded(tiny_sd3, attention="native")

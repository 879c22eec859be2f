"""The VAE's dtype against diffusers' own decoding, and the choice of an attention back end."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.utils._python_dispatch import TorchDispatchMode

from deploy.tools.fake_memory import FORMULAS
from flow.adapter.lora import Lora
from flow.maths.noise import normal
from flow.models.load import load_backbone
from flow.models.located import adapter_config
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, NonFiniteError
from tests.support.worlds.architectures import ARCHITECTURES, model_of
from tests.support.worlds.pipelines import SIDES


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


def write_tiny(folder: Path) -> Path:
    AutoencoderTiny(
        encoder_block_out_channels=(4, 4),
        decoder_block_out_channels=(4, 4),
        num_encoder_blocks=(0, 0),
        num_decoder_blocks=(1, 1),
        latent_channels=4,
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_tiny", [False, True])
def test_only_an_image_whose_decoding_overflows_is_decoded_again_in_float32(
    tiny_sd3: Path, tmp_path: Path, *, is_tiny: bool
) -> None:
    """The first layer's weights are so large that latents of 3 overflow in float16 and those of 0.001 do not."""
    tiny = str(write_tiny(tmp_path)) if is_tiny else None
    half, whole = (loaded(tiny_sd3, vae_dtype=dtype, tiny_decoder=tiny) for dtype in ("float16", "float32"))
    decoders = [each.tiny_decoder if is_tiny else each.vae for each in (half, whole)]
    first = decoders[0].decoder.layers[0] if is_tiny else decoders[0].decoder.conv_in
    with torch.no_grad():
        first.weight.mul_(2.0**16)
    decoders[1].load_state_dict(decoders[0].state_dict())
    latents = latents_of(half) * torch.tensor([0.001, 3, 0.001])[:, None, None, None]
    calm = latents[[0, 0, 2]]
    images, others = (half.decode(each, points=3 * is_tiny) for each in (latents, calm))
    assert half.decoded_again == 1
    assert decoders[0].dtype == torch.float16
    np.testing.assert_array_equal(images[[0, 2]], others[[0, 2]])
    np.testing.assert_array_equal(images[1:2], whole.decode(latents[1:2], points=int(is_tiny)))
    assert whole.decoded_again == 0


def test_latents_that_are_not_finite_or_overflow_float32_too_end_the_run(tiny_sd3: Path) -> None:
    backbone = loaded(tiny_sd3, vae_dtype="float16")
    latents = latents_of(backbone)
    latents[1, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="latents .* must be finite"):
        backbone.decode(latents)
    with pytest.raises(NonFiniteError, match="images must be finite, .* in float32"):
        backbone.decode(latents_of(backbone) * 1e37)


@pytest.mark.parametrize(
    ("name", "dtype"), [("sd35", "bfloat16"), *zip(SIDES, cycle(("float32", "bfloat16")), strict=False)]
)
def test_every_attention_of_a_transformer_takes_the_back_end_of_the_config(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SIDES[name].write(tmp_path / name)
    used: list[str] = []
    for back_end in (AttentionBackendName.NATIVE, AttentionBackendName._NATIVE_MATH):
        plain = _AttentionBackendRegistry._backends[back_end]

        def noted(*args: Any, name: str = back_end.value, plain: Any = plain, **kwargs: Any) -> Any:
            used.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setitem(_AttentionBackendRegistry._backends, back_end, noted)
    # as the environment variable DIFFUSERS_ATTN_BACKEND=flash does
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.FLASH)
    velocities, conditioning = [], loaded(folder, dtype=dtype).example(3)
    for settings in ({}, {"attention": "_native_math"}):
        backbone = loaded(folder, dtype=dtype, **settings)
        used.clear()
        with torch.no_grad():
            velocities.append(backbone.velocity(latents_of(backbone), torch.full((3,), 0.5), conditioning))
        assert set(used) <= {settings.get("attention", "native")}
        assert used or not settings, "without a choice SD3 in float32 keeps diffusers' own attention, which has none"
    own, other = velocities
    assert (other - own).norm() < 0.03 * own.norm()


@pytest.mark.parametrize("back_end", ["flash", "_flash_3_hub", "_native_cudnn", "sage"])
def test_a_back_end_whose_bits_cannot_be_repeated_is_refused(
    back_end: str, tiny_config: Callable[..., RunConfig]
) -> None:
    with pytest.raises(ConfigError, match=f"model.attention: .*'{back_end}'"):
        tiny_config(model={"path": "none", "attention": back_end})


class Products(TorchDispatchMode):
    """Notes the dtypes of products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in FORMULAS:
            self.dtypes.add(next(each.dtype for each in args if isinstance(each, torch.Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_half_precision_no_product_is_left_in_float32(tmp_path: Path, name: str) -> None:
    """So TF32 has nothing to make faster, in a forward or a backward, with an adapter whose weights are float32."""
    model = ModelConfig.model_validate(model_of(name, "bfloat16", tmp_path))
    backbone = load_backbone(model)
    Lora(backbone.transformer, adapter_config(model), seed=0)
    latents = torch.randn(2, *backbone.latent_shape)
    with Products() as products:
        backbone.velocity(latents, torch.full((2,), 0.5), backbone.example(2)).square().sum().backward()
    assert products.dtypes == {torch.bfloat16}

"""Tiny pipelines with random weights, in diffusers' format, of every family and shape of it that we train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CONTEXT_LENGTH = 24
LATENTS = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
SD3_LATENTS = {"scaling_factor": 1.5305, "shift_factor": 0.0609}
LETTERS = [chr(code) for code in range(33, 127)]


def frozen(pipeline: Any) -> Any:
    """The pipeline with parameters that need no gradient, as ours have none.

    torch multiplies a slice by a matrix in another order if the matrix needs a gradient, even without autograd
    (`should_fold` in its `LinearAlgebra.cpp`). With MKL's AVX-512 both orders round alike; on other CPUs they do not.
    """
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(requires_grad=False)
    return pipeline


def write_sd3(folder: Path) -> Path:
    """SD3-Medium's shape without T5: latents 4x8x8, images of 16x16. The pipeline of most tests."""
    return _write_sd3(folder, seed=20, latents=SD3_LATENTS)


def write_sd35(folder: Path, *, has_t5: bool = True, **shape: Any) -> Path:
    """SD3.5-Medium's shape: dual attention in the first block, qk-norm, three text encoders; images of 16x16.

    Args:
        folder: receives the pipeline.
        has_t5: whether it has the third text encoder.
        shape: arguments of the transformer that are other than those of `_write_sd3`.
    """
    shape = {"dual_attention_layers": (0,)} | shape
    return _write_sd3(folder, seed=30, has_t5=has_t5, qk_norm="rms_norm", **shape)


def _write_sd3(
    folder: Path, *, seed: int, has_t5: bool = False, latents: Mapping[str, float] = LATENTS, **shape: Any
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        usual = {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        }
        transformer: Any = randomised(SD3Transformer2DModel(**usual | shape))
        tokenizer, t5_tokenizer = clip_tokenizer(), _t5_tokenizer()
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=autoencoder(transformer.config.in_channels, latents),
            text_encoder=CLIPTextModelWithProjection(_clip_config(tokenizer)).eval(),
            tokenizer=tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(_clip_config(tokenizer)).eval(),
            tokenizer_2=tokenizer,
            text_encoder_3=_t5(t5_tokenizer) if has_t5 else None,
            tokenizer_3=t5_tokenizer if has_t5 else None,
        )
    pipeline.save_pretrained(folder)
    return folder


def write_flux(folder: Path, *, is_schnell: bool = False, kind: Any = FluxPipeline) -> Path:
    """FLUX.1-dev's shape, or schnell's: 4x2x2 latents a token, one double and one single block, any size.

    Args:
        folder: receives the pipeline.
        is_schnell: whether the transformer lacks embedded guidance.
        kind: class of the pipeline.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(40)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=8,
            guidance_embeds=not is_schnell,
            axes_dims_rope=(4, 4, 8),
        )
        tokenizer, t5_tokenizer = clip_tokenizer(), _t5_tokenizer()
        shift = {"shift": 1.0} if is_schnell else {"shift": 3.0, "use_dynamic_shifting": True}
        pipeline = kind(
            transformer=randomised(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(**shift),
            vae=autoencoder(4, LATENTS),
            text_encoder=CLIPTextModel(_clip_config(tokenizer)).eval(),
            tokenizer=tokenizer,
            text_encoder_2=_t5(t5_tokenizer),
            tokenizer_2=t5_tokenizer,
        )
    pipeline.save_pretrained(folder)
    return folder


def write_kontext(folder: Path) -> Path:
    """FLUX.1-Kontext-dev's shape: that of FLUX.1-dev."""
    return write_flux(folder, kind=FluxKontextPipeline)


def clip_tokenizer() -> Any:
    """A byte-pair tokenizer of letters without merges, so that any text is legal."""
    tokens = [*LETTERS, *(letter + "</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CONTEXT_LENGTH)


def _t5_tokenizer() -> Any:
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def _clip_config(tokenizer: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5(tokenizer: Any) -> T5EncoderModel:
    config = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return randomised(T5EncoderModel(config)).eval()


def autoencoder(channels: int, latents: Mapping[str, float]) -> AutoencoderKL:
    return AutoencoderKL(
        latent_channels=channels,
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=2,
        sample_size=16,
        **latents,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def randomised(model: Any) -> Any:
    """Weights large enough that every input leaves its mark on the output."""
    for name, parameter in model.named_parameters():
        if not name.endswith("bias") and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model

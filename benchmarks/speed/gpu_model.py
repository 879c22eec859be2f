"""SD3.5-Medium's architecture, and a tiny one of the same structure, with random weights and without downloads."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flow.adapter.lora import Lora
from flow.models.backbones.sd3 import StableDiffusion3
from flow.models.families import SD3
from flow.models.hollow import backbone_of_parts
from flow.models.pipeline import PipelineBackbone
from flow.models.reading import quiet_libraries
from protocol.config.model import ModelConfig
from protocol.ground.files import whole

SD35_MEDIUM: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
SD3_VAE: dict[str, Any] = {"latent_channels": 16, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
TINY: dict[str, Any] = SD35_MEDIUM | {
    "sample_size": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
    "dual_attention_layers": (0,),
}
TINY_VAE: dict[str, Any] = {"latent_channels": 16, "block_out_channels": (8, 8), "layers_per_block": 1}
CLIP_WIDTHS, TINY_CLIP_WIDTHS = (768, 1280), (8, 8)
"""Widths of the two CLIP encoders' outputs."""
CLIP_TOKENS = 77


def random_backbone(
    config: ModelConfig, *, is_tiny: bool, device: str, within: AbstractContextManager[Any] | None = None
) -> PipelineBackbone:
    """Make a backbone with random weights.

    Args:
        config: the model's config.
        is_tiny: whether to take the tiny architecture.
        device: torch device of the backbone.
        within: context in which the weights are made, such as FakeTensorMode; None makes them on the device.

    Returns:
        The backbone.
    """
    within = within or torch.device(device)
    parts = _parts(is_tiny=is_tiny, within=within)
    with within:
        return backbone_of_parts(StableDiffusion3, config, parts, device=device)


def random_lora(transformer: nn.Module, config: ModelConfig, *, std: float = 1e-3) -> Lora:
    """Attach SD3's adapter as it is some steps after its start, when the matrices B are no zeros any more.

    Args:
        transformer: receives it.
        config: sets rank, alpha and targets.
        std: of the numbers in the matrices B.

    Returns:
        The adapter.
    """
    lora = Lora(transformer, SD3.adapter(config.lora), seed=0)
    for name, parameter in lora.parameters.items():
        if "lora_B" in name:
            parameter.data.normal_(std=std)
    return lora


def write_pipeline(folder: Path, *, is_tiny: bool, device: str) -> Path:
    """Save a `StableDiffusion3Pipeline` with random weights in float16, 5 GB, unless the folder exists.

    It has no T5. Its CLIP encoders have one layer each, but the widths that the transformer wants, so everything behind
    the prompts' embeddings has its real shape.

    Args:
        folder: of the pipeline.
        is_tiny: whether to take the tiny architecture.
        device: torch device that makes the weights.

    Returns:
        The folder.
    """
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    from benchmarks.pretraining import tokenizer as words

    if folder.exists():
        return folder
    tokenizer = words.build()
    tokenizer.model_max_length = CLIP_TOKENS
    encoders = [
        CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=width,
                projection_dim=width,
                num_hidden_layers=1,
                num_attention_heads=width // 8,
                max_position_embeddings=CLIP_TOKENS,
                **words.mark_ids(tokenizer),
            )
        )
        for width in (TINY_CLIP_WIDTHS if is_tiny else CLIP_WIDTHS)
    ]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = _parts(is_tiny=is_tiny, within=torch.device(device))
    parts.update(text_encoder_3=None, tokenizer_3=None)
    pipeline = diffusers.StableDiffusion3Pipeline(
        **parts,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole(folder) as partial, quiet_libraries():
        pipeline.to(torch.float16).save_pretrained(partial)
    return folder


def _parts(*, is_tiny: bool, within: AbstractContextManager[Any]) -> dict[str, Any]:
    """Make scheduler, and with random weights VAE and transformer."""
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    blocks = len((TINY_VAE if is_tiny else SD3_VAE)["block_out_channels"])
    kinds: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
    }
    with within:
        vae = diffusers.AutoencoderKL(
            **(TINY_VAE if is_tiny else SD3_VAE),
            **kinds,
            norm_num_groups=8 if is_tiny else 32,
            sample_size=16 if is_tiny else 1024,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        transformer = diffusers.SD3Transformer2DModel(**(TINY if is_tiny else SD35_MEDIUM))
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler}

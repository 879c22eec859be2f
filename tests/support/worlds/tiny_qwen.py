"""Tiny pipelines with random weights of the families that read text with Qwen: FLUX.2-klein, Qwen-Images, Z-Image."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flow.models.families import QWEN_IMAGE_21
from flow.models.parts import text_arguments
from tests.support.worlds.tiny_models import LATENTS, autoencoder, randomised

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in [message.content] if part is string %}{{ part }}{% else %}{{ message.content[0].text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if add_generation_prompt and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def write_flux2_klein(folder: Path, *, is_distilled: bool = False) -> Path:
    """FLUX.2-klein's shape: latents 16 x 4 x 4 for 16 x 16 pixels, one double and one single block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(50)
        transformer = Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            timestep_guidance_channels=16,
            mlp_ratio=2.0,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        )
        vae = AutoencoderKLFlux2(
            latent_channels=4,
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=2,
        )
        statistics: Any = vae.bn
        statistics.running_mean.normal_()
        statistics.running_var.uniform_(0.5, 2.0)
        pipeline = Flux2KleinPipeline(
            transformer=randomised(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=vae,
            text_encoder=Qwen3ForCausalLM(qwen3_config(layers=28)).eval(),
            tokenizer=qwen_tokenizer(),
            is_distilled=is_distilled,
        )
    pipeline.save_pretrained(folder)
    return folder


def write_qwen_image(folder: Path, *, kind: Any = QwenImagePipeline, **shape: Any) -> Path:
    """Qwen-Image's shape: latents 4 x 8 x 8 for 16 x 16 pixels, two blocks, a schedule that ends at 0.02.

    Args:
        folder: receives the pipeline.
        kind: class of the pipeline.
        shape: further arguments of the transformer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(60)
        transformer = QwenImageTransformer2DModel(
            **shape,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8,
            axes_dims_rope=(4, 6, 6),
        )
        vae = AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[-0.7, 0.1, 0.5, -0.2],
            latents_std=[2.8, 1.4, 2.3, 1.9],
        )
        tokenizer = qwen_tokenizer()
        pipeline = kind(
            transformer=randomised(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=1.0, use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
            ),
            vae=vae,
            text_encoder=Qwen2_5_VLForConditionalGeneration(_qwen_vl_config(tokenizer)).eval(),
            tokenizer=tokenizer,
            **({} if kind is QwenImagePipeline else {"processor": None}),
        )
    pipeline.save_pretrained(folder)
    if kind is not QwenImagePipeline:
        tokenizer.save_pretrained(folder / "processor")
        Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
        index = json.loads((folder / "model_index.json").read_text())
        index["processor"] = ["transformers", "Qwen2VLProcessor"]
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_qwen_edit(folder: Path) -> Path:
    """Qwen-Image-Edit's shape: that of Qwen-Image."""
    return write_qwen_image(folder, kind=QwenImageEditPipeline)


def write_qwen_edit_plus(folder: Path) -> Path:
    """Qwen-Image-Edit-2511's shape: condition images are modulated as at sigma 0."""
    return write_qwen_image(folder, kind=QwenImageEditPlusPipeline, zero_cond_t=True)


def write_qwen_image_21(folder: Path) -> Path:
    """Qwen-Image-2.1's shape: latents 4 x 8 x 8 for 16 x 16 pixels, two blocks, images with alpha."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(80)
        transformer = QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=8,
            axes_dims_rope=(4, 6, 6),
        )
        vae = AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.5, -0.2, 0.1, -0.7],
            latents_std=[1.3, 0.9, 1.1, 0.8],
        )
        text = _qwen_vl_text() | {"head_dim": 4}
        text["rope_parameters"] |= {"mrope_interleaved": True}
        vision = {
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 2,
            "out_hidden_size": 8,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
        encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()
        encoder.model.language_model.norm.weight.data.uniform_(0.5, 2.0)
        pipeline = QwenImage21Pipeline(
            transformer=randomised(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=1.0, use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
            ),
            vae=vae,
            **text_arguments(QWEN_IMAGE_21, {"text_encoder": encoder, "processor": qwen_tokenizer()}),
        )
    pipeline.processor.save_pretrained = pipeline.processor.tokenizer.save_pretrained
    pipeline.save_pretrained(folder)
    return folder


def write_z_image(folder: Path) -> Path:
    """Z-Image's shape: latents 4 x 8 x 8 for 16 x 16 pixels, one layer of each of the three kinds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(70)
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=8,
            axes_dims=[4, 6, 6],
            axes_lens=[512, 16, 16],
        )
        pipeline = ZImagePipeline(
            transformer=randomised(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=autoencoder(4, LATENTS),
            text_encoder=Qwen3Model(qwen3_config(layers=2)).eval(),
            tokenizer=qwen_tokenizer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def qwen_tokenizer() -> Any:
    """A byte-level tokenizer without merges, with the marks of a chat."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *SPECIAL])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1], SPECIAL[3]],
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen3_config(*, layers: int) -> Qwen3Config:
    """A Qwen3 of width 8."""
    return Qwen3Config(
        vocab_size=260,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=512,
    )


def _qwen_vl_text() -> dict[str, Any]:
    return {
        "vocab_size": 260,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]},
    }


def _qwen_vl_config(tokenizer: Any) -> Qwen2_5_VLConfig:
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "out_hidden_size": 8,
        "fullatt_block_indexes": [0],
    }
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return Qwen2_5_VLConfig(text_config=_qwen_vl_text(), vision_config=vision, image_token_id=image)

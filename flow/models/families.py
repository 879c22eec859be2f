"""The model families: pipeline class, import path of the backbone, and default adapter of each.

A new family is an entry here and one file that implements `flow.models.contract.Backbone`; see docs/models.md. This
module does not import torch.
"""

from dataclasses import dataclass, replace

from protocol.config.model import LoraConfig

ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Attention projections of a transformer with an image stream and a text stream."""
MOST_CONDITIONS = 16
"""Condition images of a prompt in the families that take several; more of them are a mistake."""


@dataclass(frozen=True)
class Family:
    """Facts about a family that are needed before its libraries and weights are loaded."""

    name: str
    pipeline: str
    """Name of diffusers' pipeline class in `model_index.json`."""
    backbone: str
    """Import path `module:Class` of its backbone."""
    text_parts: tuple[str, ...]
    """Components of the pipeline that are needed to encode prompts only."""
    rank: int
    """Default inner width of the LoRA: for SD3 and FLUX.1 as in Flow-GRPO's published training scripts (arXiv
    2505.05470), for Qwen-Image-2.1 as in miles-diffusion's, for the others our own."""
    alpha: int
    """Default alpha of the LoRA, from the same source."""
    targets: tuple[str, ...]
    """Default names of the modules that receive the LoRA, from the same source."""

    least_conditions: int = 0
    most_conditions: int = 0
    """Condition images that a prompt must have, and may have."""
    reads_images: bool = False
    """Whether its text encoder reads the condition images too; its processor then has a processor of images."""
    has_chat: bool = False
    """Whether its pipeline puts a prompt into the chat template of the tokenizer."""
    block_lists: tuple[str, ...] = ("transformer_blocks",)
    """The transformer's lists of blocks, in the order in which they run."""

    def adapter(self, config: LoraConfig) -> LoraConfig:
        """Fill this family's defaults into the adapter's config."""
        return config.model_copy(
            update={
                "rank": config.rank or self.rank,
                "alpha": config.alpha or self.alpha,
                "targets": config.targets or self.targets,
            }
        )


SD3 = Family(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    backbone="flow.models.backbones.sd3:StableDiffusion3",
    text_parts=(
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
        "text_encoder_3",
        "tokenizer_3",
        "image_encoder",
        "feature_extractor",
    ),
    rank=32,
    alpha=64,
    targets=ATTENTION,
)
FLUX = Family(
    name="flux",
    pipeline="FluxPipeline",
    backbone="flow.models.backbones.flux:Flux",
    text_parts=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_encoder", "feature_extractor"),
    rank=64,
    alpha=128,
    targets=(*ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    block_lists=("transformer_blocks", "single_transformer_blocks"),
)
FLUX_KONTEXT = replace(
    FLUX,
    name="flux_kontext",
    pipeline="FluxKontextPipeline",
    backbone="flow.models.backbones.flux:FluxKontext",
    targets=(*FLUX.targets, "proj_mlp"),
    least_conditions=1,
    most_conditions=1,
)
FLUX2_KLEIN = Family(
    name="flux2_klein",
    pipeline="Flux2KleinPipeline",
    backbone="flow.models.backbones.flux2:Flux2Klein",
    text_parts=("text_encoder", "tokenizer"),
    rank=64,
    alpha=128,
    targets=(*ATTENTION, "attn.to_qkv_mlp_proj"),
    most_conditions=MOST_CONDITIONS,
    has_chat=True,
    block_lists=("transformer_blocks", "single_transformer_blocks"),
)
QWEN_IMAGE = Family(
    name="qwen_image",
    pipeline="QwenImagePipeline",
    backbone="flow.models.backbones.qwen_image:QwenImage",
    text_parts=("text_encoder", "tokenizer"),
    rank=64,
    alpha=128,
    targets=(*ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)
QWEN_IMAGE_EDIT = replace(
    QWEN_IMAGE,
    name="qwen_image_edit",
    pipeline="QwenImageEditPipeline",
    backbone="flow.models.backbones.qwen_image_edit:QwenImageEdit",
    text_parts=("text_encoder", "processor", "tokenizer"),
    least_conditions=1,
    most_conditions=1,
    reads_images=True,
)
QWEN_IMAGE_EDIT_PLUS = replace(
    QWEN_IMAGE_EDIT,
    name="qwen_image_edit_plus",
    pipeline="QwenImageEditPlusPipeline",
    backbone="flow.models.backbones.qwen_image_edit:QwenImageEditPlus",
    most_conditions=MOST_CONDITIONS,
)
QWEN_IMAGE_21 = Family(
    name="qwen_image_21",
    pipeline="QwenImage21Pipeline",
    backbone="flow.models.backbones.qwen_image_21:QwenImage21",
    text_parts=("text_encoder", "processor"),
    rank=64,
    alpha=128,
    targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "img_mlp.proj",
        "img_mlp.gate_layer",
        "img_mlp.out",
    ),
    has_chat=True,
)
Z_IMAGE = Family(
    name="z_image",
    pipeline="ZImagePipeline",
    backbone="flow.models.backbones.z_image:ZImage",
    text_parts=("text_encoder", "tokenizer"),
    rank=64,
    alpha=128,
    targets=(
        "attention.to_q",
        "attention.to_k",
        "attention.to_v",
        "attention.to_out.0",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    ),
    has_chat=True,
    block_lists=("layers",),
)
FAMILIES = {
    family.pipeline: family
    for family in (
        SD3,
        FLUX,
        FLUX_KONTEXT,
        FLUX2_KLEIN,
        QWEN_IMAGE,
        QWEN_IMAGE_EDIT,
        QWEN_IMAGE_EDIT_PLUS,
        QWEN_IMAGE_21,
        Z_IMAGE,
    )
}
"""The families by their pipeline class in `model_index.json`."""

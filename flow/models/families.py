"""The model families: which pipeline class each one is, where its code stands, and what adapter it takes by default.

A new family is an entry here and one file behind `flow.models.contract.Backbone`; see docs/models.md. Light: no torch.
"""

from dataclasses import dataclass

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
"""The attention projections of a transformer with two streams, image and text."""


@dataclass(frozen=True)
class Family:
    """What must be known of a family before anything of it is loaded."""

    name: str
    pipeline: str
    """diffusers' pipeline class, as `model_index.json` names it."""
    backbone: str
    """`module:Class` of its backbone."""
    text_parts: tuple[str, ...]
    """The pipeline's parts that only encoding a prompt needs."""
    rank: int
    alpha: int
    targets: tuple[str, ...]
    """LoRA defaults, where a peer's published training script sets them: Flow-GRPO, arXiv 2505.05470."""

    def adapter(self, config: LoraConfig) -> LoraConfig:
        """The adapter's config with this family's defaults filled in."""
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
    backbone="flow.models.sd3:StableDiffusion3",
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
    backbone="flow.models.flux:Flux",
    text_parts=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_encoder", "feature_extractor"),
    rank=64,
    alpha=128,
    targets=(*ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
)
FAMILIES = {family.pipeline: family for family in (SD3, FLUX)}
"""By the pipeline class of `model_index.json`."""

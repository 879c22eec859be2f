"""The model and its adapter."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config.section import Positive, Section


class LoraConfig(Section):
    """The low-rank adapter that is trained. Keys left out take the model family's default."""

    rank: Positive | None = None
    """Inner width of the adapter."""
    alpha: Positive | None = None
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Ends of the module names in the transformer that receive the adapter."""
    start: str | None = None
    """Folder or file of a LoRA to start from, as diffusers saves it; the reference stays the base model."""


class ModelConfig(Section):
    """The pretrained model and how it is asked."""

    path: str
    """A diffusers folder, `pkg://package/folder` inside an installed package, or a hub id such as `org/name`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; a commit keeps a run's model from changing."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the frozen transformer, its arithmetic (autocast) and the text encoders; VAE and LoRA are float32."""
    height: Positive | None = None
    """Pixels; none takes the size that the model was trained for."""
    width: Positive | None = None
    """Pixels."""
    max_sequence_length: Positive = 128
    """T5 tokens per prompt; without a T5 encoder as many zero tokens are appended."""
    guidance: float = Field(default=1.0, ge=1.0)
    """Classifier-free guidance weight w of the policy: rollout, training and evaluation alike; 1 costs one forward."""
    embedded_guidance: float = Field(default=3.5, ge=0.0)
    """The number that a guidance-distilled model (FLUX.1-dev) takes as an input; others ignore it."""
    embedding_cache: str | None = None
    """Folder that keeps prompt embeddings; the text encoders are then loaded once, before the run, and freed."""
    forward_batch: Positive | None = None
    """Most samples of one transformer forward, in rollout and learner alike, so that the ratio stays exactly 1."""
    decode_batch: Positive | None = None
    """Most images that the VAE decodes at once; none decodes all."""
    vae_tiling: bool = False
    """Decode in overlapping tiles: less memory for large images, slightly other pixels."""
    gradient_checkpointing: bool = False
    """The learner keeps one tensor a block and computes the rest again: far less memory, one more forward."""
    compile: str | None = None
    """torch.compile backend of the transformer, such as `inductor`; none runs it as it is."""
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _both_sides(self) -> "ModelConfig":
        if (self.height is None) != (self.width is None):
            raise ValueError(f"model.height and model.width must be given together, got {self.height} and {self.width}")
        return self

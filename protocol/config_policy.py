"""The policy's part of the config: the model, how trajectories are drawn and how their points are completed."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config_section import Positive, Section


class LoraConfig(Section):
    """The low-rank adapter that is trained; what is left out is the model family's own default (`flow/families.py`)."""

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
    """Most pictures that the VAE decodes at once; none decodes all."""
    vae_tiling: bool = False
    """Decode in overlapping tiles: less memory for large pictures, slightly other pixels."""
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


class SamplingConfig(Section):
    """How trajectories are drawn."""

    steps: int = Field(default=10, ge=2)
    """Denoising steps T of a training trajectory."""
    schedule: Literal["model", "linear"] = "model"
    """Sigma grid: `model` is the family's own, as its pipeline draws; `linear` runs evenly from 1 to 0."""
    kernel: Literal["flow_sde", "ddim_sde"] = "flow_sde"
    """Transition of a stochastic step."""
    noise_level: float = Field(default=0.7, gt=0.0, le=1.0)
    """a of Flow-SDE, eta of DDIM-SDE."""
    first_step: Literal["clamp", "exclude"] = "clamp"
    """DDIM-SDE has std 0 at sigma 1: `clamp` takes 1 - sigma_1 for 1 - sigma there, `exclude` runs the step as ODE."""
    std_min: float = Field(default=0.02, ge=0.0)
    """Steps whose std is below this run as ODE and are not trained."""
    shared_noise: bool = True
    """All members of a group start from the same initial noise."""


class CompletionConfig(Section):
    """How the clean picture at a point of a trajectory is estimated."""

    rule: Literal["tweedie", "ode"] = "ode"
    """`tweedie`: x - sigma v, no further forward; `ode`: Euler to sigma 0 in `substeps` substeps."""
    substeps: int = Field(default=5, ge=1)
    """T' of `ode`; its first velocity is the main pass's, so a point costs T' - 1 forwards."""

"""The policy's part of the config: the model, how trajectories are drawn and how their points are completed."""

from typing import Literal

from pydantic import Field

from protocol.config_section import Positive, Section


class LoraConfig(Section):
    """The low-rank adapter that is trained."""

    rank: Positive = 32
    """Inner width of the adapter."""
    alpha: Positive = 64
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    """Ends of the module names in the transformer that receive the adapter."""


class ModelConfig(Section):
    """The pretrained model and how it is asked."""

    path: str
    """A diffusers folder; `pkg://package/folder` names one inside an installed package."""
    max_sequence_length: Positive = 128
    """T5 tokens per prompt; without a T5 encoder as many zero tokens are appended."""
    guidance: float = Field(default=1.0, ge=1.0)
    """Classifier-free guidance weight w of the policy: rollout, training and evaluation alike; 1 costs one forward."""
    lora: LoraConfig = LoraConfig()


class SamplingConfig(Section):
    """How trajectories are drawn."""

    steps: int = Field(default=10, ge=2)
    """Denoising steps T of a training trajectory."""
    schedule: Literal["sd3", "linear"] = "sd3"
    """Sigma grid: `sd3` is diffusers' doubly shifted one, `linear` runs evenly from 1 to 0."""
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

"""Making a policy from a config: backbone, adapter and policy, the same way for rollout actors and the learner."""

from flow.adapter.lora import Lora
from flow.models.contract import Backbone
from flow.models.folder import adapter_config
from flow.models.load import load_backbone
from flow.policy import FlowPolicy
from protocol.config.run import RunConfig


def build_policy(config: RunConfig, *, device: str) -> tuple[FlowPolicy, Lora]:
    """Load the model, attach a fresh adapter and put the policy on top.

    Raises:
        ModelError: the model cannot be loaded, or the adapter binds no module.
    """
    backbone = load_backbone(config.model, device=device)
    lora = Lora(backbone.transformer, adapter_config(config.model), seed=config.seed)
    return policy_of(backbone, config), lora


def policy_of(backbone: Backbone, config: RunConfig) -> FlowPolicy:
    """The policy of a config on a backbone that is there already."""
    model = config.model
    return FlowPolicy(backbone, config.sampling, guidance=model.guidance, forward_batch=model.forward_batch)

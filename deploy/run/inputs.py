"""The inputs of a run, checked before anything starts: model folder, trackers, prompt files, scorers."""

import os
from collections.abc import Iterator, Sequence

from deploy.monitor.trackers import check_trackers
from flow.models.folder import read_index
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.messages import Prompt
from protocol.prompts import overlap, read_prompts
from rewards.scorer import check_prompts, components_of


def check_inputs(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Check model folder, trackers, prompt files and scorers; returns train and held-out prompts.

    Raises:
        InputError: model folder, prompt file or scorer.
    """
    read_index(config.model)
    check_trackers(config.status.trackers)
    prompts, heldout = (read_prompts(config.data, path) for path in (config.data.train, config.data.heldout))
    for reward in config.rewards.values():
        if not reward.runtime_env:
            check_prompts(reward.scorer, reward.args, [*prompts, *heldout])
    _require_component(config)
    return prompts, heldout


def _require_component(config: RunConfig) -> None:
    """Raise ConfigError where `evaluation.component` names a component that its scorer does not declare."""
    name, _, component = config.evaluation.component.partition("/")
    if not component:
        return
    reward = config.rewards.get(name)
    declared = () if reward is None else None if reward.runtime_env else components_of(reward.scorer, reward.args)
    if declared is not None and component not in declared:
        known = ["reward", *config.rewards, *(f"{name}/{each}" for each in declared)]
        raise ConfigError(f"evaluation.component must be one of {known}, got {config.evaluation.component!r}")


def concerns(config: RunConfig, prompts: Sequence[Prompt], heldout: Sequence[Prompt]) -> Iterator[tuple[str, str]]:
    """Find what does not stop a run, but may not be what its user means.

    Args:
        config: of the run.
        prompts: to train on.
        heldout: to evaluate on.

    Yields:
        The type of a condition that does not hold, and one line.

    Raises:
        ModelError: the model's tokenizers cannot be read.
    """
    from flow.models.text import overlong

    if both := overlap(prompts, heldout):
        yield "PromptsApart", f"{both}: set data.train and data.heldout to files that share none"
    limit, longer = overlong(config.model, [prompt.text for prompt in (*prompts, *heldout)])
    if longer:
        shown = ", ".join(repr(text if len(text) <= 60 else f"{text[:60]}…") for text in longer[:3])
        yield (
            "PromptsFit",
            f"{len(longer)} prompts are longer than the text encoder's {limit} tokens and lose their ends, such as"
            f" {shown}: shorten them, or raise model.max_sequence_length where the model has a T5 encoder",
        )


def gpu_concerns(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Compare the GPUs that the actors reserve with those of this machine, unless a cluster's address is given."""
    import torch

    cluster = config.cluster
    if cluster.address or os.environ.get("RAY_ADDRESS"):
        return
    rewards = config.rewards.values()
    asked = cluster.rollout_actors * cluster.rollout.gpus + cluster.learner.gpus
    asked += sum(reward.actors * (cluster.reward.gpus if reward.gpus is None else reward.gpus) for reward in rewards)
    found = torch.cuda.device_count()
    if asked > found:
        yield (
            "GpusFit",
            f"the actors reserve {asked:g} GPUs, this machine has {found}: set cluster.address or cluster.*.gpus",
        )


def local_concerns(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Name the settings of rewards that a run in one process cannot follow, as `concerns` does."""
    ignored = [
        f"rewards.{name}.{field}"
        for name, reward in config.rewards.items()
        for field in ("timeout_s", "runtime_env")
        if getattr(reward, field) is not None
    ]
    if ignored:
        yield "LocalSettings", f"--local does not follow {', '.join(ignored)}: scorers run in this process, unbounded"

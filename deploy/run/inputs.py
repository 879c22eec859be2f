"""Checks a run's inputs before anything starts: model folder, trackers, prompt files, scorers, GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.folder.location import job_variables
from deploy.monitor.trackers import check_trackers
from flow.models.completed import require_revisions
from flow.models.located import Located, locate
from learner.loop.evaluate import require_own_names
from protocol.config.cluster import cluster_address
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, InputError, one_line
from protocol.ground.addresses import secrets_among
from protocol.messages import Prompt
from protocol.prompts import as_table, content_of, overlap, read_prompts, shown
from rewards.scorer import check_prompts, components_of, require_ready

SENT_SECRETS = (
    "Ray writes env_vars to its logs on every node and shows them in `ray job list`: leave them out, and set secrets"
    " where `ray start` runs (docs/cluster.md, Secrets)"
)
"""Message for a user who sends a secret through Ray."""
MOST_DRAWS = 20
"""Draws of each training prompt in a run above which the run warns."""


@dataclass(frozen=True)
class Inputs:
    """What a run is given, checked."""

    prompts: list[Prompt]
    """To train on."""
    heldout: list[Prompt]
    model: Located

    @property
    def all_prompts(self) -> list[Prompt]:
        """The prompts to train on, then the held-out ones."""
        return [*self.prompts, *self.heldout]


def check_inputs(config: RunConfig, *, is_local: bool) -> Inputs:
    """Check model folder, trackers, prompt files and scorers.

    With `is_local`, this process scores even if the config names a cluster.

    Raises:
        InputError: one of them cannot be used.
    """
    inputs = read_inputs(config)
    for problem in reward_problems(config, inputs.all_prompts, is_local=is_local):
        raise problem
    return inputs


def read_inputs(config: RunConfig) -> Inputs:
    """Check model folder, sizes of images, trackers, own functions and prompt files.

    Raises:
        InputError: one of them cannot be used.
    """
    model = _checked_model(config)
    check_trackers(config.status.trackers)
    if config.own_functions:
        from learner.credit.rules import require_rule
        from learner.update.own import require_objective

        require_rule(config.credit)
        require_objective(config.learner)
    return Inputs(_prompts(config, config.data.train, model), _heldout(config, model), model)


def check_heldout(config: RunConfig, *, is_local: bool) -> list[Prompt]:
    """Check the inputs of an evaluation: model folder, sizes, held-out prompts and scorers; return the prompts.

    With `is_local`, this process scores even if the config names a cluster.

    Raises:
        InputError: one of them cannot be used.
    """
    heldout = _heldout(config, _checked_model(config))
    for problem in reward_problems(config, heldout, is_local=is_local):
        raise problem
    return heldout


def _heldout(config: RunConfig, model: Located) -> list[Prompt]:
    heldout = _prompts(config, config.data.heldout, model)
    require_own_names(heldout)
    return heldout


def _prompts(config: RunConfig, path: str, model: Located) -> list[Prompt]:
    prompts = read_prompts(config.data, path)
    model.require_conditions(prompts)
    return prompts


def _checked_model(config: RunConfig) -> Located:
    """Check a model without loading it; on a given cluster, the actors check the packages of their nodes."""
    located = locate(config.model)
    require_revisions(config.model)
    located.require_sizes(config)
    from flow.models.load import require_loadable

    require_loadable(located)
    if not cluster_address(config.cluster):
        from flow.fused import require_kernels

        has_gpus = config.cluster.rollout.gpus and config.cluster.learner.gpus
        require_kernels(config.model, "cuda" if has_gpus else "cpu")
    if config.model.quantize and not cluster_address(config.cluster):
        from flow.quantized.transformer import require_quantizer

        require_quantizer(config.model)
    if (config.model.compile or config.model.vae_compile) and not cluster_address(config.cluster):
        from flow.compiled import require_backend

        cluster = config.cluster
        backends = {
            "model.compile": (config.model.compile, cluster.learner),
            "model.vae_compile": (config.model.vae_compile, cluster.rollout),
        }
        for key, (backend, role) in backends.items():
            if backend:
                require_backend(backend, "cuda" if role.gpus else "cpu", key=key)
    return located


def reward_problems(config: RunConfig, prompts: Sequence[Prompt], *, is_local: bool) -> Iterator[InputError]:
    """Find reasons why rewards cannot score: arguments, libraries, weights, servers, prompts. No weights are loaded.

    The nodes of a given cluster are checked by `actors.rewards.readiness`.

    Args:
        is_local: whether this process scores even if the config names a cluster.
    """
    for reward in config.rewards.values():
        if reward.runtime_env:
            continue
        try:
            if is_local or not cluster_address(config.cluster):
                require_ready(reward.scorer, reward.args)
            check_prompts(reward.scorer, reward.args, prompts)
        except InputError as problem:
            yield problem
    try:
        _require_component(config)
    except InputError as problem:
        yield problem


def _require_component(config: RunConfig) -> None:
    """Raise ConfigError if `evaluation.component` names a component that its scorer does not declare."""
    name, _, component = config.evaluation.component.partition("/")
    if not component:
        return
    reward = config.rewards.get(name)
    declared = () if reward is None else None if reward.runtime_env else components_of(reward.scorer, reward.args)
    if declared is not None and component not in declared:
        known = ["reward", *config.rewards, *(f"{name}/{each}" for each in declared)]
        raise ConfigError(f"evaluation.component must be one of {known}, got {config.evaluation.component!r}")


def concerns(config: RunConfig, inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Find settings that do not stop a run, but may be unintended.

    Yields:
        The type of a condition that does not hold, and its message.

    Raises:
        ModelError: the model's config files or tokenizers cannot be read.
    """
    from flow.models.text import overlong

    if secrets := _sent_secrets(config):
        yield "SecretsKept", f"{secrets}: {SENT_SECRETS}"
    if both := overlap(inputs.prompts, inputs.heldout):
        yield "PromptsApart", f"{both}: set data.train and data.heldout to files without common prompts"
    for name, each in (("data.train", inputs.prompts), ("data.heldout", inputs.heldout)):
        if table := as_table(each):
            yield "PromptsPlain", f"{name} looks like a table, and {table}: keep its column of prompts"
    different = len(set(map(content_of, inputs.prompts)))
    draws = config.iterations * config.group.per_iteration / max(1, different)
    if draws > MOST_DRAWS:
        yield (
            "PromptsEnough",
            f"each of the {different} training prompts is drawn {draws:,.0f} times, so the model may learn them by"
            " heart: give data.train more prompts, for instance by `flowcredit prompts` (docs/prompts.md)",
        )
    model = config.model
    negative = [prompt.negative for prompt in inputs.all_prompts if prompt.negative.strip()]
    if negative and model.guidance <= 1:
        yield (
            "NegativePrompts",
            f"{len(negative)} negative prompts, such as {shown(negative[0])}, do nothing at model.guidance"
            f" {model.guidance:g}: raise it above 1, or leave them out",
        )
    if sign := inputs.model.sign_of_distillation:
        yield (
            "BaseModel",
            f"the model was distilled to few steps ({sign}), and training blurs its images: train its base model, and"
            " distil that afterwards",
        )
    side = inputs.model.side
    is_small = model.height is not None and model.width is not None and min(model.height, model.width) < side
    if is_small and min(config.evaluation.size or (0, 0)) < side:
        yield (
            "NativeSize",
            f"images of {model.height} x {model.width} are smaller than the model's own {side} x {side}, and at that"
            f" size the adapter may make grids: evaluate with evaluation.height={side} evaluation.width={side}, or"
            " raise model.height and model.width",
        )
    limit, longer = overlong(inputs.model, [prompt.text for prompt in inputs.all_prompts])
    if longer:
        yield (
            "PromptsFit",
            f"{len(longer)} prompts are longer than the text encoder's {limit} tokens and are cut off, such as"
            f" {', '.join(map(shown, longer[:3]))}: shorten them, or raise model.max_sequence_length if the model uses"
            " it",
        )


def _sent_secrets(config: RunConfig) -> str:
    """Name the secrets that Ray gets, and what sends them; empty if there are none."""
    sent = {"the job's env_vars": job_variables()}
    sent |= {
        f"rewards.{name}.runtime_env": reward.runtime_env.get("env_vars") or {}
        for name, reward in config.rewards.items()
        if reward.runtime_env
    }
    found = [f"{', '.join(names)} in {where}" for where, held in sent.items() if (names := secrets_among(held))]
    return " and ".join(found)


def gpu_problems(config: RunConfig) -> Iterator[InputError]:
    """Yield an error if the actors reserve more GPUs than this machine has, unless a cluster's address is given."""
    import torch

    if cluster_address(config.cluster):
        return
    reserved, found = config.reserved["GPU"], torch.cuda.device_count()
    if reserved > found:
        yield ConfigError(
            f"the actors reserve {reserved:g} GPUs, this machine has {found}: set cluster.address or cluster.*.gpus, or"
            " lower cluster.rollout_actors or cluster.learner.workers"
        )


def label_problems(config: RunConfig) -> Iterator[InputError]:
    """Yield an error for each role whose labels have no nodes to select, since no cluster's address is given."""
    if cluster_address(config.cluster):
        return
    for name, role in config.cluster.roles.items():
        if role.labels:
            yield ConfigError(
                f"cluster.{name}.labels select nodes of a given cluster, got {role.labels} without one:"
                " set cluster.address, or remove them"
            )


def environment_problems(config: RunConfig) -> Iterator[InputError]:
    """Yield an error for each reward whose `runtime_env` Ray does not take."""
    for name, reward in config.rewards.items():
        if reward.runtime_env:
            try:
                require_environment(reward.runtime_env, f"rewards.{name}.runtime_env")
            except ConfigError as error:
                yield error


def require_environment(tree: Mapping[str, Any], what: str) -> None:
    """Check that Ray takes a runtime environment.

    Raises:
        ConfigError: it does not.
    """
    from ray.runtime_env import RuntimeEnv

    try:
        RuntimeEnv(**tree)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{what} must be a Ray runtime environment: {one_line(error)}; correct it") from None


def local_concerns(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Find the settings of rewards that a run in one process ignores, in the form of `concerns`."""
    ignored = [
        f"rewards.{name}.{field}"
        for name, reward in config.rewards.items()
        for field in ("timeout_s", "runtime_env")
        if getattr(reward, field) is not None
    ]
    if ignored:
        yield (
            "LocalSettings",
            f"--local ignores {', '.join(ignored)}: scorers run in this process, without a time limit",
        )

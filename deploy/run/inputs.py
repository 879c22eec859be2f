"""The inputs of a run, checked before anything starts: model folder, trackers, prompt files, scorers."""

from collections.abc import Iterator, Sequence

from deploy.monitor.trackers import check_trackers
from flow.models.folder import read_index
from protocol.config.run import RunConfig
from protocol.messages import Prompt
from protocol.prompts import overlap, read_prompts
from rewards.scorer import check_prompts


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
    return prompts, heldout


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

"""Encodes a run's prompts and their images before it starts, so that no actor of the run holds an encoder."""

import asyncio
from collections.abc import Callable, Sequence

from flow.device import device_of, torch_threads
from protocol.config.run import RunConfig
from protocol.messages import EncoderInput, Prompt

BATCH = 256
"""Prompts per call; a call has a rollout actor's deadline."""


def encoder_inputs(config: RunConfig, prompts: Sequence[Prompt]) -> list[EncoderInput]:
    """List what the policy may need: the prompts with their images, and their negatives if guidance uses them."""
    asked = [(prompt.text, prompt.conditions) for prompt in prompts]
    if config.model.guidance > 1:
        asked += [(prompt.negative, prompt.conditions) for prompt in prompts]
    return list(dict.fromkeys(asked))


async def encode_ahead(
    config: RunConfig, prompts: Sequence[Prompt], *, is_local: bool, say: Callable[[str], None]
) -> None:
    """Fill `model.embedding_cache` on the rollout actors' resources; without a cache do nothing.

    Args:
        config: config of the run, with the model, the cache and the rollout actors' resources.
        prompts: all prompts of the run, including the held-out ones.
        is_local: encode in this process instead of a Ray actor.

    Raises:
        ModelError: the encoders cannot be loaded or the folder cannot be written.
        PoolError: the encoding actor died or overran its deadline.
    """
    if config.model.embedding_cache is None:
        return
    asked = encoder_inputs(config, prompts)
    say(f"looking up {len(asked)} prompts in {config.model.embedding_cache}")
    batches = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
    if is_local:
        encoded = await _locally(config, batches)
    else:
        from actors.encoder import encode_on_ray

        encoded = await encode_on_ray(config, batches)
    if encoded:
        say(f"encoded {encoded} new prompts")


async def _locally(config: RunConfig, batches: Sequence[Sequence[EncoderInput]]) -> int:
    from flow.models.load import open_embeddings

    role = config.cluster.rollout
    embeddings = await asyncio.to_thread(open_embeddings, config.model, device=device_of(role))

    def fill(batch: Sequence[EncoderInput]) -> int:
        with torch_threads(role.threads):
            return embeddings.fill(batch)

    try:
        return sum([await asyncio.to_thread(fill, batch) for batch in batches])
    finally:
        embeddings.free()

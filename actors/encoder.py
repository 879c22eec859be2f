"""The Ray actors that fill the embedding cache before a run, on the rollout actors' GPUs."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
import torch

from actors.pool.calls import ActorFailedError, answer
from actors.pool.nodes import ray_options
from flow.device import take_device
from flow.models.load import open_embeddings
from protocol.config.run import RunConfig
from protocol.errors import PoolError, one_line
from protocol.messages import EncoderInput


@ray.remote
class EncoderActor:
    """Holds the text encoders for as long as prompts are missing from the cache."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.set_num_threads(config.cluster.rollout.threads)

    def prepare(self) -> None:
        """Find the model, see `actors.pool.calls.Alive`."""
        self._embeddings = open_embeddings(self._config.model, device=take_device(self._config.cluster.rollout))

    def fill(self, wanted: Sequence[EncoderInput]) -> int:
        """Encode the prompts that the cache lacks; return how many there were."""
        return self._embeddings.fill(wanted)


async def encode_on_ray(config: RunConfig, batches: Sequence[Sequence[EncoderInput]]) -> int:
    """Fill the cache batch by batch on the resources of all rollout actors; each call has their deadline.

    A prompt is encoded alone, so its embeddings have the same bits wherever they are made.

    Returns:
        How many prompts the cache lacked.

    Raises:
        PoolError: an actor died or overran its deadline.
    """
    role, cluster = config.cluster.rollout, config.cluster
    reserved = cluster.bundle_reserved if cluster.is_colocated else role.reserved
    waiting, done = deque(batches), []
    actor_class: Any = EncoderActor

    async def work() -> None:
        actor = actor_class.options(**ray_options(reserved)).remote(config)
        try:
            await answer(actor.prepare.remote(), timeout_s=role.timeout_s)
            while waiting:
                done.append(await answer(actor.fill.remote(waiting.popleft()), timeout_s=role.timeout_s))
        finally:
            ray.kill(actor)

    tasks = {asyncio.create_task(work()) for _ in range(min(cluster.rollout_actors, len(batches)))}
    try:
        while len(done) < len(batches):  # then nobody waits for an actor that still has no node
            ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        return sum(done)
    except ActorFailedError as error:
        reason = one_line(error)
        raise PoolError(f"the text encoders failed: {reason}; raise cluster.rollout.timeout_s or try again") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

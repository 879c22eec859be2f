"""The Ray actor that fills the embedding cache before a run, with the learner's resources."""

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


@ray.remote
class EncoderActor:
    """Holds the text encoders for as long as prompts are missing from the cache."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.set_num_threads(config.cluster.learner.threads)

    def prepare(self) -> None:
        """Find the model. In the constructor, Ray would turn a user's mistake into a dead actor."""
        self._embeddings = open_embeddings(self._config.model, device=take_device(self._config.cluster.learner))

    def fill(self, texts: Sequence[str]) -> int:
        """Encode the texts that the cache lacks; return how many there were."""
        return self._embeddings.fill(texts)


async def encode_on_ray(config: RunConfig, batches: Sequence[Sequence[str]]) -> int:
    """Fill the cache batch by batch; each call has the learner's deadline.

    Raises:
        PoolError: the actor died or overran its deadline.
    """
    role = config.cluster.learner
    actor_class: Any = EncoderActor
    actor = actor_class.options(**ray_options(role.reserved)).remote(config)
    try:
        await answer(actor.prepare.remote(), timeout_s=role.timeout_s)
        return sum([await answer(actor.fill.remote(batch), timeout_s=role.timeout_s) for batch in batches])
    except ActorFailedError as error:
        reason = one_line(error)
        raise PoolError(f"the text encoders failed: {reason}; raise cluster.learner.timeout_s or try again") from error
    finally:
        ray.kill(actor)

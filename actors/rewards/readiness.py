"""Ask the nodes of a cluster before a run whether they have what its rewards need: libraries, weights, servers."""

import asyncio
import logging

import ray

from actors.pool.calls import ActorFailedError, answer
from actors.rewards.pool import for_actors
from protocol.config.cluster import cluster_address
from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from rewards.scorer import require_ready

log = logging.getLogger(__name__)


async def require_ready_on_ray(config: RunConfig) -> None:
    """Ask one node for each reward, with the resources, labels and environment of its actors; nothing is loaded.

    Without a given cluster, `deploy.run.inputs` checks a reward that has no `runtime_env` on the run's own machine. If
    no node has room within the deadline of a call, the check is left to the reward's actors.

    Raises:
        ScorerError: a library, the weights or the server of a reward are missing there.
    """

    async def check(reward: RewardConfig) -> None:
        (there, options), labels = for_actors(reward, config), config.cluster.reward.labels
        options |= {"label_selector": labels} if labels else {}
        timeout_s = reward.timeout_s or config.cluster.reward.timeout_s
        try:
            await answer(_require_ready.options(**options).remote(there), timeout_s=timeout_s)
        except ActorFailedError as error:
            log.warning("scorer %s could not be checked before the run: %s", reward.scorer, error)

    is_given = cluster_address(config.cluster) is not None
    await asyncio.gather(*(check(reward) for reward in config.rewards.values() if is_given or reward.runtime_env))


@ray.remote(max_retries=0)
def _require_ready(reward: RewardConfig) -> None:
    require_ready(reward.scorer, reward.args)

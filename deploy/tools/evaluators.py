"""The actors of an evaluation, without a learner: on Ray, or in this process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.run.encode import encode_ahead
from deploy.run.local import LocalFleet
from protocol.config.run import RunConfig
from protocol.messages import Prompt

if TYPE_CHECKING:
    from actors.fleet import RayEvaluators


class ToTerminal:
    """A `protocol.sink.StatusSink` that prints warnings, errors and conditions that do not hold."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, ARG002, FBT001
        if holds is False:
            self.event(message, "warning")

    def event(self, message: str, kind: str = "info") -> None:
        if kind != "info":
            self._console.print(message, markup=False, emoji=False, soft_wrap=True)


@asynccontextmanager
async def evaluators(
    config: RunConfig, heldout: Sequence[Prompt], *, is_local: bool
) -> AsyncIterator["LocalFleet | RayEvaluators"]:
    """Start the actors of an evaluation, and a local Ray cluster unless one is given; stop both at the end.

    Args:
        config: config with sections `model`, `rewards` and `cluster`.
        heldout: the prompts; the scorers check them, and with an embedding cache they are encoded in advance.

    Raises:
        InputError: there is no such cluster, a scorer is not ready there, or a prompt cannot be scored.
    """
    console = Console(stderr=True, highlight=False)
    sink = ToTerminal(console)
    with ExitStack() as held:
        if is_local:
            fleet = LocalFleet(config, has_learner=False)
        else:
            from actors.fleet import RayEvaluators
            from actors.rewards.readiness import require_ready_on_ray
            from deploy.run.cluster import ray_cluster
            from deploy.run.warm.workers import warm_python

            python = held.enter_context(warm_python(config))
            starting = asyncio.ensure_future(
                asyncio.to_thread(held.enter_context, ray_cluster(without_learner(config), sink, python))
            )
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                await asyncio.wait([starting])  # leaving the stack then stops the cluster
                raise
            await require_ready_on_ray(config)
            fleet = RayEvaluators(without_learner(config), sink)
        held.callback(fleet.stop)
        await encode_ahead(config, heldout, is_local=is_local, say=console.print)
        await fleet.start()
        await fleet.check(heldout)
        yield fleet


def without_learner(config: RunConfig) -> RunConfig:
    """Return a config whose learner reserves nothing, for a cluster that only evaluates.

    A rollout actor that is a learner worker too keeps the GPUs of both sides, since its model may lie on all of them.
    """
    rollout = config.cluster.joint_role if config.cluster.is_joint else config.cluster.rollout
    learner = config.cluster.learner.model_copy(update={"cpus": 0.0, "gpus": 0.0, "resources": {}, "labels": {}})
    cluster = config.cluster.model_copy(update={"rollout": rollout, "learner": learner})
    return config.model_copy(update={"cluster": cluster})

"""Rollout actors: the Ray actor around `flow.rollout.RolloutPolicy`, and their pool, which is the rollout port."""

from collections import deque
from functools import partial
from typing import Any, cast

import numpy as np
import ray
import torch

from actors.pool.alike import require_same_facts
from actors.pool.bundles import Bundles, ProcessOf
from actors.pool.calls import HEARTBEAT, ActorFailedError, ActorHandle, Alive, Member, answer
from actors.pool.nodes import NodeFailures, failure_reporter, ray_options
from actors.pool.pool import AHEAD, ActorPool
from flow.device import computing_facts, devices_of, library_facts, take_device
from flow.models.load import FrozenModel
from flow.rollout import RolloutPolicy, excerpt_of
from protocol.config.run import RunConfig
from protocol.errors import ContractError, ShardLostError
from protocol.ground.import_path import file_digests
from protocol.messages import (
    Adapter,
    Excerpt,
    GenerateRequest,
    Receipt,
    Rollout,
    ShardReceipt,
    ShardRequest,
)
from protocol.ports import ImagesHandle, RolloutHandle
from protocol.sink import StatusSink

ADAPTERS = "adapters"
"""Concurrency group of the calls that bring adapters, so that a publication waits for no shard."""


OPTIONS: dict[str, Any] = {"concurrency_groups": {**HEARTBEAT["concurrency_groups"], ADAPTERS: 1}}
"""Options of an actor class that rolls out."""


class RollingOut(Alive):
    """Makes trajectories and images, one call at a time, and receives adapters meanwhile. The pool ends a call at its
    deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.set_num_threads(config.cluster.rollout.threads)

    def prepare(self) -> dict[str, str]:
        """Load the model and return the facts that decide the bits."""
        role = self._config.cluster.rollout
        device = take_device(role)
        frozen = FrozenModel(self._config.model, devices_of(role)) if role.gpus > 1 else None
        return self._load_policy(device, frozen)

    def _load_policy(self, device: str, frozen: FrozenModel | None) -> dict[str, str]:
        self._policy = RolloutPolicy(self._config, device=device, frozen=frozen)
        return computing_facts(device)

    def facts(self) -> dict[str, str]:
        """Return the facts that decide the actor's bits, except the device's, before it has loaded anything."""
        return library_facts() | file_digests(self._config.own_functions)

    def first_adapter(self) -> Adapter:
        """Copy the adapter of iteration 0, before the first request."""
        return self._policy.first_adapter()

    @ray.method(concurrency_group=ADAPTERS)
    def receive(self, adapter: Adapter) -> tuple[int, str]:
        """Keep an adapter for the requests that name it; return its version and the digest of the received arrays."""
        return self._policy.receive(adapter)

    @ray.method(num_returns=3)
    def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, Rollout, np.ndarray]:
        """Roll out one shard; trajectories and images stay in the object store."""
        return self._policy.rollout(request)

    @ray.method(num_returns=2)
    def generate(self, request: GenerateRequest) -> tuple[Receipt, np.ndarray]:
        """Make ODE images; they stay in the object store."""
        return self._policy.generate(request)

    def rest(self) -> None:
        """Keep the weights in host memory until the next request."""
        self._policy.rest()

    def excerpt(self, rollout: Rollout, images: np.ndarray, members: int) -> Excerpt:
        """Cut out the first members of a shard of any actor, with small images.

        Args:
            images: its images uint8 [I, H, W, 3].
            members: M, how many trajectories; all if there are fewer.
        """
        return excerpt_of(rollout, images, members=members)


@ray.remote(**OPTIONS)
class RolloutActor(RollingOut):
    """A process that rolls out."""


class RolloutPool:
    """The rollout actors; also brings every new adapter to all of them."""

    def __init__(
        self,
        config: RunConfig,
        nodes: NodeFailures,
        sink: StatusSink,
        *,
        bundles: Bundles | None = None,
        process_of: ProcessOf | None = None,
        actor_class: Any = RolloutActor,
    ) -> None:
        """
        Args:
            bundles: reserve the actors' resources; without them an actor runs wherever there is room.
            process_of: makes the actor of a slot, if it is a learner worker too; otherwise `actor_class` does.
        """
        cluster = config.cluster
        self._answer = partial(
            answer,
            timeout_s=cluster.rollout.timeout_s,
            heartbeat_s=cluster.heartbeat_s,
            memory_remedy=cluster.memory_remedy,
        )
        self._nodes = nodes
        self._facts: dict[str, str] = {}
        self._files = file_digests(config.own_functions)
        self._newest: deque[tuple[Adapter, ray.ObjectRef[Any]]] = deque(maxlen=config.held_adapters)
        resources = ray_options(cluster.rollout.reserved)

        def spawn(slot: int) -> ActorHandle:
            if process_of:
                return process_of(slot, "rollout", config)
            where = bundles.options(slot) if bundles else nodes.options(cluster.rollout)
            return actor_class.options(**resources, **where).remote(config)

        self.pool = ActorPool(
            "rollout",
            spawn,
            size=cluster.rollout_actors,
            max_restarts=cluster.max_restarts,
            prepare=self._prepare,
            restart_window_s=cluster.restart_window_s,
            patience_s=cluster.rollout.timeout_s,
            depth=AHEAD,
            report_failure=failure_reporter("rollout", nodes, sink),
        )

    async def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, RolloutHandle, ImagesHandle]:
        """Roll out one shard on the next idle actor."""

        async def work(actor: ActorHandle) -> tuple[ShardReceipt, RolloutHandle, ImagesHandle]:
            receipt, rollout, images = actor.rollout.remote(request)
            return await self._answer(receipt, actor=actor), rollout, images

        return await self.pool.call(work)

    def parallel(self) -> int:
        """Count the shards that the ready actors can hold; each rolls out one at a time and holds the next."""
        return AHEAD * self.pool.ready

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, ImagesHandle]:
        """Make ODE images on the next idle actor."""

        async def work(actor: ActorHandle) -> tuple[Receipt, ImagesHandle]:
            receipt, images = actor.generate.remote(request)
            return await self._answer(receipt, actor=actor), images

        return await self.pool.call(work)

    async def fetch(self, images: ImagesHandle) -> np.ndarray:
        try:
            return await self._answer(cast(Any, images))
        except ActorFailedError as error:
            raise ShardLostError(f"images could not be fetched: {error}") from error

    async def excerpt(self, rollout: RolloutHandle, images: ImagesHandle, *, members: int) -> Excerpt:
        """Cut out the first members on the next idle actor, so that the other images stay where they are."""
        return await self.pool.call(
            lambda actor: self._answer(actor.excerpt.remote(rollout, images, members), actor=actor)
        )

    async def rest(self) -> None:
        """Let every actor keep its weights in host memory until its next request."""
        await self.pool.on_every_member(lambda actor: self._answer(actor.rest.remote(), actor=actor))

    async def first_adapter(self) -> Adapter:
        return await self.pool.call(lambda actor: self._answer(actor.first_adapter.remote(), actor=actor))

    async def publish(self, adapter: Adapter) -> None:
        """Put the adapter into the object store once; every node fetches it once, every actor confirms its digest."""
        self._newest.append((adapter, ray.put(adapter)))
        await self.pool.on_every_member(lambda actor: self._bring(actor, *self._newest[-1]))

    async def _prepare(self, member: Member) -> None:
        """Load the model, and compare the facts that decide the bits with the driver's and the first actor's."""
        actor, joining = member.handle, f"one on node {member.node}"
        self._nodes.joined(actor, member.node_id)
        facts = await self._answer(actor.facts.remote())
        driver = library_facts() | self._files
        require_same_facts(driver, facts, joining=joining, role="rollout actors and the driver")
        facts = await self._answer(actor.prepare.remote())
        self._facts = self._facts or facts
        require_same_facts(self._facts, facts, joining=joining, role="rollout actors")
        loaded = None
        while loaded is not (newest := self._newest[-1] if self._newest else None):
            for adapter, reference in list(self._newest):
                await self._bring(actor, adapter, reference)
            loaded = newest

    async def _bring(self, actor: ActorHandle, adapter: Adapter, reference: "ray.ObjectRef[Any]") -> None:
        held = await self._answer(actor.receive.remote(reference), actor=actor)
        if held != (adapter.version, adapter.digest):
            raise ContractError(
                f"a rollout actor must hold version {adapter.version} ({adapter.digest[:12]}), got {held}"
            )
        self.pool.confirm(actor, adapter)

"""The fleet in one process without Ray, for debugging and tests: plain classes implement the ports.

All computation runs on one separate thread, so the event loop stays free for Ctrl-C. Torch uses as many threads as the
role that computes has. A computation that does not end within `STOP_S` seconds of the fleet's end is left behind.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import numpy as np

from actors.pool.usage import usage
from deploy.run.unfinished import leave
from flow.device import KERNELS, computing, device_of, devices_of, torch_threads
from flow.models.load import FrozenModel
from flow.rollout import RolloutPolicy, excerpt_of
from learner.update.learner import Learner
from learner.update.workers import InProcessWorker, update
from protocol.config.cluster import RoleConfig
from protocol.config.run import RunConfig
from protocol.errors import ContractError, PoolError, RewardError
from protocol.messages import (
    Adapter,
    Credit,
    Excerpt,
    GenerateRequest,
    LearnerState,
    Prompt,
    Receipt,
    ScoredGroup,
    Scores,
    ShardReceipt,
    ShardRequest,
)
from protocol.ports import ImagesHandle, Metrics, Ports, RolloutHandle
from protocol.sink import StatusSink
from protocol.status import ActorStatus, PoolStatus
from rewards.scorer import CheckedScorer, score_prompts, scorer_of
from rewards.scores import Mixture, Tally, group_ranges, joined, settle

Result = TypeVar("Result")
STOP_S = 2.0
"""Seconds that the end of a fleet waits for the computation in progress: a scorer in it may take for ever."""


class LocalFleet(Mixture):
    """A `protocol.ports.Fleet` in this process; a handle is the message itself."""

    def __init__(self, config: RunConfig, sink: StatusSink | None = None, *, has_learner: bool = True) -> None:
        """
        Args:
            sink: receives conditions about missing scores; None counts none.
            has_learner: False for a fleet that only evaluates.
        """
        self._config = config
        self._has_learner = has_learner
        self._tallies = {name: Tally(name, sink) for name in config.rewards} if sink else {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._work: set[Future[Any]] = set()
        self._busy_s = dict.fromkeys(("learner", "rollout", *(f"reward/{name}" for name in config.rewards)), 0.0)
        self._calls = dict.fromkeys(self._busy_s, 0)
        self._working = ""
        self._published: tuple[int, str] | None = None
        self._joint: FrozenModel | None = None
        self.ports = Ports(rollouts=self, rewards=self, learner=self, adapters=self)

    async def start(self) -> None:
        """Load the model for rollouts and for the learner, once if they are joint, and build the scorers."""
        role = self._config.cluster.rollout
        self._rollout = await self._run(
            "rollout", lambda: RolloutPolicy(self._config, device=device_of(role), frozen=self._frozen(role))
        )
        if self._has_learner:
            await self.restart_learner()
        self._scorers = {
            name: await self._run(f"reward/{name}", partial(scorer_of, reward))
            for name, reward in self._config.rewards.items()
        }

    async def restart_learner(self) -> None:
        role = self._config.cluster.learner
        self._learner = await self._run(
            "learner", lambda: Learner(self._config, device=device_of(role), frozen=self._frozen(role))
        )

    def _frozen(self, role: RoleConfig) -> FrozenModel | None:
        """Return the model for a role that does not load it alone: both sides have one, or it is on several GPUs."""
        if not self._config.cluster.is_joint:
            return FrozenModel(self._config.model, devices_of(role)) if role.gpus > 1 else None
        self._joint = self._joint or FrozenModel(self._config.model, devices_of(self._config.cluster.joint_role))
        return self._joint

    def stop(self) -> None:
        """Start no other computation, and wait up to `STOP_S` seconds for the one in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        leave(wait(self._work, timeout=STOP_S).not_done)

    async def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, RolloutHandle, ImagesHandle]:
        receipt, rollout, images = await self._run("rollout", lambda: self._rollout.rollout(request))
        return receipt, RolloutHandle(rollout), ImagesHandle(images)

    def parallel(self) -> int:
        """Return 1: there is one thread, so it rolls out one shard at a time."""
        return 1

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, ImagesHandle]:
        receipt, images = await self._run("rollout", lambda: self._rollout.generate(request))
        return receipt, ImagesHandle(images)

    async def first_adapter(self) -> Adapter:
        return await self._run("rollout", self._rollout.first_adapter)

    async def fetch(self, images: ImagesHandle) -> np.ndarray:
        """Return the images: here they are their own handle."""
        return images

    async def excerpt(self, rollout: RolloutHandle, images: ImagesHandle, *, members: int) -> Excerpt:
        return excerpt_of(rollout, images, members=members)

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Check the prompts with the scorers that `check_inputs` could not build."""
        for name, reward in self._config.rewards.items():
            if reward.runtime_env:
                await self._run(f"reward/{name}", partial(self._scorers[name].check, prompts))

    def failures(self) -> Metrics:
        """Return no metrics: scorers in this process are not retried, and `reward/missing` counts missing scores."""
        return {}

    async def update(self, groups: Sequence["asyncio.Future[ScoredGroup]"]) -> Metrics:
        if self._config.cluster.offload:
            await asyncio.wait(groups)
            await self._run("rollout", self._rollout.rest)
        return await update(
            self._config, [InProcessWorker(self._learner, lambda work: self._run("learner", work))], groups
        )

    async def adapter(self) -> Adapter:
        return self._learner.adapter()

    async def credit(self, group: int) -> Credit:
        return self._learner.credit(group)

    async def state(self) -> LearnerState:
        """Copy the state for an exact resume, after the computation in progress."""
        return await self._run("learner", lambda: self._learner.state())

    async def restore(self, state: LearnerState) -> None:
        self._learner.restore(state)

    async def publish(self, adapter: Adapter) -> None:
        """Load the adapter into the rollout policy, and check the version and digest that it then has."""
        held = await self._run("rollout", lambda: self._rollout.receive(adapter))
        if held != (adapter.version, adapter.digest):
            raise ContractError(f"the rollout policy must hold version {adapter.version}, got {held}")
        self._published = held

    def pools(self) -> list[PoolStatus]:
        """Describe one actor of each kind, all in this process."""
        return [
            PoolStatus(name=name, desired=1, ready=1, busy=int(name == self._working), is_resizable=False)
            for name in self._busy_s
        ]

    def actors(self) -> list[ActorStatus]:
        version, digest = self._published or (None, None)
        return [
            ActorStatus(
                name=f"{name}-0",
                kind=name,
                state="busy" if name == self._working else "idle",
                node=socket.gethostname(),
                pid=os.getpid(),
                adapter_version=version if not name.startswith("reward/") else None,
                adapter_digest=digest[:12] if digest and not name.startswith("reward/") else None,
                last_seen=time.time(),
                calls=calls,
                usage=usage(),
            )
            for name, calls in self._calls.items()
        ]

    def busy_seconds(self) -> dict[str, float]:
        """Sum the seconds of computation so far, by kind."""
        return dict(self._busy_s)

    def queues(self) -> dict[str, int]:
        """Return no queues: images are scored as soon as they are made."""
        return {}

    def scale(self, pool: str, size: int) -> None:
        """Raise PoolError: there is only one process."""
        raise PoolError(f"a run with --local is one process and cannot be scaled, got {size} for {pool}")

    def shortage(self, pool: str) -> str:  # noqa: ARG002
        """Return an empty text: nothing waits for a node."""
        return ""

    async def _scores_by_name(
        self,
        names: Collection[str],
        images: np.ndarray,
        prompts: Sequence[Prompt],
        group: int | None,
    ) -> dict[str, Scores]:
        """Score once with each scorer; where `pause` would wait, the run ends: no process could replace the scorer."""
        answers = {}
        for name in names:
            config = self._config.rewards[name].model_copy(update={"tries": 1})
            cuts = [slice(rows.start, rows.stop) for rows in group_ranges(config, len(prompts), group)]
            copies = deepcopy(list(prompts))  # as for another process: no other call sees what a scorer changes there

            def score(
                scorer: CheckedScorer = self._scorers[name],
                cuts: Sequence[slice] = cuts,
                copies: Sequence[Prompt] = copies,
            ) -> Scores:
                return joined([score_prompts(scorer, images[cut], copies[cut]) for cut in cuts])

            scores = await self._run(f"reward/{name}", score)
            if config.on_failure == "pause" and not scores.valid.any():
                raise RewardError(
                    f"reward {name} has no score for any of {len(prompts)} images: {scores.reasons[0]}; with --local"
                    f" nothing replaces a scorer during a pause: fix it, or set rewards.{name}.on_failure to missing"
                )
            answers[name] = settle(name, config, scores)
            if name in self._tallies:  # an error above says it all
                self._tallies[name].add(scores)
        return answers

    async def _run(self, name: str, work: Callable[[], Result]) -> Result:
        """Run `work` as `rollout`, `learner` or `reward/NAME`, with the threads of that role."""
        kind = name.partition("/")[0]
        role: RoleConfig = getattr(self._config.cluster, kind)

        def timed() -> Result:
            began, self._working = time.monotonic(), name
            try:
                with torch_threads(role.threads) if kind == "reward" else _alone(role):
                    return work()
            finally:
                self._working = ""
                self._busy_s[name] += time.monotonic() - began
                self._calls[name] += 1

        future = self._thread.submit(timed)
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return await asyncio.wrap_future(future)


@contextmanager
def _alone(role: RoleConfig) -> Iterator[None]:
    with KERNELS, computing(role):
        yield

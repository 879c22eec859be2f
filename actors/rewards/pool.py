"""Reward actors: one pool for each scorer. It tries missing scores again and then applies `on_failure`.

`missing` and `drop_group` answer with missing scores, `pause` waits until the scorer answers again, `fail` raises. A
failed score is never 0.
"""

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import ray

from actors.pool.alike import require_same_facts
from actors.pool.calls import GROUP, HEARTBEAT, ActorFailedError, ActorHandle, Alive, Member, answer
from actors.pool.nodes import NodeFailures, failure_reporter, ray_options
from actors.pool.pool import AHEAD, ActorPool
from actors.pool.restarts import backoff_s
from actors.rewards.queue import RewardQueue
from flowcredit.code import CODE, code_digest
from protocol.config.reward import RewardConfig
from protocol.config.run import RunConfig
from protocol.errors import FlowcreditError, ScorerError
from protocol.ground.files import sha256_of
from protocol.ground.import_path import file_of, whole_path
from protocol.messages import Prompt, Scores
from protocol.ports import ImagesHandle, Metrics
from protocol.sink import StatusSink
from protocol.status import PoolStatus
from rewards.scorer import Piece, score_pieces, scorer_of
from rewards.scores import Mixture, Tally, group_ranges, joined, patched, settle


@ray.remote(**HEARTBEAT)
class RewardActor(Alive):
    """Scores images with one scorer. It holds no state, so any actor of its pool gives the same answer."""

    def __init__(self, config: RewardConfig, threads: int = 1) -> None:
        self._config = config
        self._threads = threads

    def prepare(self) -> dict[str, str]:
        """Load the scorer and return the facts that decide its bits: its file, our code, what torch computes with."""
        self._scorer = scorer_of(self._config)
        self._scorer.is_replaceable = True
        file = file_of(self._config.scorer)
        facts = {CODE: code_digest(), **({"the scorer's file": sha256_of(file)[:12]} if file else {})}
        if "torch" not in sys.modules:
            return facts
        from flow.device import device_facts  # it imports torch, which many scorers do not need

        torch = sys.modules["torch"]
        torch.set_num_threads(self._threads)
        device = device_facts("cuda" if torch.cuda.is_initialized() else "cpu")
        return {**facts, **device, "torch": torch.__version__}

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise InputError for a prompt that cannot be scored."""
        self._scorer.check(prompts)

    @ray.method(concurrency_group=GROUP)
    def failure(self) -> str:
        """Return the traceback of the scorer's newest kind of exception; empty if it has not raised."""
        return self._scorer.failure

    def score(self, pieces: Sequence[Piece], *images: np.ndarray) -> Scores:
        """Score the pieces in their order; `images` holds each piece's array uint8 [I, H, W, 3]."""
        return score_pieces(self._scorer, pieces, images)


log = logging.getLogger(__name__)
PAUSE_S = (1.0, 30.0)
"""Seconds between two attempts of a paused reward: the first pause, and the longest."""


class RewardPool:
    """One scorer's actors and queue. It tries missing scores again and then applies `on_failure`.

    Counts start at the beginning of the run.
    """

    def __init__(
        self,
        name: str,
        config: RewardConfig,
        make: Callable[[int], ActorPool],
        *,
        timeout_s: float,
        heartbeat_s: float,
        tally: Tally,
    ) -> None:
        """
        Args:
            config: sets batches, tries and the failure policy.
            make: makes a pool of that many actors; a pause may call it again.
            heartbeat_s: longest silence of an actor that works.
        """
        self.name = name
        self.pool = make(config.actors)
        self.retried = 0
        """Images that were scored again after a failure."""
        self.missing = 0
        """Images that have no score after all tries."""
        self.dropped = 0
        """Shards whose group was dropped."""
        self.paused_because = ""
        """Why it is paused now; empty if it is not."""
        self._tally = tally
        self._config = config
        self._make = make
        self._answer = partial(answer, timeout_s=timeout_s, heartbeat_s=heartbeat_s)
        self.queue = RewardQueue(
            batch=sys.maxsize if config.sees == "group" else config.batch,
            delay_s=config.batch_delay_s,
            call=lambda work: self.pool.call(work),
            score_pieces=self._score_pieces,
        )
        self._paused_s = 0.0
        self._worked = -math.inf
        self._has_traceback = False
        self._paused_since: float | None = None
        self._renewing = asyncio.Lock()

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise InputError for a prompt that the scorer cannot score; an actor checks, since it has the libraries."""
        await self.pool.call(lambda actor: self._answer(actor.check.remote(prompts)))

    async def score(self, images: ImagesHandle, prompts: Sequence[Prompt], *, group: int | None = None) -> Scores:
        """Score all images, retrying failures; `on_failure` decides about the rest.

        Args:
            group: images of one group, for a scorer that compares a group; None if all are one group.

        Returns:
            Scores of B images; a missing one has a reason.

        Raises:
            RewardError: a score is missing and `on_failure` is `fail`.
            ContractError: the scorer broke its contract.
        """
        whole = Piece.of(prompts)
        pieces = [whole.part(rows) for rows in group_ranges(self._config, len(prompts), group)]
        scores = await self._tried(images, pieces)
        failed, pauses = time.monotonic(), 0
        while self._config.on_failure == "pause" and not scores.valid.any():
            pauses += 1
            await self._pause(scores.reasons[0], backoff_s(pauses, PAUSE_S))
            has_worked = self._worked > failed
            scores = await self._tried(images, pieces)
            if has_worked:
                break  # it had scored other images in the meantime, so the failure lies in these images
        if scores.valid.any():
            self._worked = time.monotonic()
        self._resume()
        settled = settle(self.name, self._config, scores)
        self._tally.add(scores)  # an error above says it all
        self.missing += int((~settled.valid).sum())
        self.dropped += settled.voids_group
        return settled

    @property
    def paused_s(self) -> float:
        """Seconds of pauses so far."""
        pausing = time.monotonic() - self._paused_since if self._paused_since is not None else 0.0
        return self._paused_s + pausing

    def failures(self) -> dict[str, float]:
        """Count what went wrong, by the names of docs/metrics.md; some counts may be 0."""
        return {
            "retried": self.retried,
            "failed_calls": self.queue.failed_calls,
            "missing": self.missing,
            "dropped": self.dropped,
            "paused_s": self.paused_s,
        }

    def status(self) -> PoolStatus:
        """Describe its actors for the status; a pause is shown as trouble."""
        status = self.pool.status()
        if not self.paused_because:
            return status
        return status.model_copy(update={"trouble": f"paused: {self.paused_because}"})

    async def _score_pieces(
        self, actor: ActorHandle, pieces: Sequence[Piece], images: Sequence[ImagesHandle]
    ) -> Scores:
        scores: Scores = await self._answer(actor.score.remote(pieces, *images), actor=actor)
        if not self._has_traceback and not scores.valid.all():
            with suppress(ActorFailedError):
                await self._log_traceback(actor, next(filter(None, scores.reasons)))
        return scores

    async def _log_traceback(self, actor: ActorHandle, reason: str) -> None:
        """Bring the traceback of the scorer's first exception into this process's log."""
        text: str = await self._answer(actor.failure.remote())
        if text and not self._has_traceback:
            self._has_traceback = True
            log.warning("the scorer of reward %s raised: %s", self.name, reason, exc_info=ScorerError(text))

    async def _tried(self, images: ImagesHandle, pieces: Sequence[Piece]) -> Scores:
        """Score all pieces at once, each up to `tries` times, and join the scores."""
        return joined(await asyncio.gather(*(self._piece_tried(images, piece) for piece in pieces)))

    async def _piece_tried(self, images: ImagesHandle, piece: Piece) -> Scores:
        """Score up to `tries` times; from the second time on only the missing images, in a separate call.

        A group is always scored as a whole and in a separate call.
        """
        is_group = self._config.sees == "group"
        scores = await self.queue.score(images, piece, is_alone=is_group)
        for _ in range(1, self._config.tries):
            missing: list[int] = np.flatnonzero(~scores.valid).tolist()
            if not missing:
                break
            rows = range(len(piece.rows)) if is_group else missing
            self.retried += len(rows)
            again = await self.queue.score(images, piece.part(rows), is_alone=True)
            scores = patched(scores, rows, again)
        return scores

    async def _pause(self, reason: str, seconds: float) -> None:
        if self._paused_since is None:
            log.warning("reward %s pauses: %s", self.name, reason)
            self._paused_since = time.monotonic()
        self.paused_because = reason
        await asyncio.sleep(seconds)
        async with self._renewing:
            if self.pool.has_failed:
                self.pool.stop()
                fresh = self._make(self.pool.desired)
                try:
                    await fresh.start()
                except FlowcreditError as error:
                    fresh.stop()
                    self.paused_because = str(error)
                else:
                    if fresh.desired != self.pool.desired:
                        fresh.scale(self.pool.desired)
                    self.pool = fresh

    def _resume(self) -> None:
        if self._paused_since is not None:
            self._paused_s += time.monotonic() - self._paused_since
            log.info("reward %s goes on after %.0f s", self.name, time.monotonic() - self._paused_since)
        self._paused_since, self.paused_because = None, ""


class RewardPools(Mixture):
    """The reward port: one pool of reward actors for each scorer, their scores mixed."""

    def __init__(
        self, config: RunConfig, nodes: NodeFailures, sink: StatusSink, *, actor_class: Any = RewardActor
    ) -> None:
        self._config = config
        self._actor_class = actor_class
        self._role = config.cluster.reward
        self._nodes = nodes
        self._sink = sink
        self._facts: dict[str, dict[str, str]] = {}
        self.rewards = {name: self._make_reward(name, reward) for name, reward in config.rewards.items()}

    @property
    def pools(self) -> dict[str, ActorPool]:
        """The actors of each reward by name; a pause may replace a pool that used up its restarts."""
        return {name: reward.pool for name, reward in self.rewards.items()}

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Check the prompts with the scorers that can only be built in their own runtime environment."""
        apart = [name for name, reward in self._config.rewards.items() if reward.runtime_env]
        await asyncio.gather(*(self.rewards[name].check(prompts) for name in apart))

    def statuses(self) -> list[PoolStatus]:
        """Describe each reward's actors for the status, with the reason of a pause."""
        return [reward.status() for reward in self.rewards.values()]

    def failures(self) -> Metrics:
        """Count what went wrong since the start, by name; empty if nothing did."""
        return {
            f"reward_pool/{name}/{failure}": float(count)
            for name, reward in self.rewards.items()
            for failure, count in reward.failures().items()
            if count
        }

    async def _scores_by_name(
        self,
        names: Collection[str],
        images: ImagesHandle,
        prompts: Sequence[Prompt],
        group: int | None,
    ) -> dict[str, Scores]:
        answers = await asyncio.gather(*(self.rewards[name].score(images, prompts, group=group) for name in names))
        return dict(zip(names, answers, strict=True))

    def _make_reward(self, name: str, reward: RewardConfig) -> RewardPool:
        timeout_s = reward.timeout_s or self._role.timeout_s
        cluster, (reward, options) = self._config.cluster, for_actors(reward, self._config)

        def spawn(_: int) -> ActorHandle:
            return self._actor_class.options(**options, **self._nodes.options(self._role)).remote(
                reward, self._role.threads
            )

        def make(size: int) -> ActorPool:
            return ActorPool(
                f"reward/{name}",
                spawn,
                size=size,
                max_restarts=cluster.max_restarts,
                prepare=partial(self._prepare, name),
                restart_window_s=cluster.restart_window_s,
                patience_s=timeout_s,
                depth=AHEAD,
                report_failure=failure_reporter(f"reward/{name}", self._nodes, self._sink),
            )

        return RewardPool(
            name, reward, make, timeout_s=timeout_s, heartbeat_s=cluster.heartbeat_s, tally=Tally(name, self._sink)
        )

    async def _prepare(self, name: str, member: Member) -> None:
        """Load the scorer, and require the facts that decide its bits to equal those of the reward's other actors.

        Whether torch is loaded may depend on how a process began, so only facts that both name are compared.
        """
        self._nodes.joined(member.handle, member.node_id)
        facts: dict[str, str] = await answer(member.handle.prepare.remote(), timeout_s=self._role.timeout_s)
        known = self._facts.setdefault(name, {})
        shared = {fact: value for fact, value in known.items() if fact in facts}
        require_same_facts(shared, facts, joining=f"one on node {member.node}", role=f"actors of reward {name}")
        known.update(facts)


def for_actors(reward: RewardConfig, config: RunConfig) -> tuple[RewardConfig, dict[str, Any]]:
    """Return what one reward's actors need: its config, and their Ray options (resources, runtime environment).

    The path of a scorer's file is absolute there, since an actor has another working folder.
    """
    options = ray_options(reward.reserved(config.cluster.reward))
    there = reward.model_copy(update={"scorer": whole_path(reward.scorer)})
    return there, options | ({"runtime_env": reward.runtime_env} if reward.runtime_env else {})

"""One scorer's pool of reward actors: asks again where a score is missing, and then follows the failure policy.

`missing` and `drop_group` answer with missing scores, `pause` waits until the scorer answers again, `fail` raises. A
failed score is never 0.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from actors.pool.calls import answer
from actors.pool.pool import ActorPool
from actors.rewards.queue import ActorHandle, RewardQueue
from protocol.config.reward import RewardConfig
from protocol.errors import FlowcreditError
from protocol.messages import Metadata, Prompt, Scores
from protocol.ports import ImagesHandle
from protocol.status import PoolStatus
from rewards.answers import patched
from rewards.failure import settle
from rewards.pieces import Piece

log = logging.getLogger(__name__)
PAUSE_S = (1.0, 30.0)
"""Seconds between two attempts of a paused reward: at first, and at most (doubling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardHealth:
    """How one reward's pool is doing; counts since the start of the run."""

    waiting: int
    """Images that wait or are being scored."""
    images: int
    """Images asked for."""
    calls: int
    retried: int
    """Images that were tried again."""
    failed_calls: int
    """Calls whose actor died or that overran their deadline."""
    missing: int
    """Images that stayed without a score."""
    dropped: int
    """Requests whose group was set aside."""
    paused_s: float
    """Seconds in pause so far."""
    paused_because: str
    """Why it is paused now; empty when it is not."""


class RewardPool:
    """Made by the reward source; `make` gives a new pool of actors, once more when a paused one used up its own."""

    def __init__(
        self,
        name: str,
        config: RewardConfig,
        make: Callable[[], ActorPool],
        *,
        timeout_s: float,
        heartbeat_s: float | None = None,
    ) -> None:
        self.name = name
        self.pool = make()
        self._config = config
        self._make = make
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._queue = RewardQueue(
            batch=config.batch,
            delay_s=config.batch_delay_s,
            call=lambda work: self.pool.call(work),
            ask=self._ask,
        )
        self._images = self._retried = self._missing = self._dropped = 0
        self._paused_s = 0.0
        self._worked = -math.inf
        self._paused_since: float | None = None
        self._paused_because = ""
        self._renewing = asyncio.Lock()

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises InputError for a prompt that the scorer cannot score; asked where its libraries are."""
        await self.pool.call(lambda actor: answer(actor.check.remote(prompts), timeout_s=self._timeout_s))

    async def score(self, images: ImagesHandle, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Scores of all images, after all tries; what is then missing is so by the failure policy.

        Raises:
            RewardError: the policy is `fail`.
            ContractError: the scorer broke its contract.
        """
        self._images += len(prompts)
        asked = time.monotonic()
        scores = await self._tried(images, prompts, metadata)
        failed, waits = time.monotonic(), _pauses()
        while self._config.on_failure == "pause" and not scores.valid.any():
            if failed < self._worked < asked:
                break  # it scores others' images: these are what it cannot judge
            await self._pause(scores.reasons[0], next(waits))
            asked = time.monotonic()
            scores = await self._tried(images, prompts, metadata)
        if scores.valid.any():
            self._worked = time.monotonic()
        self._resume()
        settled = settle(self.name, self._config, scores)
        self._missing += int((~settled.valid).sum())
        self._dropped += settled.voids_group
        return settled

    def health(self) -> RewardHealth:
        """For status and metrics."""
        pausing = time.monotonic() - self._paused_since if self._paused_since is not None else 0.0
        return RewardHealth(
            waiting=self._queue.waiting,
            images=self._images,
            calls=self._queue.calls,
            retried=self._retried,
            failed_calls=self._queue.failed_calls,
            missing=self._missing,
            dropped=self._dropped,
            paused_s=self._paused_s + pausing,
            paused_because=self._paused_because,
        )

    def status(self) -> PoolStatus:
        """Its actors for the board; a pause is its trouble."""
        held = self.pool.status()
        return held.model_copy(update={"trouble": f"paused: {self._paused_because}"}) if self._paused_because else held

    async def _ask(self, actor: ActorHandle, pieces: Sequence[Piece], images: Sequence[ImagesHandle]) -> Scores:
        call = actor.score.remote(pieces, *images)
        return await answer(call, timeout_s=self._timeout_s, actor=actor, heartbeat_s=self._heartbeat_s)

    async def _tried(self, images: ImagesHandle, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Ask up to `tries` times, from the second on only for what is missing and sharing no call."""
        rows = tuple(range(len(prompts)))
        scores = await self._queue.score(images, _piece(rows, prompts, metadata))
        for _ in range(1, self._config.tries):
            rows = tuple(np.flatnonzero(~scores.valid).tolist())
            if not rows:
                break
            self._retried += len(rows)
            again = await self._queue.score(images, _piece(rows, prompts, metadata), is_alone=True)
            scores = patched(scores, rows, again)
        return scores

    async def _pause(self, reason: str, seconds: float) -> None:
        if self._paused_since is None:
            log.warning("reward %s pauses: %s", self.name, reason)
            self._paused_since = time.monotonic()
        self._paused_because = reason
        await asyncio.sleep(seconds)
        async with self._renewing:
            if self.pool.has_failed:
                self.pool.stop()
                fresh = self._make()
                fresh.start_with(self.pool.desired)
                try:
                    await fresh.start()
                except FlowcreditError as error:
                    fresh.stop()
                    self._paused_because = str(error)
                else:
                    if fresh.desired != self.pool.desired:
                        fresh.scale(self.pool.desired)
                    self.pool = fresh

    def _resume(self) -> None:
        if self._paused_since is not None:
            self._paused_s += time.monotonic() - self._paused_since
            log.info("reward %s goes on after %.0f s", self.name, time.monotonic() - self._paused_since)
        self._paused_since, self._paused_because = None, ""


def _piece(rows: tuple[int, ...], prompts: Sequence[str], metadata: Sequence[Metadata]) -> Piece:
    return Piece(rows=rows, prompts=tuple(prompts[row] for row in rows), metadata=tuple(metadata[row] for row in rows))


def _pauses() -> Iterator[float]:
    seconds, longest = PAUSE_S
    while True:
        yield seconds
        seconds = min(2 * seconds, longest)

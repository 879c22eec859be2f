"""The reward queue without Ray: how requests become calls, and what a failed call leaves."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from actors.pool.calls import TURN, ActorFailedError
from actors.rewards.queue import RewardQueue
from protocol.errors import ContractError, PoolError
from protocol.messages import Prompt, Scores
from rewards.scorer import Piece
from rewards.scores import scored
from tests.support.virtual_time import run_at_once


class Desk:
    """Stands for a pool of `size` actors; `asked` holds the images of every call. Actors of `losing` calls die."""

    def __init__(self, size: int = 1, losing: Sequence[int] = (), error: Exception | None = None) -> None:
        self.asked: list[list[int]] = []
        self.most_at_once = self._now = 0
        self._free = asyncio.Semaphore(size)
        self._losing, self._error = losing, error
        self.is_gone = False

    async def call(self, work: Callable[[Any], Awaitable[None]]) -> None:
        for _ in range(3):
            async with self._free:
                if self.is_gone:
                    raise PoolError("used up its restarts")
                try:
                    return await work("actor")
                except ActorFailedError:
                    continue
        raise PoolError("gave up a call that cost 3 actors")

    async def ask(self, actor: Any, pieces: Sequence[Piece], images: Sequence[np.ndarray]) -> Scores:
        images = [int(array[row]) for piece, array in zip(pieces, images, strict=True) for row in piece.rows]
        self.asked.append(images)
        number = len(self.asked) - 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0.01)
        self._now -= 1
        if number in self._losing:
            raise ActorFailedError("gone")
        if self._error:
            raise self._error
        return scored(images)

    def queue(self, **settings: Any) -> RewardQueue:
        return RewardQueue(**({"batch": 4, "delay_s": 0.0} | settings), call=self.call, score_pieces=self.ask)


def request(*numbers: int) -> tuple[np.ndarray, Piece]:
    """Images that are their own score."""
    return np.array(numbers), Piece.of([Prompt(index=0, text="")] * len(numbers))


async def all_of(queue: RewardQueue, *requests: tuple[np.ndarray, Piece], **options: Any) -> list[list[float]]:
    answers = await asyncio.gather(*(queue.score(images, piece, **options) for images, piece in requests))
    return [answer.values.tolist() for answer in answers]


async def test_what_waits_is_joined_and_what_is_large_is_cut_and_every_answer_finds_its_asker() -> None:
    desk = Desk()
    answers = await all_of(desk.queue(), request(1), request(2, 3), request(4, 5, 6, 7, 8, 9), request(10))
    assert answers == [[1], [2, 3], [4, 5, 6, 7, 8, 9], [10]]
    assert desk.asked == [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


async def test_two_actors_work_at_once_and_none_waits_while_there_is_work() -> None:
    desk = Desk(size=2)
    await all_of(desk.queue(), *(request(*range(4)) for _ in range(6)))
    assert desk.most_at_once == 2 and len(desk.asked) == 6


def test_an_idle_actor_waits_for_a_full_batch_no_longer_than_the_delay() -> None:
    async def scenario() -> None:
        desk = Desk(size=2)
        queue = desk.queue(delay_s=5.0)

        async def later(seconds: float, *numbers: int) -> None:
            await asyncio.sleep(seconds)
            await queue.score(*request(*numbers))

        await asyncio.gather(later(0.0, 1), later(4.9, 2), later(5.1, 3))
        assert desk.asked == [[1, 2], [3]]
        patient, now = desk.queue(delay_s=600.0), asyncio.get_running_loop().time
        before = now()
        await patient.score(*request(1, 2, 3, 4))
        assert now() - before < 1, "a full batch does not wait"

    run_at_once(scenario())


async def test_a_failed_call_is_missing_for_its_askers_and_the_others_are_answered() -> None:
    desk = Desk(losing=[0])
    queue = desk.queue()
    first, second = await asyncio.gather(queue.score(*request(1, 2, 3, 4)), queue.score(*request(5)))
    assert not first.valid.any() and first.reasons[0] == "reward actor failed: gone"
    assert second.values.tolist() == [5]
    assert (len(desk.asked), queue.failed_calls, queue.waiting) == (2, 1, 0)


@pytest.mark.parametrize("is_told_first", [True, False])
async def test_pieces_of_a_call_that_a_dead_actor_held_ahead_wait_again_and_lose_no_try(is_told_first: bool) -> None:
    class Ahead(Desk):
        """Its first call is held ahead by an actor that dies: the pool cancels the call, or the call sees it first."""

        was_held = False

        async def call(self, work: Callable[[Any], Awaitable[None]]) -> None:
            if not self.was_held:
                self.was_held = True
                TURN.set(asyncio.get_running_loop().create_future())
                held = asyncio.ensure_future(work("dead"))
                await asyncio.sleep(0.005)
                held.cancel() if is_told_first else None
                with pytest.raises(asyncio.CancelledError if is_told_first else ActorFailedError):
                    await held
                TURN.set(None)
            await super().call(work)

        async def ask(self, actor: Any, pieces: Sequence[Piece], images: Sequence[np.ndarray]) -> Scores:
            scores = await super().ask(actor, pieces, images)
            if actor == "dead":
                raise ActorFailedError("gone")
            return scores

    desk = Ahead()
    queue = desk.queue()
    first, second = await asyncio.gather(queue.score(*request(1, 2)), queue.score(*request(3, 4, 5)))
    assert [first.values.tolist(), second.values.tolist()] == [[1, 2], [3, 4, 5]]
    assert len(desk.asked) == 3 and queue.failed_calls == 0


async def test_what_was_lost_once_shares_no_further_call() -> None:
    desk = Desk()
    queue = desk.queue()
    await asyncio.gather(
        queue.score(*request(1)),
        queue.score(*request(2), is_alone=True),
        queue.score(*request(3)),
        queue.score(*request(4)),
    )
    assert desk.asked == [[1], [2], [3, 4]]


async def test_a_pool_that_is_gone_leaves_everybody_missing_with_its_reason() -> None:
    desk = Desk()
    desk.is_gone = True
    queue = desk.queue()
    answers = await asyncio.gather(queue.score(*request(1, 2)), queue.score(*request(3)))
    assert all(not answer.valid.any() and answer.reasons[0] == "used up its restarts" for answer in answers)


async def test_losing_every_actor_of_a_call_ends_and_does_not_hang() -> None:
    desk = Desk(losing=range(1000))
    answers = await asyncio.gather(*(desk.queue().score(*request(*range(9))) for _ in range(3)))
    assert all(not answer.valid.any() for answer in answers)


async def test_a_broken_contract_reaches_those_who_asked() -> None:
    queue = Desk(error=ContractError("scorer x: rule")).queue()
    with pytest.raises(ContractError, match="scorer x: rule"):
        await queue.score(*request(1))


async def test_pieces_whose_asker_has_gone_are_not_scored() -> None:
    desk = Desk()
    queue = desk.queue()
    first = asyncio.ensure_future(queue.score(*request(1, 2, 3, 4)))
    second = asyncio.ensure_future(queue.score(*request(5)))
    await asyncio.sleep(0.001)
    second.cancel()
    third = await queue.score(*request(6))
    assert third.values.tolist() == [6] and (await first).values.tolist() == [1, 2, 3, 4]
    assert [5] not in desk.asked and all(5 not in call for call in desk.asked)

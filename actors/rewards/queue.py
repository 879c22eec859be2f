"""The queue of one scorer: requests are split and joined into calls, and an idle actor takes the next call.

**Batching never changes a score.** An idle reward actor takes the oldest pending images, across groups, up to one
batch.

    queue = RewardQueue(batch=64, delay_s=0.0, call=pool.call, score_pieces=score_pieces)
    scores = await queue.score(images, piece)

A call is formed when an actor is idle, or in advance for an actor that will be idle next. So no actor waits while there
is work, and under load calls fill up by themselves. If the actor dies, the scores of the call in progress are missing;
the reward pool decides whether to try again. The pieces of a call that the actor held in advance wait again.

| waits              | for                             | at most until                                        |
|--------------------|---------------------------------|------------------------------------------------------|
| `score`            | its pieces' answers             | the call's deadline, or the pool's end               |
| a call             | an idle actor                   | the calls before it end, each with a deadline        |
| a call on an actor | more images                     | `delay_s` is over                                    |
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from actors.pool.calls import TURN, ActorFailedError, ActorHandle, Work
from protocol.errors import PoolError, one_line
from protocol.messages import Scores
from protocol.ports import ImagesHandle
from rewards.scorer import Piece
from rewards.scores import joined, split

ScorePieces = Callable[[ActorHandle, Sequence[Piece], Sequence[ImagesHandle]], Awaitable[Scores]]
"""One call to one actor; raises `ActorFailedError` if the actor died or overran its deadline."""


@dataclass(eq=False)
class WaitingPiece:
    """A piece that waits: its images and the future of its scores."""

    piece: Piece
    images: ImagesHandle
    is_alone: bool
    answer: "asyncio.Future[Scores]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RewardQueue:
    """The pending pieces of one reward pool. Only the process that runs the loop uses it."""

    def __init__(
        self,
        *,
        batch: int,
        delay_s: float,
        call: Callable[[Work[None]], Awaitable[None]],
        score_pieces: ScorePieces,
    ) -> None:
        """
        Args:
            batch: most images of one call.
            delay_s: seconds that a call which is not full waits for more.
            call: runs a coroutine function on an idle actor, on another one if it raises `ActorFailedError`; raises
                PoolError when it gives up.
        """
        self.failed_calls = 0
        """Calls whose actor died or that overran their deadline."""
        self.waiting = 0
        """Images that wait for scores or are being scored."""
        self._batch, self._delay_s = batch, delay_s
        self._call, self._score_pieces = call, score_pieces
        self._pending: deque[WaitingPiece] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def score(self, images: ImagesHandle, piece: Piece, *, is_alone: bool = False) -> Scores:
        """Score a piece.

        Args:
            is_alone: share no call with other requests; an image that failed once may be what kills the actors.

        Returns:
            Scores in the piece's order; they are missing, with a reason, where a call failed.
        """
        parts = [WaitingPiece(part, images, is_alone=is_alone) for part in _cut(piece, self._batch)]
        self.waiting += len(piece.rows)
        self._pending.extend(parts)
        self._changed.set()
        for _ in parts:
            task = asyncio.ensure_future(self._serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return joined(await asyncio.gather(*(part.answer for part in parts)))
        finally:
            self.waiting -= len(piece.rows)
            for part in parts:
                part.answer.cancel()
            self._changed.set()

    async def _serve(self) -> None:
        """Make calls until one succeeds or nothing is pending."""
        was_called = False

        async def work(actor: ActorHandle) -> None:
            nonlocal was_called
            was_called = True
            await self._one_call(actor)

        while any(not part.answer.done() for part in self._pending):
            was_called = False
            try:
                await self._call(work)
            except PoolError as error:
                if not was_called:
                    self._give_up(str(error))
                continue
            except Exception as error:  # noqa: BLE001  `score` waits for it and raises it
                while self._pending:
                    _fail(self._pending.popleft(), error)
            return

    async def _one_call(self, actor: ActorHandle) -> None:
        await self._fill_up()
        parts = self._take()
        if not parts:
            return
        try:
            scores = await self._score_pieces(actor, [part.piece for part in parts], [part.images for part in parts])
        except asyncio.CancelledError:
            self._put_back(parts)
            raise
        except ActorFailedError as error:
            if (turn := TURN.get()) and not turn.done():
                self._put_back(parts)
                raise
            self.failed_calls += 1
            reason = one_line(error)
            for part in parts:
                _answer(part, Scores.missing(len(part.piece.rows), f"reward actor failed: {reason}"))
            raise
        except Exception as error:  # noqa: BLE001  `score` waits for it and raises it
            for part in parts:
                _fail(part, error)
            return
        for part, part_scores in zip(parts, split(scores, [len(part.piece.rows) for part in parts]), strict=True):
            _answer(part, part_scores)

    async def _fill_up(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._delay_s
        while self._delay_s and sum(len(part.piece.rows) for part in self._pending) < self._batch:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                return

    def _take(self) -> list[WaitingPiece]:
        """Take the oldest pieces up to a full batch; drop pieces that nobody waits for any more."""
        taken: list[WaitingPiece] = []
        size = 0
        while self._pending:
            part = self._pending[0]
            if part.answer.done():
                self._pending.popleft()
                continue
            if taken and (part.is_alone or taken[0].is_alone or size + len(part.piece.rows) > self._batch):
                break
            taken.append(self._pending.popleft())
            size += len(part.piece.rows)
        return taken

    def _put_back(self, parts: Sequence[WaitingPiece]) -> None:
        """Put back the pieces of a call whose actor failed before the call's turn."""
        self._pending.extendleft(reversed(parts))

    def _give_up(self, reason: str) -> None:
        while self._pending:
            part = self._pending.popleft()
            _answer(part, Scores.missing(len(part.piece.rows), reason))


def _answer(part: WaitingPiece, scores: Scores) -> None:
    if not part.answer.done():
        part.answer.set_result(scores)


def _fail(part: WaitingPiece, error: Exception) -> None:
    if not part.answer.done():
        part.answer.set_exception(error)


def _cut(piece: Piece, size: int) -> list[Piece]:
    indices = range(len(piece.rows))
    return [piece.part(indices[start : start + size]) for start in indices[::size]]

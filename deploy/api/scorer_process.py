"""A scorer in a process of its own: a call that hangs, or that ends the process, costs that call, and the scorer starts
again.

    process = ScorerProcess("ocr", {"min_side": 192}, deadline_s=300)
    scores = await process.run(score_items, call)            # `score_items(scorer, call)` there
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from deploy.api.problems import Problem
from protocol.errors import InputError, ScorerError, named_line
from rewards.scorer import CheckedScorer, build_scorer

START_S = 1800.0
"""Seconds in which a scorer must have loaded its model when it starts again."""
P = ParamSpec("P")
Result = TypeVar("Result")


class Facts(NamedTuple):
    """What a scorer says of itself, see `rewards.scorer.Scorer`."""

    low: float
    high: float
    sees: Literal["image", "group"]
    takes_conditions: bool = False

    @classmethod
    def of(cls, scorer: CheckedScorer) -> "Facts":
        return cls(scorer.low, scorer.high, scorer.sees, scorer.takes_conditions)


class ScorerSlot(Protocol):
    """Where a scorer lives; it takes one call at a time."""

    facts: Facts
    restarts: int
    is_degraded: bool
    """Whether its newest call got no answer."""

    async def run(
        self, function: Callable[Concatenate[CheckedScorer, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Call a function of a module with the scorer, where the scorer lives.

        Raises:
            Problem: 500, the function raised an exception; 504, no answer within the deadline, or the scorer ended.
        """
        ...


class ScorerProcess(ScorerSlot):
    """The child process of one scorer; it ends with this process."""

    def __init__(self, spec: str, args: Mapping[str, Any], *, deadline_s: float) -> None:
        """Start the process and build the scorer there.

        Args:
            spec: as in `build_scorer`.
            args: keyword arguments of the scorer's constructor.
            deadline_s: seconds for one call.

        Raises:
            InputError: see `build_scorer`.
        """
        self._words, self._deadline_s = (spec, dict(args)), deadline_s
        self.restarts, self.is_degraded = 0, False
        self._start()
        try:
            self.facts: Facts = self._built.result()
        except BaseException as error:  # Ctrl-C too: a process that loads must not keep this one
            self.close()
            if isinstance(error, EOFError | OSError):
                raise ScorerError(f"the process of scorer {spec} ended while it loaded the model") from None
            raise

    async def run(
        self, function: Callable[Concatenate[CheckedScorer, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Call a function there, see `ScorerSlot`."""
        try:
            await self._within(START_S, self._built)
            exchange = self._thread.submit(self._exchange, function, args, kwargs)
            answer, failure = await self._within(self._deadline_s, exchange)
        except (EOFError, OSError, InputError) as error:
            why = str(error) if isinstance(error, TimeoutError | InputError) else "its process ended"
            self.is_degraded = True
            self.restarts += 1
            self.close()
            self._start()
            raise Problem(504, f"the scorer gave no answer: {why}; its process starts again") from None
        self.is_degraded = False
        if failure:
            raise Problem(500, f"the scorer failed: {failure}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._thread.shutdown(wait=False)

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, *self._words))
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")
        self._built = self._thread.submit(self._first)

    async def _within(self, seconds: float, asked: "Future[Any]") -> Any:
        """Return an answer of the process (TimeoutError: it takes longer)."""
        answer = asyncio.wrap_future(asked)
        await asyncio.wait({answer}, timeout=seconds)
        if not answer.done():
            answer.cancel()
            raise TimeoutError(f"none within {seconds:g} s")
        return answer.result()

    def _first(self) -> Facts:
        """Receive the facts of the scorer once it is built (InputError: it cannot be built)."""
        facts, failure = self._pipe.recv()
        if failure:
            raise failure
        return facts

    def _exchange(self, *call: Any) -> tuple[Any, InputError | None]:
        self._pipe.send(call)
        return self._pipe.recv()


def _work(pipe: "Connection[Any, Any]", spec: str, args: Mapping[str, Any]) -> None:
    """Build the scorer and answer calls until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to both processes
    Thread(target=_end_with_parent, daemon=True).start()
    scorer = None
    while True:
        try:
            if scorer is None:
                scorer = build_scorer(spec, **args)
                answer: Any = Facts.of(scorer), None
            else:
                function, positional, named = pipe.recv()
                answer = function(scorer, *positional, **named), None
        except EOFError:
            return
        except InputError as error:
            answer = None, error
        except BaseException as error:  # noqa: BLE001  KeyboardInterrupt and SystemExit too: this process goes on
            answer = None, ScorerError(named_line(error))
        pipe.send(answer)
        if scorer is None:
            return


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""Follows a Ray job until it ends, over connections that may break."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError, one_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

FOLLOW_S = 60.0
"""Seconds for which the cluster may be silent while its job is followed."""
AGAIN_S = 2.0
"""Seconds between two questions for the job's state."""


def follow(client: "JobSubmissionClient", job: str, *, say: Callable[[str], None]) -> int:
    """Show a job's log until it ends.

    Args:
        client: of `connect`.
        job: its submission id.
        say: is given pieces of the log.

    Returns:
        The exit code of its process; 0 if it was stopped, 1 if it could not be started.

    Raises:
        ConfigError: the cluster did not answer for `FOLLOW_S`.
    """
    from ray.job_submission import JobStatus

    tail = Tail(client, job, say)
    details = asyncio.run(tail.until_ended())
    if details.status == JobStatus.STOPPED:
        say(f"job {job} was stopped; the same command continues its run\n")
        return 0
    if details.driver_exit_code is None and details.status == JobStatus.FAILED:
        say(f"job {job} failed: {details.message}\n")
    return (details.driver_exit_code or 0) if details.status == JobStatus.SUCCEEDED else details.driver_exit_code or 1


class Tail:
    """Follows one job's log, and takes it up again where it was when a connection breaks."""

    def __init__(self, client: "JobSubmissionClient", job: str, say: Callable[[str], None]) -> None:
        self._client = client
        self._job = job
        self._say = say
        self._shown = 0

    async def until_ended(self) -> Any:
        """Return the job's details when it has ended (ConfigError: no answer for `FOLLOW_S`)."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        shown = asyncio.ensure_future(self._show())
        try:
            while True:
                await asyncio.wait({shown}, timeout=AGAIN_S)
                try:
                    details = await asyncio.wait_for(apart(lambda: self._client.get_job_info(self._job)), FOLLOW_S)
                    heard = clock()
                    if shown.done() and shown.exception() is None and details.status.is_terminal():
                        return details
                except (TimeoutError, OSError, RuntimeError) as error:
                    if clock() - heard >= FOLLOW_S:
                        raise ConfigError(
                            f"the cluster has not answered for {FOLLOW_S:g} s: {one_line(error)}; if it lives, job"
                            f" {self._job} goes on: `ray job logs --follow {self._job}`"
                        ) from None
                if shown.done():
                    await asyncio.sleep(AGAIN_S)
                    shown = asyncio.ensure_future(self._show())
        finally:
            shown.cancel()

    async def _show(self) -> None:
        seen = 0
        async for piece in self._client.tail_job_logs(self._job):
            seen += len(piece)
            if seen > self._shown:
                self._say(piece[len(piece) - (seen - self._shown) :])
                self._shown = seen


def apart(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Call a function on a thread that keeps no process alive: the job client's requests have no deadline."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_exception(error) if error else answer.set_result(value)

    def call() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as raised:  # noqa: BLE001  handed to the caller
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=call, daemon=True).start()
    return answer

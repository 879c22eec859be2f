"""Follows a Ray job until it ends, over connections that may break."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError, one_line, plain

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

FOLLOW_S = 60.0
"""Seconds for which the cluster may stay silent before `follow` gives up."""
AGAIN_S = 2.0
"""Seconds between two requests for the job's state."""


def follow(client: "JobSubmissionClient", job: str, *, say: Callable[[str], None]) -> int:
    """Show a job's log until it ends.

    Returns:
        The exit code of its process; 0 if it was stopped, 1 if it could not be started.

    Raises:
        ConfigError: the cluster did not answer for `FOLLOW_S`.
    """
    from ray.job_submission import JobStatus

    details = asyncio.run(_until_ended(client, job, say))
    if details.status == JobStatus.STOPPED:
        say(f"job {job} was stopped; the same command continues its run\n")
        return 0
    if details.driver_exit_code is None and details.status == JobStatus.FAILED:
        say(f"job {job} failed: {details.message}\n")
    return details.driver_exit_code or (0 if details.status == JobStatus.SUCCEEDED else 1)


async def _until_ended(client: "JobSubmissionClient", job: str, say: Callable[[str], None]) -> Any:
    """Return the job's details when it has ended (ConfigError: no answer for `FOLLOW_S`)."""
    clock = asyncio.get_running_loop().time
    heard, said = clock(), 0

    async def show() -> None:
        """Follow the log; after a broken connection, continue from the last character shown."""
        nonlocal said
        seen = 0
        async for piece in client.tail_job_logs(job):
            seen += len(piece)
            if seen > said:
                say(plain(piece[len(piece) - (seen - said) :]))
                said = seen

    shown = asyncio.ensure_future(show())
    try:
        while True:
            await asyncio.wait({shown}, timeout=AGAIN_S)
            try:
                details = await asyncio.wait_for(_apart(lambda: client.get_job_info(job)), FOLLOW_S)
                heard = clock()
                if shown.done() and shown.exception() is None and details.status.is_terminal():
                    return details
            except (TimeoutError, OSError, RuntimeError) as error:
                if clock() - heard >= FOLLOW_S:
                    raise ConfigError(
                        f"the cluster has not answered for {FOLLOW_S:g} s: {one_line(error)}; if it still runs, so"
                        f" does job {job}: `ray job logs --follow {job}`"
                    ) from None
            if shown.done():
                await asyncio.sleep(AGAIN_S)
                shown = asyncio.ensure_future(show())
    finally:
        shown.cancel()


def _apart(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Call a function on a daemon thread: the job client's requests have no deadline and must not delay an exit."""
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()  # so that the thread may set the answer after its caller gave up

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:  # noqa: BLE001  passed to the caller
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return asyncio.wrap_future(answer)

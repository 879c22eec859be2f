"""A command's standard output when it can no longer be written: its reader has ended, or its disk is full."""

import errno
import os
import sys
from contextlib import suppress
from io import UnsupportedOperation

from protocol.errors import reason_of

LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of an output that cannot be written."""


def drop_output() -> None:
    """Let standard output lead nowhere from now on, so that Python does not fail when it flushes it at its end."""
    with suppress(OSError, ValueError, AttributeError):  # there may be no standard output, or none with a number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def output_problem(more: bytes = b"") -> str | None:
    """Return why standard output cannot be written; None if it can, or if nobody reads it any more.

    Args:
        more: is written too. After a failed write, what did not fit is gone, and a flush alone finds nothing wrong.

    Returns:
        The system's reason.
    """
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
        if more:
            os.write(sys.stdout.fileno(), more)
    except UnsupportedOperation:
        return None  # a program has replaced it by one without a number
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        return reason_of(error)
    return None

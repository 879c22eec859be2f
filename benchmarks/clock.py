"""CPU seconds in place of wall seconds, for measurements on a machine where other programs run."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

from flow import meter
from learner.loop import loop, stream
from rewards import scorer


@contextmanager
def cpu_clock(*more: ModuleType) -> Iterator[None]:
    """Let the modules that time an iteration take CPU seconds of this process, which other programs hardly disturb.

    Args:
        more: further modules that call `time.perf_counter` or `time.monotonic`.
    """
    clock = SimpleNamespace(**vars(time) | {"perf_counter": time.process_time, "monotonic": time.process_time})
    with ExitStack() as stack:
        for module in (meter, loop, stream, scorer, *more):
            stack.enter_context(patch.object(module, "time", clock))
        yield

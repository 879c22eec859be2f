"""Ray's workers as forks of one warm process for all tests, in clusters of every kind."""

import atexit
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from deploy.run.warm.workers import start_process
from tests.support.waiting import wait_until
from tests.support.worlds.devices import has_gpu

HERE = Path(__file__).parent
ADDRESS = "FLOWCREDIT_TEST_WARM"
"""Variable with the socket of the warm process."""
LIBRARIES = ("torch", "diffusers", "transformers.modeling_utils", "peft", "fastapi", "uvicorn")
"""What it imports; nothing of ours, since some tests run other copies of it."""


@cache
def variables() -> dict[str, str]:
    """Start the warm process, which ends with this one; the variables under which a Ray cluster uses it.

    There are none on systems other than Linux, which need not bear a fork after these imports, and none beside a GPU:
    the imports may ask for it, and a fork of a process that did cannot use it.
    """
    if sys.platform != "linux" or has_gpu():
        return {}
    address = Path(tempfile.mkdtemp(prefix="warm")) / "door"
    process = start_process(address, LIBRARIES, {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"})
    assert process.stdin
    atexit.register(process.stdin.close)
    wait_until(address.exists)
    hook = f"{with_warm_python.__module__}.{with_warm_python.__name__}"
    return {ADDRESS: str(address), "RAY_RUNTIME_ENV_HOOK": hook, "RAY_prestart_worker_first_driver": "0"}


def with_warm_python(environment: dict[str, Any] | None) -> dict[str, Any]:
    """The environment of a Ray job with workers that the warm process starts; Ray calls it for every job."""
    start = f"{sys.executable} -S -E {HERE / 'start.py'} {os.environ[ADDRESS]}"
    return (environment or {}) | {"py_executable": start}


def workers_of(raylet: int) -> list[int]:
    """Process numbers of the workers that this raylet had forked, dead or alive."""
    address = variables().get(ADDRESS)
    return [int(path.suffix[1:]) for path in Path(address).parent.glob(f"{raylet}.*")] if address else []

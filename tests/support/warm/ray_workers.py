"""Ray's workers as forks of a warm process."""

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until
from tests.support.worlds.devices import has_gpu

HERE = Path(__file__).parent
ADDRESS = "FLOWCREDIT_TEST_WARM"
"""Variable with the socket of the warm process."""


@cache
def variables() -> dict[str, str]:
    """Start the warm process, which ends with this one; the variables under which a Ray cluster uses it.

    There are none on systems other than Linux, which need not bear a fork after these imports, and none beside a GPU:
    the imports may ask for it, and a fork of a process that did cannot use it.
    """
    if sys.platform != "linux" or has_gpu():
        return {}
    folder = tempfile.TemporaryDirectory(prefix="warm")
    atexit.register(folder.cleanup)
    address = os.path.join(folder.name, "door")
    process = subprocess.Popen(
        [sys.executable, HERE / "process.py", address],
        stdin=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OPENBLAS_NUM_THREADS": "1"},
    )
    atexit.register(process.stdin.close)
    wait_until(lambda: os.path.exists(address) or process.poll() is not None)
    assert process.poll() is None, "the warm process ended"
    hook = f"{with_warm_python.__module__}.{with_warm_python.__name__}"
    return {ADDRESS: address, "RAY_RUNTIME_ENV_HOOK": hook, "RAY_prestart_worker_first_driver": "0"}


def with_warm_python(environment: dict[str, Any] | None) -> dict[str, Any]:
    """The environment of a Ray job with workers that the warm process starts; Ray calls it for every job."""
    start = f"{sys.executable} -S -E {HERE / 'start.py'} {os.environ[ADDRESS]}"
    return (environment or {}) | {"py_executable": start}


def workers_of(raylet: int) -> list[int]:
    """Process numbers of the workers that this raylet had forked, dead or alive."""
    address = variables().get(ADDRESS)
    return [int(path.suffix[1:]) for path in Path(address).parent.glob(f"{raylet}.*")] if address else []

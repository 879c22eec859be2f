"""Starts the warm process of a local Ray cluster."""

import os
import shlex
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from protocol.config.cluster import cluster_address
from protocol.config.run import RunConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
IMPORTED = ("flow.rollout", "learner.update.learner", "diffusers.models.transformers", "peft")
"""What rollout actors and learner workers import."""


@contextmanager
def warm_python(config: RunConfig, *, is_local: bool = False) -> Iterator[str | None]:
    """Start a process that imports what actors import, and end it with the block.

    The imports go on beside what the caller does. The actors, forks of this process, outlive it.

    Args:
        config: of the run.
        is_local: the run needs no Ray.

    Yields:
        What starts a worker instead of `python`; None where forks are not safe or of no use: on a given cluster, where
        an actor has a GPU (a library may have opened it before the fork), where a reward brings an environment of its
        own or Ray is told to ask a hook for one, and on systems other than Linux.
    """
    is_given = cluster_address(config.cluster) is not None or "RAY_RUNTIME_ENV_HOOK" in os.environ
    has_own = any(reward.runtime_env for reward in config.rewards.values())
    if is_local or is_given or has_own or config.reserved.get("GPU") or sys.platform != "linux":
        yield None
        return
    with ExitStack() as held:
        try:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="flowcredit-", ignore_cleanup_errors=True))
            process = start_process(Path(folder) / "warm", IMPORTED, _environment())
        except OSError:  # a full disk or no more processes: Ray will say so, if it is in the way
            yield None
            return
        held.callback(_end, process)
        yield shlex.join([sys.executable, "-S", "-E", str(HERE / "start.py"), str(Path(folder) / "warm")])


def _environment() -> dict[str, str]:
    """Return variables with which a Python process finds our packages before others of the same name."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    is_installed = str(ROOT) in site.getsitepackages()
    return environment if is_installed else environment | {"PYTHONPATH": str(ROOT)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def start_process(address: Path, modules: tuple[str, ...], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a warm process, which ends with this one and then removes the folder of its socket.

    Args:
        address: path of its socket.
        modules: what it imports.
        environment: its variables.

    Returns:
        The process. It says nothing: what fails in it fails again, and is heard, in the workers without it.
    """
    return subprocess.Popen(
        [sys.executable, HERE / "process.py", address, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment | {"OPENBLAS_NUM_THREADS": "1"},  # threads would not survive the fork
        start_new_session=True,  # Ctrl-C in a terminal is for the run alone
    )

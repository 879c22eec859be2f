"""Starts the warm process of a local Ray cluster."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flowcredit.packages import shadows
from protocol.config.cluster import cluster_address
from protocol.config.run import RunConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
IMPORTED = ("flow.rollout", "learner.update.learner", "diffusers.models.transformers", "peft")
"""What rollout actors and learner workers import."""
ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""glibc gives almost every thread a heap of its own, and keeps what is freed there. A process chooses when it starts,
and forks inherit its choice: with two heaps for all threads actors keep less (docs/performance.md)."""


@contextmanager
def warm_python(config: RunConfig, *, is_local: bool = False) -> Iterator[str | None]:
    """Start a process that imports what actors import, and end it with the block.

    It imports while the caller works. The actors are forks of it and may live longer.

    Yields:
        The command that starts a worker instead of `python`; None if workers cannot be forks (`has_forks`), or if the
        process cannot start.
    """
    if is_local or not has_forks(config):
        yield None
        return
    with ExitStack() as held:
        try:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="flowcredit-", ignore_cleanup_errors=True))
            process = held.enter_context(start_process(Path(folder) / "warm", IMPORTED, _environment()))
        except OSError:  # a full disk, or too many processes: if this stops Ray too, Ray reports it
            yield None
            return
        held.callback(process.kill)
        yield shlex.join([sys.executable, "-S", "-E", str(HERE / "start.py"), str(Path(folder) / "warm")])


def has_forks(config: RunConfig) -> bool:
    """Say whether the workers of a run on Ray can be forks that give the same bits as other workers.

    They can on Linux, on a cluster that the run starts itself, unless one of these holds:

    - an actor has a GPU, which a library may open before the fork;
    - a reward's `runtime_env`, RAY_RUNTIME_ENV_HOOK or `uv run` decides how workers start;
    - the working folder or Python's path has a package with the name of one of ours;
    - OpenBLAS would have several threads, since it reads their number only once: with two CPUs an actor, or with
      OMP_NUM_THREADS or OPENBLAS_NUM_THREADS.
    """
    reserved = (
        config.cluster.rollout.reserved,
        config.cluster.learner.reserved,
        *(reward.reserved(config.cluster.reward) for reward in config.rewards.values()),
    )
    return not (
        sys.platform != "linux"
        or cluster_address(config.cluster) is not None
        or config.reserved.get("GPU")
        or any(reward.runtime_env for reward in config.rewards.values())
        or any(name in os.environ for name in ("RAY_RUNTIME_ENV_HOOK", "UV_RUN_RECURSION_DEPTH"))
        or any(os.environ.get(name, "1") != "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"))
        or any(need["CPU"] >= 2 for need in reserved)  # Ray sets OMP_NUM_THREADS to it
        or shadows()
    )


def _environment() -> dict[str, str]:
    """Return the variables of this process, with our packages on Python's path."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}


def start_process(address: Path, modules: tuple[str, ...], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a warm process, which ends with this one and then removes the folder of its socket.

    Args:
        modules: what it imports.

    Returns:
        The process. Its output is discarded: after a failure workers start without it, and report what fails there too.
    """
    return subprocess.Popen(
        [sys.executable, HERE / "process.py", address, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ARENAS | environment | {"OPENBLAS_NUM_THREADS": "1"},  # it must have no threads when it forks
        start_new_session=True,  # so that Ctrl-C in a terminal reaches only the run
    )

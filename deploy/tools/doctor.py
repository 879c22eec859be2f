"""`flowcredit doctor`: is this machine ready for a run? A list of checks; each line has a verdict and a remedy.

A check is a function from a `Question` to findings; `CHECKS` lists all of them. No check starts anything, changes
anything or takes longer than a few seconds, except `costs` if it measures on request.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deploy.folder.fingerprint import library_versions
from protocol.addresses import BOARD_VARIABLE, EMBEDDED, OFF
from protocol.config.cluster import ClusterConfig, cluster_address
from protocol.config.run import RunConfig
from protocol.config.status import StatusConfig, board_address
from protocol.errors import FlowcreditError, InputError, one_line
from protocol.files import found_of
from protocol.prompts import read_prompts
from protocol.resources import resolve

if TYPE_CHECKING:
    from deploy.board.board import Board

Verdict = Literal["ok", "note", "bad"]
"""`bad`: a run would fail; `note`: worth knowing."""
CONNECT_S = 5.0
FREE_GIB, SHARED_GIB, OPEN_FILES = 5.0, 2.0, 4096
"""Free disk, shared memory for Ray's object store, and open files below which a note is shown."""


@dataclass(frozen=True)
class Question:
    """The subject of the checks."""

    config: RunConfig | None
    """The preset to run; None checks only the machine."""
    run: Path
    """The folder for run folders."""
    measures: bool = False
    """Measure how fast this machine computes the preset's model, which may take a minute."""


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    verdict: Verdict
    subject: str
    found: str
    remedy: str = ""


Check = Callable[[Question], Iterator[Finding]]


def examine(question: Question) -> Iterator[Finding]:
    """Run all checks; an error in a check is also a finding."""
    for check in CHECKS:
        try:
            yield from check(question)
        except Exception as error:  # noqa: BLE001  the other checks must still run
            reason = one_line(error)
            yield Finding("bad", check.__name__, f"the check itself failed: {reason}", "report this line")


def python_and_libraries(_: Question) -> Iterator[Finding]:
    """Report Python's version; check every required library against the version that the project declares."""
    from packaging.requirements import Requirement

    yield Finding("ok", "python", ".".join(map(str, sys.version_info[:3])))
    try:
        declared = [Requirement(text) for text in requires("flowcredit") or []]
    except PackageNotFoundError:
        for package, held in library_versions().items():
            yield Finding("ok", package, held)
        yield Finding("ok", "flowcredit", "runs from a folder, not installed: its declared versions are not compared")
        return
    for wanted in declared:
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            held = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("bad", wanted.name, "not installed", f"pip install '{wanted}'")
            continue
        is_fit = wanted.specifier.contains(held, prereleases=True)
        yield Finding("ok" if is_fit else "bad", wanted.name, held, "" if is_fit else f"pip install '{wanted}'")


def cores_and_gpus(question: Question) -> Iterator[Finding]:
    """Check the number of CPU cores, and the GPUs that the preset reserves on a local cluster."""
    import torch

    from deploy.run.inputs import gpu_problems

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux only
    yield Finding("ok" if cores > 1 else "note", "cpu", f"{cores} cores", "" if cores > 1 else "a run should have two")
    gpus = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none"
    short = next(gpu_problems(question.config), None) if question.config else None
    remedy = "install a driver and a CUDA build of torch, or set cluster.address or cluster.*.gpus" if short else ""
    found = f"{names}; {str(short).partition(': ')[0]}" if short else names
    yield Finding("bad" if short else "ok", "gpu", found, remedy)


def disk_and_memory(question: Question) -> Iterator[Finding]:
    """Check the free space for run folders, the shared memory for Ray's object store, and the limit of open files."""
    parent = found_of(question.run)
    if not parent.is_dir():
        yield Finding("bad", "run folder", f"{parent} is no folder", "set --run to a folder or a new name")
        parent = parent.parent
    free = shutil.disk_usage(parent).free / 2**30
    remedy = "" if free > FREE_GIB else f"free some space or set --run: below {FREE_GIB:g} GiB checkpoints may not fit"
    yield Finding("ok" if not remedy else "note", "disk", f"{free:.1f} GiB free at {parent}", remedy)
    can_write = os.access(parent, os.W_OK)
    if not can_write:
        yield Finding("bad", "run folder", f"{parent} cannot be written", "set --run to a folder that you may write")
    shared = Path("/dev/shm")
    if shared.exists():
        size = shutil.disk_usage(shared).free / 2**30
        remedy = "" if size > SHARED_GIB else "give the container more: docker run --shm-size=4g"
        yield Finding("ok" if not remedy else "note", "shared memory", f"{size:.1f} GiB free at {shared}", remedy)
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "" if files >= OPEN_FILES else f"ulimit -n {OPEN_FILES}: Ray keeps many files open"
    yield Finding("ok" if not remedy else "note", "open files", str(files), remedy)


def ray_cluster_answers(question: Question) -> Iterator[Finding]:
    """Check the address that a run would use, the labels that need one, and the token if Ray needs one."""
    from deploy.run.inputs import label_problems
    from deploy.run.ray_errors import require_head, require_own_machine

    address = cluster_address(question.config.cluster if question.config else ClusterConfig())
    if not address:
        try:
            require_own_machine()
            yield Finding("ok", "ray", "no address given: a run starts its own cluster on loopback")
        except InputError as error:
            yield Finding("bad", "ray", str(error), "see this line")
        for problem in label_problems(question.config) if question.config else ():
            what, _, remedy = str(problem).rpartition(": ")
            yield Finding("bad", "labels", what, remedy)
        return
    try:
        require_head(address, timeout_s=CONNECT_S)
        yield Finding("ok", "ray", f"{address} accepts connections")
    except (OSError, ValueError, OverflowError) as error:
        yield Finding("bad", "ray", f"{address} does not answer: {error}", "check cluster.address or RAY_ADDRESS")
    token = resolve(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or token.exists()
    if os.environ.get("RAY_AUTH_MODE") == "token" and not has_token:
        yield Finding("bad", "ray token", f"none at {token}", "ray get-auth-token --generate, the same on all nodes")
    elif has_token:
        yield Finding("ok", "ray token", "given" if os.environ.get("RAY_AUTH_TOKEN") else str(token))


def board_answers(question: Question) -> Iterator[Finding]:
    """Check the status board: the server program of the embedded one, or the connection to a given one."""
    from deploy.board.board import Board
    from deploy.board.embedded import server_program

    url = board_address(question.config.status if question.config else StatusConfig())
    if url == OFF:
        yield Finding("ok", "board", "off: a run publishes no status")
        return
    try:
        if url == EMBEDDED:
            yield Finding("ok", "board", f"embedded, {server_program()}")
            return
        asyncio.run(_ping(Board(url, timeout_s=CONNECT_S)))
        yield Finding("ok", "board", "answers")
    except FlowcreditError as error:
        remedy = f"check status.board or {BOARD_VARIABLE}; training works without it"
        yield Finding("note", "board", str(error), remedy)


def preset_can_run(question: Question) -> Iterator[Finding]:
    """Check model folder, prompt files and scorers of the preset."""
    if question.config is None:
        yield Finding("ok", "preset", "none given: `flowcredit doctor PRESET` also checks its model and rewards")
        return
    from deploy.run.inputs import read_inputs, reward_problems
    from flow.models.folder import completed

    try:
        config = completed(question.config)
        prompts, heldout = read_inputs(config)
    except InputError as error:
        yield Finding("bad", "preset", str(error), "see this line")
        return
    yield Finding("ok", "model", config.model.path)
    yield Finding("ok", "prompts", f"{len(prompts)} to train on, {len(heldout)} held out")
    problems = list(reward_problems(config, [*prompts, *heldout], is_local=False))
    for problem in problems:
        yield Finding("bad", "rewards", str(problem), "see this line")
    if not problems:
        yield Finding("ok", "rewards", ", ".join(config.rewards))


def inputs_may_mislead(question: Question) -> Iterator[Finding]:
    """Report settings that may be unintended, such as held-out prompts that are trained on, or prompts that are cut."""
    if question.config is None:
        return
    from deploy.run.inputs import concerns

    data = question.config.data
    try:
        train, heldout = (read_prompts(data, path) for path in (data.train, data.heldout))
        found = list(concerns(question.config, train, heldout))
    except InputError:
        return  # `preset_can_run` says it
    for _, message in found:
        what, _, remedy = message.rpartition(": ")
        yield Finding("note", "prompts", what, remedy)


def costs(question: Question) -> Iterator[Finding]:
    """Report velocity evaluations and memory of the preset (`deploy.tools.estimate`); on request, its measured speed.

    `deploy.tools.measure` measures forwards, gradients and decoded images per second, `deploy.tools.scoring` scorers.
    """
    if question.config is None:
        return
    from deploy.tools.estimate import estimate
    from deploy.tools.measure import measure
    from deploy.tools.memory import fit_problems, roles_of
    from deploy.tools.scoring import measured_lines
    from flow.models.folder import completed_for_estimate

    try:
        config = completed_for_estimate(question.config)[0]
        found = estimate(config)
        for line in (*found.lines(), *(each.line() for each in roles_of(config, found))):
            yield Finding("ok", "cost", line)
        for problem in fit_problems(config, found):
            what, _, remedy = str(problem).rpartition(": ")
            yield Finding("bad", "gpu memory", what, remedy)
        if question.measures:
            for line in chain(measure(config, found.evaluations).lines(), measured_lines(config, found)):
                yield Finding("ok", "speed", line)
    except InputError as error:  # `preset_can_run` reports a preset that cannot be estimated
        if question.measures:
            yield Finding("bad", "speed", str(error), "see this line")


def layout(question: Question) -> Iterator[Finding]:
    """Report the layout of the GPUs, and the number of actors, workers and lanes."""
    if question.config is None:
        return
    cluster, lanes = question.config.cluster, question.config.learner.lanes
    workers = cluster.learner.workers
    sizes = (
        f"{cluster.rollout_actors} rollout actors, {workers} learner workers with {lanes // workers} of {lanes} lanes"
    )
    yield Finding("ok", "layout", f"{cluster.layout}: {sizes}")


async def _ping(board: "Board") -> None:
    try:
        await board.ping()
    finally:
        await board.close()


CHECKS: list[Check] = [
    python_and_libraries,
    cores_and_gpus,
    disk_and_memory,
    ray_cluster_answers,
    board_answers,
    preset_can_run,
    inputs_may_mislead,
    layout,
    costs,
]
"""All checks, in the order of their output."""

"""`flowcredit doctor`: is this machine ready for a run? A list of checks; each line has a verdict and a remedy.

A check is a function from a `Question` to findings; `CHECKS` lists all of them. No check starts anything, changes
anything or takes longer than a few seconds, except `gpu_memory` if it measures on request.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deploy.folder.fingerprint import library_versions
from protocol.config.cluster import ClusterConfig, cluster_address
from protocol.config.run import RunConfig
from protocol.config.status import StatusConfig, board_address
from protocol.errors import FlowcreditError, InputError, one_line
from protocol.ground.addresses import BOARD_VARIABLE, EMBEDDED, OFF
from protocol.ground.files import existing_of
from protocol.prompts import read_prompts

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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


def libraries(_: Question) -> Iterator[Finding]:
    """Check every required library against the version that the project declares."""
    from packaging.requirements import Requirement

    held = ", ".join(f"{name} {each}" for name, each in library_versions().items())
    try:
        declared = [Requirement(text) for text in requires("flowcredit") or []]
    except PackageNotFoundError:
        yield Finding("ok", "libraries", f"{held}; not installed, so declared versions are not compared")
        return
    unfit = [
        str(each)
        for each in declared
        if not (each.marker and not each.marker.evaluate({"extra": ""})) and not _has(each)
    ]
    remedy = f"pip install {' '.join(map(repr, unfit))}" if unfit else ""
    yield Finding("bad" if unfit else "ok", "libraries", held, remedy)


def _has(wanted: "Requirement") -> bool:
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def cores(_: Question) -> Iterator[Finding]:
    """Check the number of CPU cores."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux only
    yield _note_if(count < 2, "cpu", f"{count} cores", "a run should have two")


def gpus(question: Question) -> Iterator[Finding]:
    """Check the GPUs that the preset reserves on a local cluster."""
    import torch

    from deploy.run.inputs import gpu_problems

    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none"
    short = next(gpu_problems(question.config), None) if question.config else None
    remedy = "install a driver and a CUDA build of torch, or set cluster.address or cluster.*.gpus" if short else ""
    found = f"{names}; {str(short).partition(': ')[0]}" if short else names
    yield Finding("bad" if short else "ok", "gpu", found, remedy)


def disk(question: Question) -> Iterator[Finding]:
    """Check the folder for run folders and its free space."""
    parent = existing_of(question.run)
    if not parent.is_dir():
        yield Finding("bad", "run folder", f"{parent} is no folder", "set --run to a folder or a new name")
    elif not os.access(parent, os.W_OK):
        yield Finding("bad", "run folder", f"{parent} cannot be written", "set --run to a folder that you may write")
    else:
        free = shutil.disk_usage(parent).free / 2**30
        remedy = f"free some space or set --run: below {FREE_GIB:g} GiB checkpoints may not fit"
        yield _note_if(free < FREE_GIB, "run folder", f"{free:.1f} GiB free at {parent}", remedy)


def shared_memory(_: Question) -> Iterator[Finding]:
    """Check the memory for Ray's object store."""
    if (shared := Path("/dev/shm")).exists():
        size = shutil.disk_usage(shared).free / 2**30
        remedy = "give the container more: docker run --shm-size=4g"
        yield _note_if(size < SHARED_GIB, "shared memory", f"{size:.1f} GiB free at {shared}", remedy)


def open_files(_: Question) -> Iterator[Finding]:
    """Check the limit of open files."""
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield _note_if(files < OPEN_FILES, "open files", str(files), f"ulimit -n {OPEN_FILES}: Ray keeps many files open")


def _note_if(is_low: bool, subject: str, found: str, remedy: str) -> Finding:  # noqa: FBT001
    return Finding("note", subject, found, remedy) if is_low else Finding("ok", subject, found)


def ray_cluster(question: Question) -> Iterator[Finding]:
    """Check the address that a run would use, or the labels that need one."""
    from deploy.run.cluster import require_answer
    from deploy.run.inputs import label_problems

    address = cluster_address(question.config.cluster if question.config else ClusterConfig())
    if address:
        try:
            require_answer(address, timeout_s=CONNECT_S)
            yield Finding("ok", "ray", f"{address} accepts connections")
        except (OSError, ValueError, OverflowError) as error:
            yield Finding("bad", "ray", f"{address} does not answer: {error}", "check cluster.address or RAY_ADDRESS")
    elif problem := next(label_problems(question.config), None) if question.config else None:
        yield _split("bad", "ray", problem)
    else:
        yield Finding("ok", "ray", "no address given: a run starts its own cluster on loopback")


def _split(verdict: Verdict, subject: str, problem: object) -> Finding:
    """Take what is after a problem's last colon as the remedy."""
    found, _, remedy = str(problem).rpartition(": ")
    return Finding(verdict, subject, found, remedy)


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
    from flow.models.completed import completed

    try:
        config = completed(question.config)
        inputs = read_inputs(config)
    except InputError as error:
        yield Finding("bad", "preset", str(error), "see this line")
        return
    yield Finding("ok", "model", config.model.path)
    yield Finding("ok", "prompts", f"{len(inputs.prompts)} to train on, {len(inputs.heldout)} held out")
    problem = next(reward_problems(config, inputs.all_prompts, is_local=False), None)
    if problem:
        yield Finding("bad", "rewards", str(problem), "see this line")
    else:
        yield Finding("ok", "rewards", ", ".join(config.rewards))


def inputs_may_mislead(question: Question) -> Iterator[Finding]:
    """Report settings that may be unintended, such as held-out prompts that are trained on, or prompts that are cut."""
    if question.config is None:
        return
    from deploy.run.inputs import Inputs, concerns
    from flow.models.located import locate

    data = question.config.data
    try:
        train, heldout = (read_prompts(data, path) for path in (data.train, data.heldout))
        found = list(concerns(question.config, Inputs(train, heldout, locate(question.config.model))))
    except InputError:
        return  # `preset_can_run` says it
    for _, message in found:
        yield _split("note", "prompts", message)


def gpu_memory(question: Question) -> Iterator[Finding]:
    """Compare each role's memory (`deploy.tools.estimate`) with a GPU of this machine; on request, measure its speed.

    `deploy.tools.measure` measures forwards, gradients and decoded images per second, `deploy.tools.planning.scoring`
    scorers.
    """
    if question.config is None:
        return
    from deploy.tools.estimate import estimate
    from deploy.tools.measure import measure
    from deploy.tools.memory import fit_problems
    from deploy.tools.planning.scoring import measured_lines
    from flow.models.completed import completed_for_estimate

    try:
        config = completed_for_estimate(question.config)[0]
        found = estimate(config)
        if problem := next(fit_problems(config, found), None):
            yield _split("bad", "gpu memory", problem)
        if question.measures:
            lines = chain(measure(config, found.evaluations).lines(), measured_lines(config, found))
            yield Finding("ok", "speed", "; ".join(lines))
    except InputError as error:  # `preset_can_run` reports a preset that cannot be estimated
        if question.measures:
            yield Finding("bad", "speed", str(error), "see this line")


async def _ping(board: "Board") -> None:
    try:
        await board.ping()
    finally:
        await board.close()


CHECKS: list[Check] = [
    libraries,
    cores,
    gpus,
    disk,
    shared_memory,
    open_files,
    ray_cluster,
    board_answers,
    preset_can_run,
    inputs_may_mislead,
    gpu_memory,
]
"""All checks, in the order of their output."""

"""`flowcredit verify RUN`: checks that all files of a run folder are whole and that its ledger of groups has no gap.

It only reads, needs neither the model nor Ray, and may be used during the run.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from deploy.folder.fingerprint import differences, input_digests, read_digests
from deploy.folder.names import CHECKPOINTS, CONFIG, INPUTS, METRICS
from deploy.folder.read import config_of, lines_of, require_run
from learner.checkpoint import LATEST, checkpoint_folders, read_checkpoint
from protocol.config.run import RunConfig
from protocol.errors import CheckpointError, FlowcreditError, RunFolderError, one_line

REDUCTION, UPDATE = "update/reduction_seconds", "seconds/update"
LINK_S = 1.0
"""Seconds that a run may take between a checkpoint and the link to it."""


@dataclass(frozen=True)
class Verified:
    """The result of one check."""

    subject: str
    found: str
    is_whole: bool = True


def verify(run: Path) -> Iterator[Verified]:
    """Check the config, the inputs, the metrics with their ledger, and every checkpoint.

    Raises:
        RunFolderError: the folder holds no run.
    """
    require_run(run)
    checkpoints, newest = _checkpoints(run / CHECKPOINTS)  # a run writes its lines before the checkpoint after them
    config = None
    try:
        config = config_of(run)
        yield Verified(CONFIG, "readable")
    except RunFolderError as error:
        yield Verified(CONFIG, str(error), is_whole=False)
    if config is not None:
        yield from _inputs(run, config)
    yield from _metrics(run, config, newest)
    yield from checkpoints


def ledger_faults(lines: list[dict[str, Any]], per_iteration: int, *, newest: int = 0) -> list[str]:
    """List the faults of the ledger: it must hold each iteration once, in order, with its own groups.

    Args:
        newest: iteration of the newest checkpoint, up to which no line may be lacking.
    """
    faults = []
    expected = 1
    for line in lines:
        if "ledger/first" not in line:
            continue
        iteration = line["iteration"]
        first, last = (iteration - 1) * per_iteration, iteration * per_iteration - 1
        if iteration != expected:
            faults.append(f"iteration {iteration} found, {expected} expected")
        if (line["ledger/first"], line["ledger/last"]) != (first, last):
            faults.append(f"iteration {iteration} learned from other groups than {first} to {last}")
        expected = iteration + 1
    if expected <= newest:
        faults.append(f"it ends before iteration {expected}, but there is a checkpoint of iteration {newest}")
    return faults


def _inputs(run: Path, config: RunConfig) -> Iterator[Verified]:
    held = read_digests(run / INPUTS)
    if held is None:
        yield Verified(INPUTS, "missing or not readable", is_whole=False)
        return
    try:
        changed = differences(held, input_digests(config))
    except (OSError, FlowcreditError) as error:
        yield Verified(INPUTS, f"prompts or model cannot be read: {one_line(error)}", is_whole=False)
        return
    found = f"changed: {', '.join(changed)}" if changed else f"{len(held)} unchanged"
    yield Verified(INPUTS, found, is_whole=not changed)


def _metrics(run: Path, config: RunConfig | None, newest: int) -> Iterator[Verified]:
    try:
        lines = lines_of(run)
    except RunFolderError as error:
        yield Verified(METRICS, str(error), is_whole=False)
        return
    yield Verified(METRICS, f"{len(lines)} lines, last iteration {lines[-1]['iteration'] if lines else 0}")
    if config is not None:
        faults = ledger_faults(lines, config.group.per_iteration, newest=newest)
        found = "; ".join(faults[:3]) or "every group exactly once"
        yield Verified("ledger", found, is_whole=not faults)
        yield from _learner(lines, lanes=config.learner.lanes)


def _learner(lines: Sequence[dict[str, Any]], *, lanes: int) -> Iterator[Verified]:
    """Report how many workers made each update; an update is only recorded if all of their adapters were equal."""
    updates = [line for line in lines if "ledger/first" in line]
    if not updates:
        return
    by_size = [(size, list(same)) for size, same in groupby(updates, lambda line: line.get("update/workers", 0))]
    wrong = [size for size, _ in by_size if size and lanes % size]
    if wrong:
        yield Verified("learner", f"{wrong[0]:g} workers cannot have shared {lanes} lanes", is_whole=False)
        return
    finding = ", ".join(
        f"{_workers(size)} in iterations {same[0]['iteration']} to {same[-1]['iteration']}" for size, same in by_size
    )
    together = [line for size, same in by_size if size > 1 for line in same]
    if together:
        reduction, update = (sum(line[name] for line in together) for name in (REDUCTION, UPDATE))
        finding += (
            f"; equal digests after {len(together)} updates of several workers, which spent {reduction / update:.0%} of"
            " their time on sums"
        )
    yield Verified("learner", finding)


def _workers(size: float) -> str:
    return f"{size:g} worker{'s' * (size > 1)}" if size else "one process"


def _checkpoints(root: Path) -> tuple[list[Verified], int]:
    """Check all checkpoints; also return the iteration of the newest whole one, 0 if there is none."""
    try:
        folders, newest = checkpoint_folders(root), 0
    except CheckpointError as error:
        return [Verified("checkpoints", str(error), is_whole=False)], 0
    results = [] if folders else [Verified("checkpoints", "none yet")]
    for folder in folders:
        try:
            state = read_checkpoint(folder)
        except CheckpointError as error:
            if folder.exists():  # the run may have removed it meanwhile
                results.append(Verified(folder.name, str(error), is_whole=False))
        else:
            newest = max(newest, state.iteration)
            results.append(Verified(folder.name, f"whole, adapter {state.adapter.digest[:12]}"))
    if folders and (root / LATEST).is_symlink():
        target, newer = _latest(root, {folder.name for folder in folders})
        where = f"points to {target}" + (f", but the newest is {newer}" if newer else "")
        results.append(Verified(LATEST, where, is_whole=not newer))
    return results, newest


def _latest(root: Path, known: Collection[str]) -> tuple[str, str]:
    """Return where `latest` points to, and the checkpoint that is newer; empty if there is none.

    A run that writes a checkpoint moves the link right after it, so a link that is behind is read again.
    """
    for wait_s in (LINK_S, 0):
        target, held = (root / LATEST).readlink().name, [each.name for each in checkpoint_folders(root)]
        if target in {*held[:1], *(set(held) - set(known))}:
            return target, ""
        time.sleep(wait_s)
    return target, next(iter(held), "gone")

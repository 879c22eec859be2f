"""Checkpoints: everything a learner needs to continue exactly, in folders that appear whole or not at all.

    checkpoints/iteration_000040/
        pytorch_lora_weights.safetensors    the adapter, as diffusers loads it
        optimizer.safetensors               AdamW's moments
        recent.safetensors                  with `group.max_lag`: the older adapters that groups in flight use
        state.json                          iteration, adapter digests, baseline, broken guards, and facts such as
                                            library versions
        average/                            the adapter's running mean in the same form, if the run keeps one
        old/                                the adapter `old` in the same form, if the objective has one
        manifest.json                       sha256 of each file above, written last
    checkpoints/latest -> iteration_000040
    checkpoints/best -> iteration_000020        the checkpoint with the best held-out score

A folder is written under a temporary name, synced and renamed. Reading checks every digest first, and refuses a
partial, truncated or altered folder with the reason. `latest` and `best` are for people; reading finds the newest
folder itself.

The iteration also determines the position in the prompt order and all noise keys, so nothing else is saved.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from flow.adapter.lora_file import read_lora, write_lora
from protocol.config.model import LoraConfig
from protocol.errors import CheckpointError, reason_of
from protocol.ground.files import ADAPTER_FILE, AVERAGE, MANIFEST, by_iteration, iteration_name, sha256_of, share, whole
from protocol.messages import Adapter, LearnerState, digest_of

log = logging.getLogger(__name__)

OPTIMIZER, STATE, RECENT = "optimizer.safetensors", "state.json", "recent.safetensors"
FILES = (ADAPTER_FILE, OPTIMIZER, STATE)
"""Files of every checkpoint, besides its manifest."""
MEANS = {name: f"{name}/{ADAPTER_FILE}" for name in (AVERAGE, "old")}
"""Files of the further adapters that a run may have, by the field of `LearnerState`, which is also the folder."""
LATEST, BEST = "latest", "best"
REPLACED = ".replaced.partial"
"""Ends the name of a checkpoint while another one takes its name."""


def write_checkpoint(
    root: Path,
    state: LearnerState,
    config: LoraConfig,
    *,
    keep: int,
    keep_hours: float = 0.0,
    best: int | None = None,
    peaks: Collection[int] = (),
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `root/iteration_NNNNNN` atomically, and delete old checkpoints.

    A checkpoint of a later iteration was damaged when the run continued from before it. It does not count towards
    `keep`, and the run replaces it when it reaches that iteration.

    Args:
        root: the run's `checkpoints` folder.
        state: written into the folder named after its iteration.
        config: LoRA's rank, alpha and targets, for the adapter's metadata.
        keep: number of checkpoints up to this iteration that are kept.
        keep_hours: checkpoints younger than this are kept too, in hours.
        best: iteration of the checkpoint that is kept too, and that `best` points to.
        peaks: iterations of further checkpoints that are kept too.
        facts: further JSON values for `state.json`.
    """
    folder = root / iteration_name(state.iteration)
    put_back(root)
    for leftover in root.glob(".iteration_*.partial"):
        shutil.rmtree(leftover)
    replaced = root / f".{folder.name}{REPLACED}"
    with whole(folder) as partial:
        _write(partial, state, config, facts or {})
        if folder.exists():
            os.rename(folder, replaced)
    _sync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    _point_to(folder, LATEST)
    folders = by_iteration(root)
    if best in folders:
        _point_to(folders[best], BEST)
    youngest = time.time() - 3600 * keep_hours
    for iteration in sorted((number for number in folders if number <= state.iteration), reverse=True)[keep:]:
        if folders[iteration].stat().st_mtime <= youngest and iteration not in {best, *peaks}:
            dropped = root / f".{folders[iteration].name}.dropped.partial"
            os.rename(folders[iteration], dropped)
            shutil.rmtree(dropped)
    return folder


def put_back(root: Path) -> None:
    """Give the checkpoints their names again that `write_checkpoint` was about to replace when its process was killed.

    Only the process that writes the run may do this.
    """
    for replaced in root.glob(f".iteration_*{REPLACED}"):
        folder = root / replaced.name.removeprefix(".").removesuffix(REPLACED)
        if not folder.exists():
            os.rename(replaced, folder)


def read_checkpoint(folder: Path) -> LearnerState:
    """Read a checkpoint after checking every file against the manifest.

    Raises:
        CheckpointError: partial, truncated or altered; the message says which file and why.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or set(manifest) - {RECENT, *MEANS.values()} != set(FILES):
        raise CheckpointError(f"checkpoint {folder} must list {sorted(FILES)} in its {MANIFEST}")
    for name, expected in manifest.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder} lacks {name}")
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
        if found != expected:
            raise CheckpointError(f"checkpoint {folder} holds an altered {name}: its sha256 is not the manifest's")
    try:
        facts = json.loads((folder / STATE).read_text(encoding="utf-8"))
        optimizer = load_file(folder / OPTIMIZER)
        iteration, digest, baseline = int(facts["iteration"]), facts["digest"], tuple(facts.get("baseline", ()))
        broken = {name: int(times) for name, times in facts.get("broken", {}).items()}
        recent = {int(version): digest for version, digest in facts.get("recent", {}).items()}
        older = load_file(folder / RECENT) if RECENT in manifest else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    adapter = read_lora(folder, version=iteration)
    if adapter.digest != digest:
        raise CheckpointError(f"checkpoint {folder} must hold adapter {digest}, got {adapter.digest}")
    return LearnerState(
        iteration=iteration,
        adapter=adapter,
        optimizer=optimizer,
        baseline=baseline,
        recent=_recent(folder, recent, older),
        broken=broken,
        **{name: read_lora(folder / name, version=iteration) for name, file in MEANS.items() if file in manifest},
    )


def newest_checkpoint(root: Path) -> tuple[LearnerState, Path] | None:
    """Read the newest whole checkpoint; log each damaged one and try the one before it.

    Returns:
        State and folder; None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, but none is whole, or they cannot be listed.
    """
    reasons: dict[str, str] = {}
    while folder := next((each for each in checkpoint_folders(root) if each.name not in reasons), None):
        try:
            return read_checkpoint(folder), folder
        except CheckpointError as error:
            reasons[folder.name] = str(error)
            if folder.exists():  # otherwise the run has removed it meanwhile, and a newer one is there
                log.warning("checkpoint refused: %s", error)
    if reasons:
        raise CheckpointError(f"no checkpoint under {root} is whole; the newest: {next(iter(reasons.values()))}")
    return None


def read_facts(folder: Path) -> Mapping[str, Any]:
    """Read `state.json` of a folder that `read_checkpoint` accepted."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def checkpoint_folders(root: Path) -> list[Path]:
    """List all checkpoints, whole or not, newest first (CheckpointError: the folder cannot be listed)."""
    try:
        return list(reversed(by_iteration(root).values()))
    except OSError as error:
        raise CheckpointError(f"checkpoints under {root} cannot be listed: {reason_of(error)}; fix that") from error


def _contiguous(array: np.ndarray) -> np.ndarray:
    """Copy to contiguous memory if needed. `np.ascontiguousarray` alone would give a scalar one dimension."""
    return np.ascontiguousarray(array).reshape(array.shape)


def _write(partial: Path, state: LearnerState, config: LoraConfig, facts: Mapping[str, Any]) -> None:
    partial.mkdir(parents=True)
    write_lora(partial, state.adapter, config)
    save_file({name: _contiguous(a) for name, a in state.optimizer.items()}, partial / OPTIMIZER)
    share(partial / OPTIMIZER)
    names: list[str] = list(FILES)
    if state.recent:
        arrays = {f"{w.version}/{name}": _contiguous(a) for w in state.recent for name, a in w.arrays.items()}
        save_file(arrays, partial / RECENT)
        share(partial / RECENT)
        names.append(RECENT)
    means: dict[str, Adapter] = {name: mean for name in MEANS if (mean := getattr(state, name))}
    for name, mean in means.items():
        (partial / name).mkdir()
        write_lora(partial / name, mean, config)
        names.append(MEANS[name])
    own = {
        "iteration": state.iteration,
        "digest": state.adapter.digest,
        "baseline": state.baseline,
        "broken": dict(state.broken),
        "recent": {str(adapter.version): adapter.digest for adapter in state.recent},
    }
    (partial / STATE).write_text(json.dumps({**facts, **own}), encoding="utf-8")
    manifest = {name: sha256_of(partial / name) for name in names}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*names, MANIFEST, *means):
        _sync(partial / name)
    _sync(partial)


def _recent(folder: Path, digests: Mapping[int, str], arrays: Mapping[str, np.ndarray]) -> tuple[Adapter, ...]:
    """Rebuild the older adapters, and check each against its own digest."""
    adapters = []
    for version in sorted(digests):
        own = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{version}/")}
        adapter = Adapter(version=version, arrays=own, digest=digest_of(own))
        if adapter.digest != digests[version]:
            raise CheckpointError(
                f"checkpoint {folder} must hold adapter {digests[version]} of version {version}, got {adapter.digest}"
            )
        adapters.append(adapter)
    return tuple(adapters)


def _point_to(folder: Path, name: str) -> None:
    """Point the link `name` at this folder; do nothing on a file system without symbolic links."""
    with suppress(OSError), whole(folder.parent / name) as partial:
        partial.symlink_to(folder.name, target_is_directory=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

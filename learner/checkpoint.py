"""Checkpoints: everything a learner needs to go on exactly, in folders that appear whole or not at all.

    checkpoints/step_000040/
        pytorch_lora_weights.safetensors    the adapter, as diffusers loads it
        optimizer.safetensors               AdamW's moments
        state.json                          step, adapter digest, baseline
        average/                            the adapter's running mean in the same form, where the run keeps one
        manifest.json                       sha256 of each file above, written last

A folder is written under a temporary name, synced and renamed. Reading checks every digest first; a folder that is
partial, truncated or altered is refused with its reason.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from flow.lora_file import FILE_NAME, read_lora, write_lora
from protocol.config_policy import LoraConfig
from protocol.errors import CheckpointError
from protocol.messages import LearnerState

log = logging.getLogger(__name__)

MANIFEST, OPTIMIZER, STATE = "manifest.json", "optimizer.safetensors", "state.json"
FILES = (FILE_NAME, OPTIMIZER, STATE)
AVERAGE = "average"
AVERAGE_FILE = f"{AVERAGE}/{FILE_NAME}"
"""Of a run that keeps a running mean of its adapter; `pipeline.load_lora_weights` takes the folder."""


def write_checkpoint(root: Path, state: LearnerState, config: LoraConfig, *, keep: int) -> Path:
    """Write `root/step_NNNNNN` atomically and drop all but the newest `keep` checkpoints up to this one.

    A folder of a later step was damaged when the run went on from before it; it does not count, and is replaced in
    its turn.
    """
    folder = root / f"step_{state.step:06d}"
    partial = root / f".{folder.name}.partial"
    for leftover in root.glob(".step_*.partial"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    write_lora(partial, state.weights, config)
    save_file({name: np.ascontiguousarray(a) for name, a in state.optimizer.items()}, partial / OPTIMIZER)
    facts = {"step": state.step, "digest": state.weights.digest, "baseline": state.baseline}
    (partial / STATE).write_text(json.dumps(facts), encoding="utf-8")
    files = FILES
    if state.average:
        (partial / AVERAGE).mkdir()
        write_lora(partial / AVERAGE, state.average, config)
        files = (*FILES, AVERAGE_FILE)
    manifest = {name: _sha256(partial / name) for name in files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*files, *([AVERAGE] if state.average else []), MANIFEST):
        _sync(partial / name)
    _sync(partial)
    replaced = root / f".{folder.name}.replaced.partial"
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(partial, folder)
    _sync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in [held for held in _folders(root) if _step(held) <= state.step][keep:]:
        shutil.rmtree(old)
    return folder


def read_checkpoint(folder: Path) -> LearnerState:
    """Read a checkpoint after checking every file against the manifest.

    Raises:
        CheckpointError: partial, truncated or altered; the message says which file and why.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or set(manifest) - {AVERAGE_FILE} != set(FILES):
        raise CheckpointError(f"checkpoint {folder} must list {sorted(FILES)} in its {MANIFEST}")
    for name, expected in manifest.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder} lacks {name}")
        if _sha256(folder / name) != expected:
            raise CheckpointError(f"checkpoint {folder} holds an altered {name}: its sha256 is not the manifest's")
    try:
        facts = json.loads((folder / STATE).read_text(encoding="utf-8"))
        optimizer = load_file(folder / OPTIMIZER)
        step, digest, baseline = int(facts["step"]), facts["digest"], tuple(facts.get("baseline", ()))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    weights = read_lora(folder, version=step)
    if weights.digest != digest:
        raise CheckpointError(f"checkpoint {folder} must hold adapter {digest}, got {weights.digest}")
    average = read_lora(folder / AVERAGE, version=step) if AVERAGE_FILE in manifest else None
    return LearnerState(step=step, weights=weights, optimizer=optimizer, average=average, baseline=baseline)


def newest_checkpoint(root: Path) -> tuple[LearnerState, Path] | None:
    """The newest checkpoint that is whole; a damaged one is reported and the one before is taken.

    Raises:
        CheckpointError: there are checkpoints, but none is whole.
    """
    reasons = []
    for folder in _folders(root):
        try:
            return read_checkpoint(folder), folder
        except CheckpointError as error:
            log.warning("checkpoint refused: %s", error)
            reasons.append(str(error))
    if reasons:
        raise CheckpointError(f"no checkpoint under {root} is whole; the newest: {reasons[0]}")
    return None


def _folders(root: Path) -> list[Path]:
    """Newest first. Another name, such as a person's own copy `step_000040_best`, is neither read nor dropped."""
    held = [each for each in root.glob("step_*") if re.fullmatch(r"step_\d{6,}", each.name)]
    return sorted(held, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

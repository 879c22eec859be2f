"""Digests of a run's inputs: prompt files, files of scorers and own functions, model folder, library versions.

A run continues only with the input files that it began with. Other library versions are allowed but reported, since
they may round differently.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flowcredit.start import VERSION
from protocol.config.run import RunConfig
from protocol.files import sha256_of
from protocol.import_path import file_of
from protocol.resources import resolve

PACKAGES = ("torch", "numpy", "diffusers", "transformers", "peft", "safetensors", "ray")
"""Libraries that compute, load or carry a run's numbers."""
WHOLE_MIB, PIECES = 64, 16
"""Files up to `WHOLE_MIB` are hashed whole; of larger ones `PIECES` evenly spaced MiB, including the first."""
MIB = 2**20


def input_digests(config: RunConfig) -> dict[str, str]:
    """Compute the sha256 of prompt files, files of scorers and own functions, and each file of the model's folders.

    These are the model's own, that of a tiny decoder and that of a LoRA to start from. What is not a file or folder on
    this machine is left out; the revisions of what is on the hub are part of the config.
    """
    prompts = {f"data.{name}": resolve(getattr(config.data, name)) for name in ("train", "heldout")}
    scorers = {f"rewards.{name}.scorer": reward.scorer for name, reward in config.rewards.items()}
    own = {key: file_of(path) for key, path in (scorers | config.own_functions).items()}
    lora = resolve(config.model.lora.start) if config.model.lora.start else None
    files = (prompts | own | {"model.lora.start": lora}).items()
    digests = {name: file_digest(path) for name, path in files if path and path.is_file()}
    tiny = resolve(config.model.tiny_decoder) if config.model.tiny_decoder else None
    folders = {"model.path": resolve(config.model.path), "model.tiny_decoder": tiny, "model.lora.start": lora}
    for key, folder in folders.items():
        inside = sorted(path for path in folder.rglob("*") if path.is_file()) if folder and folder.is_dir() else []
        digests |= {f"{key}/{path.relative_to(folder)}": file_digest(path) for path in inside if folder}
    return digests


def library_versions() -> dict[str, str]:
    """Return our version, and those of Python and of the installed `PACKAGES`."""
    versions = {"flowcredit": VERSION, "python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one line for each entry that was changed, added or removed."""
    return [
        f"{name} (there {before.get(name, 'nothing')[:12]}, now {now.get(name, 'nothing')[:12]})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def file_digest(path: Path) -> str:
    """Compute a file's sha256; above `WHOLE_MIB`, that of its size and `PIECES` pieces of 1 MiB."""
    size = path.stat().st_size
    if size <= WHOLE_MIB * MIB:
        return sha256_of(path)
    with path.open("rb") as file:
        sha = hashlib.sha256(str(size).encode())
        for piece in range(PIECES):
            file.seek(piece * (size - MIB) // (PIECES - 1))
            sha.update(file.read(MIB))
        return sha.hexdigest()


def read_digests(path: Path) -> dict[str, str] | None:
    """Read `inputs.json`; None if it is missing or not readable."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held if isinstance(held, dict) and all(isinstance(value, str) for value in held.values()) else None

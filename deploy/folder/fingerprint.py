"""What a run was started with, by content: prompt files, model folder, library versions.

A run goes on only with the contents it began with; other library versions are allowed and said, since they may round
differently.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from protocol.config.run import RunConfig
from protocol.resources import resolve

PACKAGES = ("torch", "numpy", "diffusers", "transformers", "peft", "safetensors", "ray")
"""Libraries that compute, load or carry a run's numbers."""
WHOLE_MIB, PIECES = 64, 16
"""Files up to this size are hashed whole; of larger ones so many evenly spaced MiB, the header's among them."""
MIB = 2**20


def input_digests(config: RunConfig) -> dict[str, str]:
    """sha256 by what it is of: `data.train`, `data.heldout`, and `model.path/<file>` for each file of a model folder.

    A model that is no folder on this machine is left out: its revision is part of the config.
    """
    prompts = {f"data.{name}": resolve(getattr(config.data, name)) for name in ("train", "heldout")}
    digests = {name: file_digest(path) for name, path in prompts.items() if path.is_file()}
    folder = resolve(config.model.path)
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return digests | {f"model.path/{path.relative_to(folder)}": file_digest(path) for path in files}


def library_versions() -> dict[str, str]:
    """Python's and those of `PACKAGES`; a library that is not installed as a package is left out."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line for each entry that differs, is new or has gone."""
    return [
        f"{name} (there {before.get(name, 'nothing')[:12]}, now {now.get(name, 'nothing')[:12]})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def file_digest(path: Path) -> str:
    """sha256 of a file up to `WHOLE_MIB`; of a larger one over its size and `PIECES` pieces of 1 MiB."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_MIB * MIB:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha = hashlib.sha256(str(size).encode())
        for piece in range(PIECES):
            file.seek(piece * (size - MIB) // (PIECES - 1))
            sha.update(file.read(MIB))
        return sha.hexdigest()


def read_digests(path: Path) -> dict[str, str] | None:
    """What `write_digests` wrote; None when it is not there or not readable."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held if isinstance(held, dict) and all(isinstance(value, str) for value in held.values()) else None

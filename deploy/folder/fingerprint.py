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

from flowcredit.code import code_digest, git_commit
from flowcredit.packages import VERSION
from protocol.config.run import RunConfig
from protocol.ground.files import sha256_of
from protocol.ground.import_path import file_of
from protocol.ground.resources import resolve
from protocol.prompts import read_prompts

CODE_KEY, COMMIT_KEY = "code", "commit"
PACKAGES = ("torch", "numpy", "diffusers", "transformers", "peft", "safetensors", "ray")
"""Libraries that compute, load or carry a run's numbers."""
WHOLE_MIB, PIECES = 64, 16
"""A file up to `WHOLE_MIB` is hashed whole; of a larger file, `PIECES` evenly spaced MiB, including the first."""
MIB = 2**20


def input_digests(config: RunConfig) -> dict[str, str]:
    """Compute the sha256 of prompt files, of all their images together, of files of scorers and own functions, and of
    each file in the folders of the model, a tiny decoder and a LoRA to start from.

    What is not on this machine is left out; its revision on the hub is part of the config.
    """
    prompts = {f"data.{name}": resolve(getattr(config.data, name)) for name in ("train", "heldout")}
    scorers = {f"rewards.{name}.scorer": reward.scorer for name, reward in config.rewards.items()}
    own = {key: file_of(path) for key, path in (scorers | config.own_functions).items()}
    lora = resolve(config.model.lora.start) if config.model.lora.start else None
    files = (prompts | own | {"model.lora.start": lora}).items()
    digests = {name: file_digest(path) for name, path in files if path and path.is_file()}
    for name, path in prompts.items():
        read = read_prompts(config.data, getattr(config.data, name.removeprefix("data."))) if path.is_file() else []
        if images := [each.sha256 for prompt in read for each in prompt.conditions]:
            digests[f"{name} images"] = hashlib.sha256("".join(images).encode()).hexdigest()
    tiny = resolve(config.model.tiny_decoder) if config.model.tiny_decoder else None
    folders = {"model.path": resolve(config.model.path), "model.tiny_decoder": tiny, "model.lora.start": lora}
    for key, folder in folders.items():
        inside = sorted(path for path in folder.rglob("*") if path.is_file()) if folder and folder.is_dir() else []
        digests |= {f"{key}/{path.relative_to(folder)}": file_digest(path) for path in inside if folder}
    return digests


def library_versions() -> dict[str, str]:
    """Return our version, the digest of our code, its git commit if it has one, and the versions of the libraries."""
    versions = {"flowcredit": VERSION, CODE_KEY: code_digest()}
    if commit := git_commit():
        versions[COMMIT_KEY] = commit
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def code_name(versions: Mapping[str, str]) -> str:
    """Name the code that `library_versions` recorded, e.g. `3f2a… (commit 1b4c…, changed)`; empty if it is not."""
    commit = versions.get(COMMIT_KEY)
    return versions.get(CODE_KEY, "") + (f" (commit {commit})" if commit else "")


def version_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the `differences` of two `library_versions`; another commit of the same code is none."""
    return differences(*({key: each for key, each in held.items() if key != COMMIT_KEY} for held in (before, now)))


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one line for each entry that was changed, added or removed."""
    return [
        f"{name} (there {before.get(name, 'nothing')[:12]}, now {now.get(name, 'nothing')[:12]})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def file_digest(path: Path) -> str:
    """Compute a file's sha256; above `WHOLE_MIB`, the sha256 of its size and `PIECES` pieces of 1 MiB."""
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

"""Looking at a diffusers model folder without loading it: light enough for the process that only starts a run."""

import json
from pathlib import Path

from protocol.errors import ModelError
from protocol.resources import resolve

FAMILIES = {"StableDiffusion3Pipeline": "sd3"}
"""Pipeline class in `model_index.json` -> our name of the family."""


def family_of(path: str) -> tuple[str, Path]:
    """The family and the place of a model folder.

    Raises:
        ModelError: no such folder, no readable `model_index.json`, a family that we do not train, or a part that the
            index names and the folder lacks.
    """
    folder = resolve(path)
    index = folder / "model_index.json"
    if not folder.is_dir():
        raise ModelError(f"model folder {path} does not exist: set model.path to a folder in diffusers' format")
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))
        pipeline = str(entries["_class_name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"model folder {path} must hold a readable model_index.json with a _class_name: is it in diffusers' format?"
        ) from None
    if pipeline not in FAMILIES:
        raise ModelError(f"model folder {path} must hold one of {sorted(FAMILIES)}, got {pipeline}")
    parts = [name for name, entry in entries.items() if isinstance(entry, list) and all(entry)]
    lacking = [name for name in parts if not (folder / name).is_dir()]
    if lacking:
        raise ModelError(f"model folder {path} must hold the parts that its model_index.json names, lacks {lacking}")
    return FAMILIES[pipeline], folder

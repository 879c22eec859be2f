"""Writes what a run has learned for other programs: a full model folder, or the LoRA alone with its scale inside."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from deploy.folder.read import average_of, checkpoint_of, config_of
from flow.adapter.lora_file import write_scaled_lora
from flow.models.located import Located, locate
from flow.models.parts import pipeline_of, read_part, read_text_parts
from flow.models.reading import quiet_libraries
from protocol.errors import RunFolderError
from protocol.ground.files import AVERAGE, share, text_of, whole, writing

LORA_SUFFIX = ".safetensors"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's name of a dtype by safetensors' name."""


def export_lora(
    run: Path, file: Path, *, iteration: int | None = None, dtype: str | None = None, is_average: bool = False
) -> Path:
    """Write the LoRA of `run` to `file`, with the scale alpha / rank multiplied into it.

    A checkpoint's own file states alpha in its header, as diffusers does. A program that does not read the header would
    apply the LoRA too weakly or too strongly, without a word. This file has the right strength there too.

    Args:
        file: file to write; it must not exist.
        iteration: of the checkpoint; None takes the newest.
        dtype: dtype of the written tensors; None takes float32.
        is_average: take the running mean of the adapter instead.

    Raises:
        RunFolderError: there is no such run or checkpoint, or `file` exists or cannot be written.
    """
    _require_new(file)
    state, _ = checkpoint_of(run, iteration)
    adapter = average_of(state, run) if is_average else state.adapter
    with writing(file, "another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_scaled_lora(file, adapter, config_of(run).model.lora, dtype=dtype or "float32")
    return file


def export_model(
    run: Path, folder: Path, *, iteration: int | None = None, dtype: str | None = None, is_average: bool = False
) -> Path:
    """Write the model of `run` with its adapter merged to `folder`, which appears whole or not at all.

    Args:
        folder: folder to write; it must not exist.
        iteration: of the checkpoint; None takes the newest.
        dtype: dtype of the written weights; None takes the dtype of the model's transformer on disk.
        is_average: merge the running mean of the adapter instead.

    Raises:
        RunFolderError: there is no such run or checkpoint, `folder` exists or cannot be written, or one of the two
            paths is not UTF-8.
        ModelError: the model cannot be loaded.
    """
    _require_new(folder)
    for path in (run, folder):
        _require_utf8(path)
    state, checkpoint = checkpoint_of(run, iteration)
    if is_average:
        average_of(state, run)
        checkpoint /= AVERAGE
    located = locate(config_of(run).model, is_whole=True)
    with quiet_libraries():
        pipeline = _load(located, dtype or _stored_dtype(located.folder / "transformer"))
        pipeline.load_lora_weights(checkpoint)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        with writing(folder, "another folder"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with whole(folder, is_shared=True) as partial:  # two users may write the same path
                _save(pipeline, partial)
    return folder


def _require_new(path: Path) -> None:
    if path.exists():
        raise RunFolderError(f"{path} must not exist yet: name a new one")


def _require_utf8(path: Path) -> None:
    if (shown := text_of(path)) != str(path):
        raise RunFolderError(f"{shown} must be a UTF-8 path, since diffusers takes no other: rename it")


def _load(located: Located, dtype: str) -> Any:
    import torch

    kind = getattr(torch, dtype)
    parts = {part: read_part(located, part, dtype=kind) for part in ("transformer", "vae")}
    return pipeline_of(located, read_text_parts(located, dtype=kind), **parts)


def _save(pipeline: Any, folder: Path) -> None:
    """Write a pipeline for all who may read the folder; a full disk is an OSError, not one of safetensors' own."""
    try:
        pipeline.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for file in folder.rglob("*.safetensors"):
        share(file)


def _stored_dtype(folder: Path) -> str:
    """Return the dtype of the first tensor on disk."""
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(path, framework="numpy") as file:  # then `_load` refuses it
            for name in file.keys():  # noqa: SIM118
                return DTYPES.get(file.get_slice(name).get_dtype(), "float32")
    return "float32"

"""The architectures that a GPU is to train, tiny and with random weights: by name, the model's section of a config."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.worlds.tiny_models import write_flux, write_sd35
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_qwen_image, write_qwen_image_21, write_z_image

ARCHITECTURES: dict[str, Callable[[Path], Path]] = {
    "sd35": partial(write_sd35, has_t5=False),
    "flux": write_flux,
    "flux2_klein": write_flux2_klein,
    "qwen_image": write_qwen_image,
    "qwen_image_21": write_qwen_image_21,
    "z_image": write_z_image,
}
SIZE = {"height": 16, "width": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    "flux": SIZE,
    "flux2_klein": SIZE,
    "qwen_image": {**SIZE, "max_sequence_length": 160, "guidance": 2.0},
    "qwen_image_21": {**SIZE, "max_sequence_length": 100},
    "z_image": {**SIZE, "max_sequence_length": 40, "guidance": 2.0},
}
"""Prompts of the last three differ in length, and so do a prompt and its negative."""
LORA = {"rank": 4, "alpha": 8}


def model_of(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Write the model unless it is there.

    Args:
        name: one of `ARCHITECTURES`.
        dtype: of the transformer.
        folder: of all models.

    Returns:
        The section `model`.
    """
    path = folder / name
    if not path.exists():
        ARCHITECTURES[name](path)
    return {"path": str(path), "dtype": dtype, "max_sequence_length": 2, "lora": LORA, **OPTIONS.get(name, {})}

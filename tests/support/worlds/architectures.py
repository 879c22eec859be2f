"""The architectures that a GPU is to train, tiny and with random weights: by name, the model's section of a config."""

from pathlib import Path
from typing import Any

from tests.support.worlds.tiny_models import write_flux, write_sd35

ARCHITECTURES = ("sd35", "flux")
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
    path, size = folder / name, {"height": 16, "width": 16} if name == "flux" else {}
    if not path.exists():
        _ = write_flux(path) if name == "flux" else write_sd35(path, has_t5=False)
    return {"path": str(path), "dtype": dtype, "max_sequence_length": 2, "lora": LORA, **size}

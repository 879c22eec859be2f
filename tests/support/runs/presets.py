"""A preset file of one small iteration, for tests that type commands."""

from pathlib import Path
from typing import Any

import yaml


def small_preset(folder: Path, model: Path, *, scorer: str, **sections: Any) -> Path:
    """Write `preset.yaml` and its prompts.

    Args:
        folder: where both are written.
        model: folder of a pipeline.
        scorer: of the only reward.
        sections: further sections of the config.

    Returns:
        The file.
    """
    prompts, path = folder / "prompts.txt", folder / "preset.yaml"
    prompts.write_text("red circle\nblue square\n")
    tree = {
        "iterations": 1,
        "model": {"path": str(model), "max_sequence_length": 2},
        "data": {"train": str(prompts), "heldout": str(prompts)},
        "sampling": {"steps": 3},
        "group": {"size": 2, "per_iteration": 2},
        "rewards": {"only": {"scorer": scorer}},
        "evaluation": {"component": "reward", "images_per_prompt": 1, "steps": 2},
        **sections,
    }
    path.write_text(yaml.safe_dump(tree))
    return path

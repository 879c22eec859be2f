"""Preset files of one small iteration, for tests that type commands."""

import json
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


def dark_preset(folder: Path, model: Path) -> Path:
    """Write `preset.yaml`, which rewards dark images of two prompts in one iteration, and its prompts.

    Args:
        folder: where both are written.
        model: folder of a pipeline.

    Returns:
        The file.
    """
    prompts = folder / "prompts.jsonl"
    include = [{"class": "circle", "count": 1, "color": "red"}]
    lines = [
        {"prompt": text, "tag": "colors", "include": include, "negative_prompt": "blurry"}
        for text in ("a red circle", "one red circle")
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {
        "iterations": 1,
        "model": {
            "path": str(model),
            "max_sequence_length": 1,
            "guidance": 2.0,
            "embedding_cache": str(folder / "embeddings"),
        },
        "data": {"train": str(prompts), "heldout": str(prompts)},
        "sampling": {"steps": 3},
        "group": {"size": 4, "shard": 2, "per_iteration": 2},
        "learner": {"learning_rate": 0.05, "updates_per_iteration": 1},
        "completion": {"substeps": 2},
        "rewards": {"dark": {"scorer": "tests.support.rewards.dark:Dark"}},
        "evaluation": {"component": "reward", "steps": 3, "batch": 3},
    }
    path = folder / "preset.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path

"""The configs of runs: a whole one, and the differences among many."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from deploy.api.folder_source import Stamps, stamps_of
from deploy.folder.names import CONFIG
from deploy.folder.read import config_of, origin_of
from protocol.errors import RunFolderError
from protocol.status import Document

MOST_KEYS = 60
"""Largest number of differing keys in one answer."""
LONGEST = 120
"""Characters of one value in a comparison."""
RUNS_HELD = 1_000
SEED = "seed"


class RunConfigView(Document):
    """The config of one run."""

    text: str
    """`config.yaml`."""
    fields: dict[str, JsonValue]
    """Every value by its dotted key, defaults included."""
    sources: dict[str, str]
    """What set each key: `preset NAME`, `method NAME`, `file PATH`, or `override`, on the command line or in Python; a
    key that is left out has its default."""


class ComparedConfig(Document):
    """The config of one run, compared with others."""

    group: str
    """The same for runs whose configs differ only in the seed and in keys that cannot change a result."""
    seed: int
    values: dict[str, str]
    """Its values of the keys that differ among the runs of the answer, as text; a key that it lacks is left out."""


class Differences(Document):
    """The differences among the configs of several runs."""

    keys: list[str]
    """Keys in which they differ, without the seed; keys that can change a result come first."""
    left_out: int
    """Differing keys beyond the first 60."""
    runs: dict[str, ComparedConfig]
    """By name; a run whose config cannot be read is left out."""


def view(run: Path) -> RunConfigView:
    """Return the config of a run folder (RunFolderError: it cannot be read)."""
    config = config_of(run)
    origin = origin_of(run)
    sources = origin.sources if origin else {}
    return RunConfigView(text=config.to_yaml(), fields=config.flat_fields(), sources=sources)


def compare(runs: Mapping[str, Path]) -> Differences:
    """Compare the configs of run folders, by name of the run."""
    read = {name: found for name, path in runs.items() if (found := _read(path, stamps_of(path, CONFIG)))}
    fields = [each.values for each, _ in read.values()]
    keys = [key for key in dict.fromkeys(key for each in fields for key in each) if key != SEED]
    differing = [key for key in keys if any(each.get(key) != fields[0].get(key) for each in fields[1:])]
    free = {key for key in differing if not any(key in outcome for _, outcome in read.values())}
    differing.sort(key=lambda key: key in free)
    shown = differing[:MOST_KEYS]
    return Differences(
        keys=shown,
        left_out=len(differing) - len(shown),
        runs={
            name: each.model_copy(update={"values": {key: each.values[key] for key in shown if key in each.values}})
            for name, (each, _) in read.items()
        },
    )


@lru_cache(maxsize=RUNS_HELD)
def _read(run: Path, _stamps: Stamps) -> tuple[ComparedConfig, frozenset[str]] | None:
    """Read the file once as long as it stays the same: all its values, and the keys that can change a result."""
    try:
        config = config_of(run)
    except RunFolderError:
        return None
    outcome = {key: _text(value) for key, value in config.outcome_fields().items()}
    shared = sorted((key, value) for key, value in outcome.items() if key != SEED)
    group = hashlib.sha256(repr(shared).encode()).hexdigest()[:12]
    values = {key: _text(value) for key, value in config.flat_fields().items()}
    return ComparedConfig(group=group, seed=config.seed, values=values), frozenset(outcome)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"

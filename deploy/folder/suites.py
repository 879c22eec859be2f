"""The scores of a run in published suites: `suites/SUITE/evaluation.json`, which `flowcredit eval --suite` writes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.folder.names import SUITES
from deploy.folder.paired import Difference

JSON = "evaluation.json"
BASE, ADAPTER = "base", "adapter"
ALL_KINDS = "all kinds"
"""The difference of two scores over all kinds of prompts."""


@dataclass(frozen=True)
class SuiteScore:
    """A run's score in a published suite."""

    run: str
    suite: str
    iteration: int
    score: float
    base: float | None
    """Score of the base model; None if it was not evaluated."""
    difference: Difference | None
    """The score minus the base model's."""
    images: int
    missing: int


def read_suites(run: Path) -> Iterator[SuiteScore]:
    """Read the suites that a run was evaluated with; a file that cannot be read is left out."""
    for path in sorted((run / SUITES).glob(f"*/{JSON}")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            by_name = {each["name"]: each for each in found["results"]}
            adapter, base, change = by_name[ADAPTER], by_name.get(BASE), found["differences"].get(ALL_KINDS)
            yield SuiteScore(
                run=run.name,
                suite=path.parent.name,
                iteration=int(adapter["iteration"]),
                score=float(adapter["score"]),
                base=float(base["score"]) if base else None,
                difference=Difference.model_validate(change) if change else None,
                images=int(adapter["images"]),
                missing=int(adapter["missing"]),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue

"""The glossary of docs/architecture.md is kept: words it retires appear nowhere in code, presets, page or docs."""

import re
import subprocess
from functools import cache

import pytest

from tests.support.paths import ROOT

RETIRED = {
    "image": r"pictures?",
    "desired, scale": r"wish(?:ed|es)?",
    "index, position, slot, path": r"places?",
    "optimizer": r"optimis(?:er|ers)",
    "micro-batch": r"minibatch(?:es)?",
    "adapter": r"PolicyWeights|WeightSink|StaleWeights\w*|policy weights|policy_version",
    "ports": r"Parts",
    "failure": r"ActorLost|LearnerLost\w*|NodeLosses|LOSSES\w*|on_loss|learner_lost|actor_lost",
    "a process failed": r"(?:actor|learner|member|call)s? (?:was|were|is|are) lost|lost[ _](?:actor|learner|call)s?",
    "iteration": r"step_\d{6}|step_N+",
    "trajectory record": r"strips?(?!\()|film strips?",
    "generate": r"DrawRequest|sample_shard|draw_pictures",
    "noise calibration": r"flowcredit calibrate(?!-)",
}
"""What to say, and the pattern of what it replaces."""
SUFFIXES = {".py", ".md", ".yaml", ".js", ".html", ".css", ".toml"}
DATA = {
    "LICENSE",
    "tests/test_glossary.py",
    "tests/toyworld/test_model.py",
    "tests/toyworld/test_words.py",
    "toyworld/world/edits.py",
    "toyworld/world/vocabulary.py",
}
"""Files that hold retired words as data: phrases of prompts."""
FINE = re.compile(r"\.strip\(|\.[lr]strip\(|takes? place|take the place of|in place\b|in-place|rstrip|lstrip|<picture>")
"""Uses that are another word."""
GLOSSARY = re.compile(r"<!-- glossary -->.*?<!-- /glossary -->", re.DOTALL)


@cache
def texts() -> dict[str, str]:
    """Text of every file that people read, by its path."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = {name: ROOT / name for name in names}
    return {
        name: GLOSSARY.sub("", path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.suffix in SUFFIXES and name not in DATA and "vendor" not in path.parts and path.exists()
    }


@pytest.mark.parametrize("say", RETIRED)
def test_a_retired_word_is_not_used(say: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z])(?:{RETIRED[say]})(?![A-Za-z])")
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts().items()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(FINE.sub("", line))
    ]
    assert not found, f"say {say!r}:\n" + "\n".join(found)

"""Writes constraints for pip: the lowest versions that pyproject.toml allows, and torch as constraints.txt has it.

    python -m tests.support.lowest lowest.txt

torch is left out because its lowest version exists with CUDA only, which is gigabytes.
"""

import re
import sys
import tomllib
from pathlib import Path

from tests.support.paths import ROOT

GROUPS = ("ocr",)
"""Optional dependencies that are tested too."""


def lowest() -> list[str]:
    """Return a line for each direct dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(each for name in GROUPS for each in project["optional-dependencies"][name])]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==.*$", pinned, re.MULTILINE)
    return [torch, *(_lowest_of(each) for each in wanted if not each.startswith("torch>"))]


def _lowest_of(dependency: str) -> str:
    found = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)(?:;.*)?", dependency.replace(" ", ""))
    if not found:
        raise ValueError(f"a dependency must have a lowest version and no other bound, got {dependency!r}")
    return f"{found[1]}=={found[2]}.*"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join([*lowest(), ""]), encoding="utf-8")

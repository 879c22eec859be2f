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
    bounds = (re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)(?:;.*)?", each.replace(" ", "")) for each in wanted)
    return [torch, *(f"{found[1]}=={found[2]}.*" for found in bounds if found and found[1] != "torch")]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join([*lowest(), ""]), encoding="utf-8")

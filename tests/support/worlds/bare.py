"""A machine without a package index: an environment with few of the packages that are installed here.

python -m tests.support.worlds.bare FOLDER
"""

import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.support.paths import ROOT

WHEELS = ROOT / "benchmarks" / "speed" / "slot" / "wheels.txt"
"""What travels to such a machine."""
HELD = """
accelerate annotated-doc attrs certifi charset-normalizer click contourpy cycler execnet filelock fonttools fsspec h11
hypothesis idna iniconfig jaxtyping jinja2 kiwisolver markdown-it-py markupsafe matplotlib mdurl mpmath msgpack networkx
numpy opencv-python-headless packaging pillow pluggy prometheus-client protobuf psutil pygments pyparsing pytest
pytest-timeout pytest-xdist python-dateutil pyyaml regex requests rich safetensors scipy setuptools shellingham six
sortedcontainers sympy tokenizers torch tqdm typer typing-extensions urllib3 wadler-lindig
"""
"""What a machine for torch has without us; it lacks Ray, FastAPI, a Redis and more."""


def bare_environment(folder: Path, *more: str) -> Path:
    """Make an environment whose packages are links to some of those installed here.

    Args:
        folder: of the environment.
        more: names of further packages.

    Returns:
        Its interpreter.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    wheels = [line for line in WHEELS.read_text().splitlines() if not line.startswith("#")]
    for name in (*HELD.split(), *wheels, *more):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / entry).exists():
                (site / entry).symlink_to(Path(str(found.locate_file(entry))))
    return folder / "bin" / "python"


if __name__ == "__main__":
    bare_environment(Path(sys.argv[1]))

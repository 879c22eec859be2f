"""The wheel of this project, as a user would install it."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.paths import ROOT


def unpack_wheel(folder: Path) -> None:
    """Build the wheel and unpack it into a folder, as `pip install --no-deps --target` does."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
        (wheel,) = Path(out).glob("flowcredit-*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)

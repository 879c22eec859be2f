"""The wheel holds everything that an installed flowcredit needs, and nothing more."""

import os
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

from deploy.jobs.submit import PACKAGES, Submission
from flowcredit.packages import VERSION
from tests.support.paths import ROOT
from tests.support.wheel import unpack_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    unpack_wheel(folder)
    return folder


def test_it_holds_every_file_of_the_packages(installed: Path) -> None:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"}
    facts = f"flowcredit-{VERSION}.dist-info"
    held = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert {name for name in held if not name.startswith(facts)} == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert {Path(name).suffix for name in held} >= {".yaml", ".html", ".js", ".css", ".jinja", ".safetensors", ".jsonl"}


def test_it_names_its_version_and_its_program(installed: Path) -> None:
    facts = installed / f"flowcredit-{VERSION}.dist-info"
    assert Parser().parsestr((facts / "METADATA").read_text())["Version"] == VERSION
    assert "flowcredit = flowcredit.start:main" in (facts / "entry_points.txt").read_text()


def test_from_it_a_job_takes_the_same_code_along_as_from_a_checkout(installed: Path, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from deploy.jobs.submit import Submission
made = Submission(preset="toy_geneval", working_dir=Path.cwd()).environment()
print(*made["py_modules"], sep="\\n")
"""
    keep = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(installed)}
    said = subprocess.run(
        [sys.executable, "-c", code], env=keep, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == [str(installed / package) for package in PACKAGES]
    assert "py_modules" not in Submission(preset="toy_geneval", working_dir=ROOT).environment()

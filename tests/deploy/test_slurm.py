"""The Slurm script: linted, with Ray's token. `tests/lab/cluster/test_slurm.py` runs it."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "flowcredit.sbatch"


def test_shellcheck_finds_nothing() -> None:
    program = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([program, SCRIPT, ROOT / ".ci" / "run"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_ray_asks_for_a_token_before_it_starts() -> None:
    script = SCRIPT.read_text()
    assert script.index("export RAY_AUTH_MODE=token RAY_AUTH_TOKEN") < script.index("ray start --head")


def test_the_question_whether_the_head_answers_finds_our_packages_beside_a_folder_deploy(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").touch()
    probe = re.search(r"^probe='(.*?)'$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert probe
    asked = [sys.executable, "-c", probe[1], "http://127.0.0.1:9"]
    found = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("protocol.errors."), "our own error: no server answers there"

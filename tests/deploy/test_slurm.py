"""The Slurm script: linted, with Ray's token. `tests/cluster/test_slurm.py` runs it."""

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

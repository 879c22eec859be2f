"""The script for the first minutes on a GPU: its limits, and every part as on a machine without a package index."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.slot.__main__ import PARTS, SECONDS, Part, main, measured
from tests.support.paths import ROOT
from tests.support.scenes import long_scene
from tests.support.worlds.bare import bare_environment

TINY = ("--device", "cpu", "--tiny")
ELSEWHERE = {"compiled", "tuned", "exactness"}
"""What `tests/gpu` rehearses, and what differs in options only."""


def results(file: Path) -> dict[str, dict[str, Any]]:
    return {line["part"]: line for line in map(json.loads, file.read_text().splitlines())}


def test_a_part_is_left_out_where_too_little_time_is_left(tmp_path: Path) -> None:
    file = tmp_path / "slot.jsonl"
    main([str(file), *TINY, "--seconds", "1"])
    assert list(results(file)) == [part.name for part in PARTS]
    assert all(
        line["left out"].endswith(f"of {part.limit:g}")
        for part, line in zip(PARTS, results(file).values(), strict=True)
    )


@pytest.mark.whole
def test_a_part_that_is_stopped_or_fails_says_so(tmp_path: Path) -> None:
    found = measured(Part("kernels:ceilings", 60, ""), TINY, limit=0.1, log=tmp_path / "log")
    assert (found["error"], found["figures"]) == ("stopped after 0.1 s", {})
    found = measured(Part("kernels:absent", 60, ""), TINY, limit=200, log=tmp_path / "log")
    assert found["error"].startswith("exit code 1: AttributeError") and "absent" in found["error"]


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "slot.jsonl"), "ceiling"])
    assert "got 'ceiling'" in capsys.readouterr().err


def test_the_parts_fit_a_call_of_ten_minutes() -> None:
    assert SECONDS + max(part.limit for part in PARTS) < 600


def require_measured(names: list[str], python: Path, file: Path) -> None:
    """Run these parts with this interpreter; each ends well, and every figure but one of a GPU's kernels is one."""
    command = [python, "-m", "benchmarks.speed.slot", file, *names, *TINY, "--slower", "30"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # on a busy machine, threads wait for each other
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=alone)
    found = results(file)
    assert list(found) == names
    log = file.with_suffix(".log").read_text()
    assert {name: line.get("error", "left out") for name, line in found.items()} == dict.fromkeys(names), log
    # These have no kernel on a CPU; every other measurement must be one.
    lacking = ("cuDNN", "FlashAttention-3", "efficient", "flex")
    failed = {f"{name}: {key}" for name, line in found.items() for key in line["figures"] if key.endswith(", error")}
    assert all(key.removeprefix("attention: ").startswith(lacking) for key in failed), failed


@long_scene
@pytest.mark.whole
@pytest.mark.timeout(7200)
def test_every_part_runs_there_and_the_tests_for_a_gpu_are_found(tmp_path: Path) -> None:
    """Not in CI: each part is a process that imports torch and diffusers, 230 CPU seconds together.

    Run it before a GPU is reserved: `LONG_SCENES=1 python -m pytest -m whole tests/benchmarks/speed/test_slot.py`.
    """
    python = bare_environment(tmp_path / "bare")
    require_measured([part.name for part in PARTS if part.name not in ELSEWHERE], python, tmp_path / "slot.jsonl")
    collected = [python, "-m", "pytest", "--collect-only", "-q", "-m", "gpu"]
    assert "deselected" in subprocess.run(collected, cwd=ROOT, check=True, capture_output=True, text=True).stdout

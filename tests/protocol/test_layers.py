"""Imports go down only, and light layers stay light: seen in fresh interpreters."""

import json
import subprocess
import sys

import pytest

from flowcredit.start import PACKAGES
from tests.support.paths import ROOT

NEEDS_TORCHAO = "flow.quantized.nf4"
"""The one module that imports a package which most installations do not have."""
HEAVY = ("torch", "ray", "redis", "fastapi", "diffusers", "transformers", "peft")


def modules_of(package: str) -> list[str]:
    """Every module below a package, sub-folders included, but the one that needs torchao."""
    files = (ROOT / package).rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.stem != "__init__"}
    return sorted(names - {NEEDS_TORCHAO})


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages, heavy or our own, that importing these modules brings in."""
    script = (
        f"import importlib, json, sys\nfor name in {list(modules)!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {HEAVY + PACKAGES!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (modules_of("protocol"), {"protocol"}),
        (["flow.models.located", "flow.models.completed", "flow.adapter.lora_file"], {"protocol", "flow"}),
        (["toyworld.world.detector", "toyworld.world.scenes", "toyworld.world.prompts"], {"protocol", "toyworld"}),
        (modules_of("rewards"), {"protocol", "rewards"}),
        (
            modules_of("flow") + modules_of("learner"),
            {"protocol", "flow", "learner", "torch", "diffusers", "transformers", "peft"},
        ),
        (
            [*modules_of("learner/loop"), "learner.checkpoint"],
            {"protocol", "flow", "learner"},
        ),
    ],
    ids=[
        "protocol",
        "a located model and lora_file",
        "toyworld without models",
        "rewards",
        "flow and learner",
        "the loop",
    ],
)
def test_a_layer_loads_only_what_it_may(modules: list[str], allowed: set[str]) -> None:
    assert loaded_by(*modules) <= allowed

"""Light layers stay light, seen in fresh interpreters; import-linter checks the other directions."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import grimp
import pytest

from flowcredit.packages import PACKAGES
from tests.support.paths import ROOT

HEAVY = ("torch", "ray", "redis", "fastapi", "diffusers", "transformers", "peft")


def modules_of(package: str) -> list[str]:
    """Every module below a package, sub-folders included."""
    files = (ROOT / package).rglob("*.py")
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.stem != "__init__")


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
    ],
    ids=["protocol", "a located model and lora_file", "toyworld without models", "rewards"],
)
def test_a_layer_loads_only_what_it_may(modules: list[str], allowed: set[str]) -> None:
    assert loaded_by(*modules) <= allowed


def imported_by_name(module: str) -> Iterator[str]:
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (word.value for word in node.args[:1] if isinstance(word, ast.Constant))


def test_no_circle_of_files_even_with_imports_inside_functions_and_by_name() -> None:
    graph = grimp.build_graph("flowcredit", *PACKAGES, cache_dir=None)
    imports = {
        module: {*graph.find_modules_directly_imported_by(module), *imported_by_name(module)}
        for module in graph.modules
    }
    TopologicalSorter(imports).prepare()  # CycleError names the circle

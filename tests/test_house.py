"""Rules of the house that no linter knows: names that say something, and what tests may not do."""

import ast
from collections.abc import Iterator
from pathlib import Path

from flowcredit.packages import PACKAGES
from tests.support.paths import ROOT

PRODUCT = ("flowcredit", *PACKAGES, "benchmarks")
SAYS_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common", "shared", "stuff"}
FOREIGN = {
    "_HAS_PYNVML",
    "_NATIVE_MATH",
    "_active_backend",
    "_backends",
    "_dynamo",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_backward",
}
"""Private names of other libraries that a test may look at."""


def folders() -> list[Path]:
    """Every folder of the product that holds Python modules."""
    return sorted({path.parent for package in PRODUCT for path in (ROOT / package).rglob("*.py")})


def name_of(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


def test_names_say_what_a_file_is_about() -> None:
    names = {name for folder in folders() for name in (folder.name, *(path.stem for path in folder.glob("*.py")))}
    assert not SAYS_NOTHING & names, "name the idea that the file is about"


def test_an_init_holds_its_docstring_only() -> None:
    """Not that of `flowcredit`: `import flowcredit` is the library, and finds what it offers when it is used."""
    inits = [ROOT / package / "__init__.py" for package in PACKAGES]
    inits += [file for init in inits for file in init.parent.glob("*/**/__init__.py")]
    more = [name_of(file) for file in inits if [type(node) for node in ast.parse(file.read_text()).body] != [ast.Expr]]
    assert more == []


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def imported_by(tree: ast.Module) -> Iterator[str]:
    """Full names of the modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_no_test_module_imports_from_another() -> None:
    """What tests share lives in tests/support/."""
    found = [
        (path.name, name)
        for path in files_of_tests()
        for name in imported_by(ast.parse(path.read_text()))
        if name.split(".")[0] == "tests" and ".test_" in name
    ]
    assert found == []


def private_names_in(tree: ast.Module) -> Iterator[str]:
    """Private names that a test looks up on something other than its own `self`, or replaces by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            yield from (str(word).rpartition(".")[2] for word in words)


def test_no_test_reaches_into_private_names() -> None:
    """A test uses what everybody may use; where it cannot, the code lacks a public seam."""
    found = [
        (name_of(path), name)
        for path in files_of_tests()
        for name in private_names_in(ast.parse(path.read_text()))
        if name.startswith("_") and not name.endswith("__") and name not in FOREIGN
    ]
    assert found == []

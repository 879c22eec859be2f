"""Rules of the house that no linter knows: how folders are made, and what tests may not do."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowcredit.start import PACKAGES
from tests.support.paths import ROOT

PRODUCT = ("flowcredit", *PACKAGES, "benchmarks")
MOST_MODULES = 12
SAYS_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common", "shared", "stuff"}
ROUTES = ("deploy/cli/", "deploy/api/app.py", "deploy/api/history/routes.py")
FOREIGN = {"_dynamo"}
"""Private names of other libraries that a test may look at."""


def folders() -> list[Path]:
    """Every folder of the product that holds Python modules."""
    return sorted({path.parent for package in PRODUCT for path in (ROOT / package).rglob("*.py")})


def name_of(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


@pytest.mark.parametrize("folder", folders(), ids=name_of)
def test_a_folder_holds_a_dozen_modules_at_most_and_its_init_a_docstring(folder: Path) -> None:
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= MOST_MODULES, "give what belongs together a folder of its own"
    assert not SAYS_NOTHING & {*modules, folder.name}, "name the idea that the file is about"
    if folder.name == "flowcredit":
        return  # `import flowcredit` is the library, and finds what it offers when it is used
    body = ast.parse((folder / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def test_a_folder_of_tests_holds_a_dozen_modules_at_most() -> None:
    modules = Counter(name_of(path.parent) for path in files_of_tests())
    assert {folder: count for folder, count in modules.items() if count > MOST_MODULES} == {}


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


Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of every module of the product."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield name_of(path), ast.parse(path.read_text(encoding="utf-8"))


def functions_in(node: ast.AST) -> dict[str, Function]:
    """The public functions of a module or class, and a class's constructor."""
    body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
    found = {each.name: each for each in body if isinstance(each, Function)}
    return {name: each for name, each in found.items() if not name.startswith("_") or name == "__init__"}


def given_to(function: Function) -> list[str]:
    """The parameters that a caller gives."""
    return [a.arg for a in (*function.args.args, *function.args.kwonlyargs) if a.arg not in ("self", "cls")]


def methods_of(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Names of the public methods of a class, its own and those of its bases among `classes`."""
    bases = (classes[base] for base in names_of_bases(node) if base in classes)
    return set(functions_in(node)).union(*(methods_of(base, classes) for base in bases))


def names_of_bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def test_functions_of_three_or_more_parameters_document_them_and_their_result() -> None:
    """Commands and routes describe their parameters in annotations, and a Protocol those of all who serve it."""
    modules, lacking = dict(trees()), []
    classes = {
        node.name: node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    protocols = [methods_of(node, classes) for node in classes.values() if "Protocol" in names_of_bases(node)]
    for path, tree in modules.items():
        for node in ast.walk(tree):
            exempt = {"main"}
            if isinstance(node, ast.ClassDef) and "Protocol" not in names_of_bases(node):
                own = methods_of(node, classes)
                exempt = exempt.union(*(protocol for protocol in protocols if protocol <= own))
            for name, function in functions_in(node).items():
                is_command = any("command" in ast.unparse(each) for each in function.decorator_list)
                is_hidden = getattr(node, "name", "").startswith("_") or path.startswith(ROUTES)
                if len(given_to(function)) < 3 or name in exempt or is_command or is_hidden:
                    continue
                text = ast.get_docstring(function) or ""
                if isinstance(node, ast.ClassDef) and name == "__init__":
                    text += ast.get_docstring(node) or ""
                has_result = function.returns is not None and ast.unparse(function.returns) != "None"
                if "Args:" not in text or (has_result and "Returns:" not in text and "Yields:" not in text):
                    lacking.append(f"{path}:{function.lineno} {name}")
    assert not lacking, "\n".join(lacking)

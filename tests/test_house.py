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


def public_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Path with line, and definition, of every public function and method of the product."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
                if isinstance(node, ast.ClassDef) and node.name.startswith("_"):
                    continue
                for each in body:
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
                        yield f"{path.relative_to(ROOT)}:{each.lineno} {each.name}", each


def of_protocols() -> set[str]:
    """Names of the methods that a Protocol documents for all who serve it."""
    names = set()
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
                    names |= {
                        each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    }
    return names


def test_functions_of_three_or_more_parameters_document_them_and_their_result() -> None:
    """Commands and routes describe their parameters in annotations, and a Protocol those of all who serve it."""
    served, lacking = of_protocols(), []
    for where, function in public_functions():
        given = [a.arg for a in (*function.args.args, *function.args.kwonlyargs) if a.arg not in ("self", "cls")]
        is_described = function.name in served | {"main"} or where.startswith(ROUTES)
        is_command = any("command" in ast.unparse(each) for each in function.decorator_list)
        if len(given) < 3 or is_described or is_command:
            continue
        text = ast.get_docstring(function) or ""
        has_result = function.returns is not None and ast.unparse(function.returns) != "None"
        if "Args:" not in text or (has_result and "Returns:" not in text and "Yields:" not in text):
            lacking.append(where)
    assert not lacking, "\n".join(lacking)

"""Find a class or function by `package.module:Name` or `folder/file.py:Name`: a scorer, a tracker, a credit rule, an
objective."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flowcredit.packages import PACKAGES
from protocol.errors import ConfigError, ContractError, FlowcreditError, named_line, suggest
from protocol.ground.files import sha256_of
from protocol.ground.resources import resolve


def find_class(path: str) -> type:
    """Import the class at `path`; a relative file path starts in the working folder.

    Raises:
        ConfigError: the path is malformed, its module, file or class does not exist, or the file cannot be run.
        ImportError: the module needs a library that is not installed.
    """
    return _find(path, "class", lambda value: isinstance(value, type))


def find_function(path: str) -> Callable[..., Any]:
    """Import the function at `path`; the rest is as for `find_class`."""
    return _find(path, "function", lambda value: callable(value) and not isinstance(value, type))


def find_either(path: str) -> Callable[..., Any]:
    """Import the class or function at `path`; the rest is as for `find_class`."""
    return _find(path, "class or function", callable)


def _find(path: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    file = file_of(path)
    source, _, name = path.rpartition(":")
    module = _load(file) if file else _import(source, path, name)
    found = getattr(module, name, None)
    if not fits(found):
        known = [each for each, value in vars(module).items() if fits(value)]
        what = "has no" if found is None else f"has a {type(found).__name__}, not a {kind}, named"
        where = f"file {file}" if file else f"module {source!r}"
        raise ConfigError(f"{where} {what} {name!r}: {suggest(name, known)}")
    return found


def is_path(name: str) -> bool:
    """Tell whether a name is an import path, not the name of something built in."""
    return ":" in name


def require_known(key: str, name: str, known: Iterable[str]) -> str:
    """Return the name if it is built in or an import path.

    Raises:
        ValueError: it is neither.
    """
    if name not in known and not is_path(name):
        raise ValueError(
            f"{key} must be one of {list(known)} or an import path such as ./mine.py:function, got {name!r}:"
            f" {suggest(name, known)}"
        )
    return name


def call_own(key: str, path: str, *given: Any) -> Any:
    """Call the function at an import path, which a user wrote.

    Args:
        key: the config key that names it, for the error message.

    Raises:
        ContractError: it raises; the message names the line in its file.
    """
    try:
        return find_function(path)(*given)
    except FlowcreditError:
        raise
    except Exception as error:
        raise ContractError(f"{key} {path} must not fail, got {named_line(error, foreign_file(path))}") from error


def file_digests(paths: Mapping[str, str]) -> dict[str, str]:
    """Compute the sha256 of the file that each import path names, by the path's key; names and modules are left out."""
    files = {key: file_of(path) for key, path in paths.items()}
    return {key: sha256_of(file) for key, file in files.items() if file and file.is_file()}


def file_of(path: str) -> Path | None:
    """Return the absolute path of the file that `folder/file.py:Name` names; None for another form."""
    source, _, name = path.rpartition(":")
    return resolve(source).absolute() if source.endswith(".py") and name.isidentifier() else None


def foreign_file(path: str) -> str | None:
    """Return the file of a path that is not flowcredit's own, as its frames name it; None before it is imported."""
    file = file_of(path)
    return str(file) if file else foreign_module(path.partition(":")[0])


def foreign_module(name: str) -> str | None:
    """Return the file of a module that is not flowcredit's own; None if it is, or has none, or is not imported."""
    return None if name.partition(".")[0] in PACKAGES else getattr(sys.modules.get(name), "__file__", None)


def whole_path(path: str) -> str:
    """Make a file in `path` absolute, for a process with another working folder; other forms stay."""
    file = file_of(path)
    return f"{file}:{path.rpartition(':')[2]}" if file else path


def _load(file: Path) -> ModuleType:
    name = f"file {file}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ConfigError(f"file {file} does not exist: a relative path starts in the working folder")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError) or not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError(f"file {file} cannot be run: {named_line(error, str(file))}") from error
    return module


def _import(module_name: str, path: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ConfigError(f"an import path must read package.module:Name or folder/file.py:Name, got {path!r}")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        package, *inner = module_name.split(".")
        remedy = "check its spelling, the working folder and PYTHONPATH"
        if package in PACKAGES:
            file = "/".join([package, *inner])
            remedy = f"`{package}` is flowcredit's own package; name your file by its path, ./{file}.py:{name}"
        raise ConfigError(f"module {error.name!r} of {path!r} does not exist: {remedy}") from None

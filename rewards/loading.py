"""Making an object from an import path `package.module:Class`; every way this can fail is a `ScorerError`.

`rewards.scorer` builds scorers with it, `rewards.geneval` its detector.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from protocol.errors import ScorerError

_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def build_from_path(path: str, *, args: Mapping[str, Any], extra: str | None = None) -> Any:
    """Import the class at `path` and construct it with the keyword arguments `args`.

    Args:
        path: `package.module:Class`.
        args: keyword arguments of the constructor.
        extra: the optional dependency group that installs what the class needs, for the error message.

    Raises:
        ScorerError: a path that leads nowhere, a library that is not installed, arguments the class does not take.
    """
    with needing(path, extra):
        return _construct(path, find_class(path, args), args)


@contextmanager
def needing(path: str, extra: str | None) -> Iterator[None]:
    """Inside, a library that is not installed becomes a `ScorerError` that says how to install it."""
    try:
        yield
    except ImportError as error:
        remedy = f"pip install -e '.[{extra}]'" if extra else "install the library it needs"
        raise ScorerError(f"{path} cannot be loaded: {error}; {remedy}") from error


def find_class(path: str, args: Mapping[str, Any]) -> type:
    """The class at `path`, when it takes the keyword arguments `args`.

    Raises:
        ScorerError: a path that leads nowhere, arguments the class does not take.
        ImportError: its module needs a library that is not installed.
    """
    cls = _find_class(path)
    _check_arguments(path, cls, args)
    return cls


def suggest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the closest known one, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def _find_class(path: str) -> type:
    match = _IMPORT_PATH.fullmatch(path)
    if match is None:
        raise ScorerError(f"an import path must read package.module:Class, got {path!r}")
    module_name, class_name = match.groups()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ScorerError(
            f"module {error.name!r} of {path!r} does not exist: check its spelling and PYTHONPATH"
        ) from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        what = "has no" if found is None else f"has a {type(found).__name__}, not a class, named"
        raise ScorerError(f"module {module_name!r} {what} {class_name!r}: {suggest(class_name, classes)}")
    return found


def _check_arguments(path: str, cls: type, args: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = [p.name for p in named]
    for name in args:
        if name not in known and not takes_any:
            raise ScorerError(f"{path} takes no argument {name!r}: {suggest(name, known)}")
    lacking = [p.name for p in named if p.default is p.empty and p.name not in args]
    if lacking:
        raise ScorerError(f"{path} must be given its arguments, got none for {', '.join(lacking)}")


def _construct(path: str, cls: type, args: Mapping[str, Any]) -> Any:
    try:
        return cls(**args)
    except (TypeError, ValueError) as error:
        raise ScorerError(f"{path} does not accept the arguments {dict(args)}: {error}") from error

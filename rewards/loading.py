"""Make an object from the import path `package.module:Class` and arguments; a mistake is an `InputError`.

`extra` names the optional dependency group that installs what a class needs, for the error message.
`rewards.scorer` makes scorers with it, `rewards.geneval` its detector, `rewards.ocr` its engine.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from protocol.errors import FlowcreditError, ScorerError, line_in, named_line, suggest
from protocol.ground.import_path import find_class, foreign_file

Finder = Callable[[str], type]
"""Finds the class at an import path."""


def build_from_path(path: str, *, args: Mapping[str, Any], extra: str | None = None, find: Finder = find_class) -> Any:
    """Import the class at `path` and construct it.

    Raises:
        ConfigError: no such module or class.
        ScorerError: a library is not installed, or the constructor raises.
    """
    cls = load_class(path, args=args, extra=extra, find=find)
    with foreign_errors(f"{path} cannot be built with the arguments {dict(args)}", path, extra):
        try:
            return cls(**args)
        except (TypeError, ValueError) as error:
            where = line_in(error, foreign_file(path))
            raise ScorerError(f"{path} does not accept the arguments {dict(args)}: {error}{where}") from error


def load_class(path: str, *, args: Mapping[str, Any], extra: str | None = None, find: Finder = find_class) -> type:
    """Import the class at `path` and check that its constructor takes the keyword arguments `args`."""
    with foreign_errors(f"{path} cannot be imported", path, extra):
        cls = find(path)
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
    return cls


def require_class_ready(
    path: str, args: Mapping[str, Any], extra: str | None = None, *, find: Finder = find_class
) -> None:
    """Call the static method `ready(**args)` of a class, if it has one: it checks libraries, weights and servers.

    Args:
        args: keyword arguments of the constructor, which is not called.

    Raises:
        ScorerError: a library, weights or a server are missing; or see `load_class`.
    """
    ready = getattr(load_class(path, args=args, extra=extra, find=find), "ready", None)
    if ready is not None:
        with foreign_errors(f"{path} is not ready", path, extra):
            ready(**args)


def require_library(name: str) -> None:
    """Raise ModuleNotFoundError if a library is not installed, without importing it."""
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}")


@contextmanager
def foreign_errors(failure: str, path: str, extra: str | None = None) -> Iterator[None]:
    """Turn all that foreign code raises in the block, and its exit, into one line.

    Raises:
        ScorerError: the code raised, exited, or needs a library that is not installed.
    """
    try:
        yield
    except FlowcreditError:
        raise
    except ImportError as error:
        remedy = f"pip install -e '.[{extra}]'" if extra else "install the library it needs"
        raise ScorerError(f"{path} cannot be loaded: {error}; {remedy}") from error
    except (Exception, SystemExit) as error:
        raise ScorerError(f"{failure}: {named_line(error, foreign_file(path))}") from error

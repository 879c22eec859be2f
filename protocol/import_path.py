"""Finding a class by its import path `package.module:Class`, as a config names scorers, detectors and trackers."""

import importlib

from protocol.errors import ConfigError
from protocol.spelling import suggest


def find_class(path: str) -> type:
    """Import the class at `path`.

    Raises:
        ConfigError: the path is malformed, or its module or class does not exist.
        ImportError: the module needs a library that is not installed.
    """
    module_name, _, class_name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise ConfigError(f"an import path must read package.module:Class, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"module {error.name!r} of {path!r} does not exist: check its spelling and PYTHONPATH"
        ) from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        what = "has no" if found is None else f"has a {type(found).__name__}, not a class, named"
        raise ConfigError(f"module {module_name!r} {what} {class_name!r}: {suggest(class_name, classes)}")
    return found

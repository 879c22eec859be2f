"""Resolve a path of a config: an ordinary path, or `pkg://package/inner/path` inside an installed package."""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from protocol.errors import ConfigError, reason_of

SCHEME = "pkg://"


def resolve(path: str) -> Path:
    """Return the file or folder that a path of a config names; it need not exist.

    Raises:
        ConfigError: the package of a `pkg://` path is not installed, no user has this home folder, or the system
            cannot look there (a folder on the way is private, the path is too long or holds a zero byte).
    """
    if not path.startswith(SCHEME):
        try:
            found = Path(path).expanduser()
            with suppress(FileNotFoundError, NotADirectoryError):
                found.stat()
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{path[:200]!r} cannot be resolved: {reason_of(error)}") from None
        return found
    package, _, inner = path.removeprefix(SCHEME).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{path} names the package {package!r}, which is not installed")
    return Path(spec.submodule_search_locations[0]) / inner

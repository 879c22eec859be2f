"""Resolve a path of a config: an ordinary path, or `pkg://package/inner/path` inside an installed package."""

from importlib.util import find_spec
from pathlib import Path

from protocol.errors import ConfigError

SCHEME = "pkg://"


def resolve(path: str) -> Path:
    """Return the file or folder that a path of a config names; it need not exist.

    Raises:
        ConfigError: the package of a `pkg://` path is not installed, or no user has this home folder.
    """
    if not path.startswith(SCHEME):
        try:
            return Path(path).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{path} cannot be resolved: {error}") from None
    package, _, inner = path.removeprefix(SCHEME).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{path} names the package {package!r}, which is not installed")
    return Path(spec.submodule_search_locations[0]) / inner

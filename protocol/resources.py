"""Where a path in a config points to: an ordinary path, or `pkg://package/inner/path` inside an installed package."""

from importlib.util import find_spec
from pathlib import Path

from protocol.errors import ConfigError

SCHEME = "pkg://"


def resolve(path: str) -> Path:
    """The file or folder that a config's path names; it need not exist.

    Raises:
        ConfigError: the package of a `pkg://` path is not installed, or there is no such user's home folder.
    """
    if not path.startswith(SCHEME):
        try:
            return Path(path).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{path} leads nowhere: {error}") from None
    package, _, inner = path.removeprefix(SCHEME).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{path} names the package {package!r}, which is not installed")
    return Path(spec.submodule_search_locations[0]) / inner

"""Whether a run folder belongs to a config: equal in every key that may change a result."""

from pathlib import Path

import yaml

from protocol.config.load import parse_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError, one_line

CONFIG = "config.yaml"


def require_same(path: Path, config: RunConfig, *, section: str = "", remedy: str) -> None:
    """Compare a run folder's config with this one in every key that starts with `section` and may change a result.

    Raises:
        RunFolderError: no readable config there, or some keys differ (they are listed).
    """
    try:
        text = (path / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"run folder {path} holds no readable {CONFIG}: {error}; {remedy}") from None
    require_equal(path, text, config, section=section, remedy=remedy)


def require_equal(where: object, text: str, config: RunConfig, *, section: str = "", remedy: str) -> None:
    """The same for the text of a `config.yaml` that was found at `where`."""
    try:
        held = parse_config(yaml.safe_load(text)).outcome_fields()
    except (yaml.YAMLError, ConfigError) as error:
        reason = one_line(error)
        raise RunFolderError(f"run folder {where} holds no readable {CONFIG}: {reason}; {remedy}") from None
    wanted = config.outcome_fields()
    differing = [
        f"{key} (there {held.get(key)!r}, now {wanted.get(key)!r})"
        for key in sorted(held.keys() | wanted.keys())
        if key.startswith(section) and held.get(key) != wanted.get(key)
    ]
    if differing:
        raise RunFolderError(f"run folder {where} belongs to another config: {', '.join(differing)}; {remedy}")

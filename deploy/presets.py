"""Finding a preset: a name such as `toy_geneval`, or the path of a YAML file."""

from pathlib import Path

from protocol.errors import ConfigError
from protocol.spelling import suggest

FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the presets that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_preset(name: str) -> Path:
    """The YAML file of a preset.

    Raises:
        ConfigError: no such preset and no such file.
    """
    if name in preset_names():
        return FOLDER / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    raise ConfigError(f"unknown preset {name!r}: {suggest(name, preset_names())}; or give the path of a .yaml file")

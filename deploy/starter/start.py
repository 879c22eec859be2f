"""Writes the files of this folder into one of the user's, with its name in them."""

import json
import os
from pathlib import Path
from string import Template

from protocol.errors import InputError
from protocol.files import write_whole

HERE = Path(__file__).parent
FILES = {"run.yaml": "run.yaml", "scorer.txt": "scorer.py", "train.txt": "train.txt", "heldout.txt": "heldout.txt"}
"""Each file here, and its name there."""


def write_starter(folder: Path) -> list[Path]:
    """Write the starting files of a run.

    Args:
        folder: is made; other files in it stay.

    Returns:
        The paths written.

    Raises:
        InputError: one of the files exists, or the folder cannot be written to; nothing is written then.
    """
    shown = folder.as_posix()
    if not all(each.isalnum() or each in "/._-" for each in shown):
        raise InputError(
            f"a folder must have a name of letters, digits, /, ., _ and -, got {json.dumps(shown)}: rename it"
        )
    paths = [folder / name for name in FILES.values()]
    if held := [str(path) for path in paths if os.path.lexists(path)]:
        raise InputError(f"nothing may be overwritten, got {', '.join(held)}: take another folder")
    scorer = f"{shown}/scorer.py" if folder.is_absolute() else f"./{shown}/scorer.py"
    words = {"folder": shown, "name": folder.resolve().name, "scorer": scorer}
    done: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, path in zip(FILES, paths, strict=True):
            text = (HERE / source).read_text(encoding="utf-8")
            write_whole(path, Template(text).substitute(words) if path.suffix == ".yaml" else text)
            done.append(path)
    except OSError as error:
        for path in done:
            path.unlink(missing_ok=True)
        raise InputError(f"{folder} cannot be written: {error.strerror}; fix that or take another folder") from None
    return paths

"""Writes the starting files of a run into a folder of the user, with that folder's name in them."""

import json
import os
from contextlib import suppress
from pathlib import Path
from string import Template

from protocol.errors import InputError, reason_of
from protocol.ground.files import write_whole

HERE = Path(__file__).parent
FILES = {"run.yaml": "run.yaml", "scorer.txt": "scorer.py", "train.txt": "train.txt", "heldout.txt": "heldout.txt"}
"""Each file of this package, and its name in the user's folder."""
RULE = {"credit.txt": "credit.py"}
"""The same for a credit rule."""
METHODS_CREDIT = """\
# The method that learns fastest in the toy world; `flowcredit methods` lists the others.
method: stepwise_tree
"""
OWN_CREDIT = """\
# Flow-GRPO-Fast, but each denoising step earns what your credit rule says.
method: flow_grpo_fast
credit: {rule: "here://credit.py:late"}
"""
"""The lines of `run.yaml` about credit."""


def write_starter(folder: Path, *, has_credit: bool = False) -> list[Path]:
    """Write the starting files of a run.

    Args:
        folder: folder to make; if it exists, its other files stay.
        has_credit: whether a credit rule is among them.

    Raises:
        InputError: one of the files exists, or the folder cannot be written to; nothing is written then.
    """
    shown = folder.as_posix()
    if not all(each.isalnum() or each in "/._-" for each in shown):
        raise InputError(
            f"a folder's name must consist of letters, digits, /, ., _ and -, got {json.dumps(shown)}: rename it"
        )
    files = FILES | (RULE if has_credit else {})
    paths = [folder / name for name in files.values()]
    if held := [str(path) for path in paths if os.path.lexists(path)]:
        raise InputError(f"files must not exist yet, got {', '.join(held)}: choose another folder")
    words = {"folder": shown, "name": folder.resolve().name, "credit": OWN_CREDIT if has_credit else METHODS_CREDIT}
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    done: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, path in zip(files, paths, strict=True):
            text = (HERE / source).read_text(encoding="utf-8")
            write_whole(path, Template(text).substitute(words) if path.suffix == ".yaml" else text)
            done.append(path)
    except OSError as error:
        for path in done:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            for each in missing:
                each.rmdir()
        raise InputError(f"{folder} cannot be written: {reason_of(error)}; fix that or choose another folder") from None
    return paths

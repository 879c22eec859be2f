"""The images that a prompt file names by address: fetched beside a copy of the file that names them by path."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from deploy.tools.prompts.fetched import Source, fetch
from protocol.errors import PromptError, one_line
from protocol.ground.condition_images import condition_of
from protocol.ground.files import write_whole, writing
from protocol.prompts import IMAGES

AT_ONCE = 8
"""Images that are fetched at the same time."""
MOST_BYTES = 2**26
"""Of one image."""


def fetch_images(prompts: Path, out: Path) -> int:
    """Write a copy of a prompt file whose images are files in the folder `NAME_images` beside it.

    What is there already is not fetched again.

    Args:
        prompts: a file of JSON lines.
        out: the copy, `NAME.jsonl`.

    Returns:
        How many lines the copy has.

    Raises:
        PromptError: the file cannot be read, or an address does not answer or sends no image; its line is named.
        RunFolderError: the copy cannot be written.
    """
    try:
        lines = prompts.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt file {prompts} cannot be read: {one_line(error)}") from None
    folder = out.parent / f"{out.stem}_images"

    def local(number: int, text: str) -> str:
        try:
            line = json.loads(text)
            return json.dumps({**line, **_found(line, prompts.parent, folder)}, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise PromptError(f"{prompts}:{number}: a line must be a JSON object: {one_line(error)}") from None
        except PromptError as error:
            raise PromptError(f"{prompts}:{number}: {error}") from None

    numbered = [(number, text) for number, text in enumerate(lines, 1) if text.strip()]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        copied = list(threads.map(lambda each: local(*each), numbered))
    with writing(out, "--out"):
        write_whole(out, "".join(f"{line}\n" for line in copied))
    return len(copied)


def _found(line: Mapping[str, Any], near: Path, folder: Path) -> dict[str, Any]:
    """Return a line's images as paths from the copy's folder; `near` is the folder of the line's file."""

    def path_of(name: Any) -> str:
        if "://" not in str(name):
            return os.path.relpath((near / str(name)).absolute(), folder.parent.absolute())
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        source = Source(name, name=f"{digest}{PurePosixPath(urlsplit(name).path).suffix}", most_bytes=MOST_BYTES)
        path, _ = fetch(source, folder)
        condition_of(path)
        return f"{folder.name}/{path.name}"

    given = {key: line[key] for key in IMAGES if line.get(key) is not None}
    return {
        key: [path_of(each) for each in held] if isinstance(held, list) else path_of(held)
        for key, held in given.items()
    }

"""Read prompt files: JSON lines or plain text, whichever the file holds.

| content                                  | meaning of a line                                                   |
|------------------------------------------|---------------------------------------------------------------------|
| a JSON object with `prompt` on each line | its text, `negative_prompt`, metadata in other keys (as in GenEval) |
| anything else                            | a prompt; words that the image must show are in double quotes       |

A JSON line may name the images that it edits: one path under `image` or a list under `images`, each from the prompt
file's folder. `wanted_image` may name one to show beside its own.

The first line that is not blank decides the format; a file whose name ends in `.jsonl` is always JSON. A line in the
other format is an error that names the line's number, and so is a table or one JSON document over the whole file.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from protocol.config.run import DataConfig
from protocol.errors import PromptError
from protocol.ground.condition_images import condition_of
from protocol.ground.resources import resolve
from protocol.messages import ConditionImage, Prompt

IMAGES = "image", "images"
"""Keys of a line that name condition images."""
WANTED = "wanted_image"
"""Key of a line that names an image to show beside its own."""


def read_prompts(data: DataConfig, path: str) -> list[Prompt]:
    """Read the prompts of one file; with configured tags, keep the prompts that have one of them.

    The `index` of a prompt is the index of its line in the file, from 0.

    Raises:
        PromptError: the file does not exist, a line is broken (named by its number), or no prompt is left.
    """
    lines = _read(resolve(path), data.negative)
    prompts = [prompt for prompt in lines if not data.tags or prompt.metadata.get("tag") in data.tags]
    if not prompts:
        wanted, remedy = "", ""
        if data.tags:
            wanted, remedy = f" with a tag in {sorted(data.tags)}", "; data.tags=[] takes every prompt"
        raise PromptError(f"prompt file {path} must hold at least one prompt{wanted}, got none{remedy}")
    return prompts


def check_each(prompts: Iterable[Prompt], check: Callable[[Prompt], object]) -> None:
    """Run `check` on every prompt; the PromptError of the first that fails names its line."""
    for prompt in prompts:
        try:
            check(prompt)
        except PromptError as error:
            raise PromptError(f"prompt line {prompt.index + 1} ({shown(prompt.text)}): {error}") from None


def shown(text: str) -> str:
    """Quote a prompt for a message; of a long one its beginning."""
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def as_table(prompts: Sequence[Prompt]) -> str | None:
    """Say that prompts look like rows of a table, whose cells a tab or `|` separates; None if they do not."""
    for name, mark in (("tab", "\t"), ("|", "|")):
        counts = {prompt.text.count(mark) for prompt in prompts}
        if len(prompts) > 1 and len(counts) == 1 and counts != {0}:
            return f"every line holds a {name}, such as {shown(prompts[0].text)}"
    return None


def require_unicode(text: str, what: str) -> None:
    """Check that a text holds no half of a surrogate pair, as an argument in another encoding than the locale's does.

    Raises:
        PromptError: it does; `what` names the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{what} must be Unicode text, got half a surrogate pair in {text[:60]!r}") from None


def content_of(prompt: Prompt) -> tuple[str, ...]:
    """Return what tells two prompts apart: the text and the sha256 of each condition image."""
    return prompt.text, *(each.sha256 for each in prompt.conditions)


def overlap(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> str | None:
    """Say how many held-out prompts are trained on too; their scores measure memory. None if there are none."""
    trained = set(map(content_of, train))
    both = [prompt.text for prompt in heldout if content_of(prompt) in trained]
    return (
        f"{len(both)} of {len(heldout)} held-out prompts are trained on too, such as {shown(both[0])}" if both else None
    )


def _read(path: Path, negative: str) -> list[Prompt]:
    try:
        if path.exists() and not path.is_file():
            raise PromptError(f"prompt file {path} must be a regular file, since a run reads it more than once")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise PromptError(
            f"prompt file {path} does not exist: name another one in data.train, data.heldout or --prompts"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt file {path} cannot be read: {error}") from None
    _require_lines(path, lines)
    numbered = [(index, line.strip()) for index, line in enumerate(lines) if line.strip()]
    is_json = path.suffix == ".jsonl" or any(_is_object(line) for _, line in numbered[:1])
    read_line = _json_line if is_json else _text_line

    def read(numbered: tuple[int, str]) -> Prompt:
        index, line = numbered
        return read_line(line, index, path, negative)

    if not any('"image' in line for _, line in numbered):
        return [read(each) for each in numbered]
    with ThreadPoolExecutor() as threads:  # decoding images takes most of the time
        return list(threads.map(read, numbered))


def _require_lines(path: Path, lines: list[str]) -> None:
    """Refuse a table, and a JSON document over several lines: their lines would pass as prompts.

    Raises:
        PromptError: the file is one of these.
    """
    rule = f"prompt file {path} must hold one prompt on each line, as text or as a JSON object with `prompt`"
    first = next((line.strip() for line in lines if line.strip()), "")
    cells = [cell.strip().strip('"').lower() for cell in re.split("[,;\t]", first)]
    if path.suffix.lower() in (".csv", ".tsv") or (len(cells) > 1 and "prompt" in cells):
        raise PromptError(f"{rule}, got a table that begins with {first[:60]!r}: keep its column of prompts")
    if path.suffix == ".jsonl" or not first.startswith(("[", "{")):
        return
    try:
        found = json.loads("\n".join(lines))
    except (ValueError, RecursionError):
        return
    if isinstance(found, list) or not _is_object(first):
        raise PromptError(
            f"{rule}, got one JSON {'array' if isinstance(found, list) else 'object'} over the whole file"
        )


def _is_object(line: str) -> bool:
    """Tell whether a line is a complete JSON object; a line that only starts with a brace is text."""
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _text_line(line: str, index: int, path: Path, negative: str) -> Prompt:
    where = f"{path}:{index + 1}"
    if _is_object(line):
        raise PromptError(f"{where}: a line of a text file must be a prompt, got the JSON object {line[:60]!r}")
    if "\0" in line:
        raise PromptError(f"{where}: a prompt must be text, got a zero byte in {line[:60]!r}")
    return Prompt(index=index, text=line, negative=negative)


def _json_line(line: str, index: int, path: Path, negative: str) -> Prompt:
    where = f"{path}:{index + 1}"
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: a line must be one JSON object, got {line[:60]!r} ({error})") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"].strip():
        raise PromptError(f"{where}: a line must be a JSON object with a text under `prompt`, got {line[:60]!r}")
    negative = fields.get("negative_prompt", negative)
    negative = "" if negative is None else negative
    if not isinstance(negative, str):
        raise PromptError(f"{where}: `negative_prompt` must be a text, got {negative!r}")
    require_unicode(json.dumps(fields, ensure_ascii=False), f"{where}: a line")
    metadata = {
        key: value for key, value in fields.items() if key not in ("prompt", "negative_prompt", *IMAGES, WANTED)
    }
    try:
        conditions = tuple(_condition(path, name) for name in _images(fields))
        wanted = _wanted(path, fields.get(WANTED))
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None
    return Prompt(
        index=index,
        text=fields["prompt"],
        negative=negative,
        metadata=metadata,
        conditions=conditions,
        wanted=wanted,
    )


def _images(fields: Mapping[str, Any]) -> Sequence[str]:
    given = [fields[key] for key in IMAGES if fields.get(key) is not None]
    names = given[0] if given and isinstance(given[0], list) else given
    if len(given) > 1 or [] in given or not all(isinstance(name, str) and name for name in names):
        raise PromptError(f"`image` must be a path, or `images` a list of paths, got {given}")
    return names


def _wanted(prompts: Path, name: Any) -> ConditionImage | None:
    if name is not None and not (isinstance(name, str) and name):
        raise PromptError(f"`{WANTED}` must be a path, got {name!r}")
    return _condition(prompts, name) if name else None


def _condition(prompts: Path, name: str) -> ConditionImage:
    """Check an image that a line names; it is checked once in a process, which may read its prompt file often."""
    if "://" in name:
        raise PromptError(
            f"an image must be a file, got {name}: fetch it by `flowcredit prompts {prompts} --out FILE.jsonl`"
        )
    path = (prompts.parent / name).absolute()
    try:
        found = path.stat()
    except (OSError, ValueError):
        return condition_of(path)
    return _checked(path, found.st_size, found.st_mtime_ns)


@cache
def _checked(path: Path, size: int, changed_ns: int) -> ConditionImage:  # noqa: ARG001  an image that changes is read again
    return condition_of(path)

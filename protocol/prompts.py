"""Prompt files, told apart by content.

| what the file holds                    | a line is read as                                                           |
|----------------------------------------|-----------------------------------------------------------------------------|
| JSON objects with `prompt`, one a line | its text, `negative_prompt`, and all other keys as metadata (as in GenEval) |
| anything else                          | a prompt as it stands; words to be drawn are in double quotes               |

The first line that is not blank decides, and a name that ends in `.jsonl` promises JSON. A file that goes on in the
other form is refused with the number of the line where it does.
"""

import json
from pathlib import Path
from typing import Any

from protocol.config.run import DataConfig
from protocol.errors import PromptError
from protocol.messages import Prompt
from protocol.resources import resolve


def read_prompts(data: DataConfig, path: str) -> list[Prompt]:
    """The prompts of one file whose tag the config keeps; `index` is the line's place in the file.

    Raises:
        PromptError: no such file, a broken line (named by its number), or no prompt left.
    """
    prompts = [prompt for prompt in _read(resolve(path)) if not data.tags or prompt.metadata.get("tag") in data.tags]
    if not prompts:
        wanted = f" with a tag in {sorted(data.tags)}" if data.tags else ""
        raise PromptError(f"prompt file {path} must hold at least one prompt{wanted}, got none")
    return prompts


def _read(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise PromptError(f"prompt file {path} does not exist: set data.train and data.heldout") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt file {path} cannot be read: {error}") from None
    numbered = [(index, line.strip()) for index, line in enumerate(lines) if line.strip()]
    is_json = path.suffix == ".jsonl" or any(_is_object(line) for _, line in numbered[:1])
    read_line = _json_line if is_json else _text_line
    return [read_line(line, index, f"{path}:{index + 1}") for index, line in numbered]


def _is_object(line: str) -> bool:
    """Whether a line is a JSON object; one that only begins like one is text."""
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _text_line(line: str, index: int, place: str) -> Prompt:
    if _is_object(line):
        raise PromptError(f"{place}: a line of a text file must be a prompt, got the JSON object {line[:60]!r}")
    if "\0" in line:
        raise PromptError(f"{place}: a prompt must be text, got a zero byte in {line[:60]!r}")
    return Prompt(index=index, text=line)


def _json_line(line: str, index: int, place: str) -> Prompt:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{place}: a line must be one JSON object, got {line[:60]!r} ({error})") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"].strip():
        raise PromptError(f"{place}: a line must be a JSON object with a text under `prompt`, got {line[:60]!r}")
    negative = fields.get("negative_prompt", "")
    if not isinstance(negative, str):
        raise PromptError(f"{place}: `negative_prompt` must be a text, got {negative!r}")
    try:
        (fields["prompt"] + negative).encode()
    except UnicodeEncodeError:
        raise PromptError(
            f"{place}: a prompt must be Unicode text, got half a surrogate pair in {line[:60]!r}"
        ) from None
    metadata = {key: value for key, value in fields.items() if key not in ("prompt", "negative_prompt")}
    return Prompt(index=index, text=fields["prompt"], negative=negative, metadata=metadata)

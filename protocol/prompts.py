"""Prompt files: `.jsonl` with a `prompt` key a line (GenEval's metadata form), or `.txt` with a prompt a line."""

import json
from pathlib import Path
from typing import Any

from protocol.config import DataConfig
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
    read_line = _json_line if path.suffix == ".jsonl" else _text_line
    return [read_line(line.strip(), index, f"{path}:{index + 1}") for index, line in enumerate(lines) if line.strip()]


def _text_line(line: str, index: int, _place: str) -> Prompt:
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

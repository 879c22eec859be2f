"""Read prompt files: JSON lines or plain text, whichever the file holds.

| content                                  | meaning of a line                                                   |
|------------------------------------------|---------------------------------------------------------------------|
| a JSON object with `prompt` on each line | its text, `negative_prompt`, metadata in other keys (as in GenEval) |
| anything else                            | a prompt; words that the image must show are in double quotes       |

The first line that is not blank decides the format; a file whose name ends in `.jsonl` is always JSON. A line in the
other format is an error that names the line's number, and so is a table or one JSON document over the whole file.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from protocol.config.run import DataConfig
from protocol.errors import PromptError
from protocol.messages import Prompt
from protocol.resources import resolve


def read_prompts(data: DataConfig, path: str) -> list[Prompt]:
    """Read the prompts of one file and keep those with one of the configured tags.

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
            raise PromptError(f"prompt line {prompt.index + 1} ({prompt.text!r}): {error}") from None


def require_unicode(text: str, what: str) -> None:
    """Check that a text holds no half of a surrogate pair, as an argument in another encoding than the locale's does.

    Raises:
        PromptError: it does; `what` names the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{what} must be Unicode text, got half a surrogate pair in {text[:60]!r}") from None


def overlap(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> str | None:
    """Say how many held-out prompts are trained on too; their scores measure memory. None if there are none."""
    trained = {prompt.text for prompt in train}
    both = [prompt.text for prompt in heldout if prompt.text in trained]
    return f"{len(both)} of {len(heldout)} held-out prompts are trained on too, such as {both[0]!r}" if both else None


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
    return [read_line(line, index, f"{path}:{index + 1}", negative) for index, line in numbered]


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


def _text_line(line: str, index: int, where: str, negative: str) -> Prompt:
    if _is_object(line):
        raise PromptError(f"{where}: a line of a text file must be a prompt, got the JSON object {line[:60]!r}")
    if "\0" in line:
        raise PromptError(f"{where}: a prompt must be text, got a zero byte in {line[:60]!r}")
    return Prompt(index=index, text=line, negative=negative)


def _json_line(line: str, index: int, where: str, negative: str) -> Prompt:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: a line must be one JSON object, got {line[:60]!r} ({error})") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"].strip():
        raise PromptError(f"{where}: a line must be a JSON object with a text under `prompt`, got {line[:60]!r}")
    negative = fields.get("negative_prompt", negative)
    if not isinstance(negative, str):
        raise PromptError(f"{where}: `negative_prompt` must be a text, got {negative!r}")
    require_unicode(json.dumps(fields, ensure_ascii=False), f"{where}: a line")
    metadata = {key: value for key, value in fields.items() if key not in ("prompt", "negative_prompt")}
    return Prompt(index=index, text=fields["prompt"], negative=negative, metadata=metadata)

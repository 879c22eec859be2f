"""Files at public addresses: fetched once into a cache, and compared with the hash of their content.

An interrupted download goes on where it ended.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import PromptError, one_line
from protocol.ground.files import sha256_of, write_whole, writing

TIMEOUT_S = 30.0
"""Seconds to connect, and seconds without a byte, after which a download ends with an error."""
MOST_BYTES = 2**28
"""A longer file is none of the sets."""


@dataclass(frozen=True)
class Source:
    """One file of a set, at a fixed commit where it has a hash; otherwise the first fetch records what it is."""

    url: str
    sha256: str | None = None
    """sha256 of the content, where this project could read the file."""
    blob: str | None = None
    """Otherwise git's id of the content, which the commit's tree names."""
    read: Callable[[str], list[str]] | None = None
    """Turns the content into lines of a prompt file; None if it is one already."""
    suffix: str = ".txt"
    """Of the prompt file that `read` makes."""
    name: str = ""
    """Of the file in the cache; by default the last part of the address."""
    most_bytes: int = MOST_BYTES


def fetch(source: Source, folder: Path) -> tuple[Path, str]:
    """Return a file in the cache, fetched if it is not there, and what is known of its content.

    Raises:
        PromptError: the address does not answer or sends something else.
        RunFolderError: the cache cannot be written.
    """
    raw = folder / (source.name or Path(source.url).name)
    with writing(raw, "--cache"):
        raw.parent.mkdir(parents=True, exist_ok=True)
        is_new = not raw.exists()
        if is_new:
            _download(source.url, raw, source.most_bytes)
    return raw, _checked(source, raw, is_new=is_new)


def _checked(source: Source, raw: Path, *, is_new: bool) -> str:
    """Compare the content with the published hash, or with the hash of the first fetch, and remove a wrong file."""
    sha256, record = sha256_of(raw), raw.with_name(f"{raw.name}.sha256")
    if source.sha256:
        wanted, got, kind = source.sha256, sha256, "sha256"
    elif not source.blob:
        wanted, got, kind = _recorded(record) or sha256, sha256, "sha256 of the first fetch"
    else:
        content = raw.read_bytes()
        wanted, kind = source.blob, "git id"
        got = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if got != wanted:
        raw.unlink()
        raise PromptError(f"{source.url} must have the {kind} {wanted}, got {got}: the file is removed; fetch it again")
    if source.sha256:
        return f"sha256 {sha256[:16]}… as pinned"
    if is_new:
        write_whole(record, json.dumps({"url": source.url, "sha256": sha256}) + "\n")
    commit = "git id as in the commit; " if source.blob else ""
    return f"{commit}sha256 {sha256[:16]}… recorded at the first fetch in {record.name}"


def _recorded(record: Path) -> str | None:
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _download(url: str, path: Path, most_bytes: int) -> None:
    """Fetch a file whole; what an earlier try left continues."""
    import httpx2

    partial = path.with_name(f"{path.name}.partial")
    held = partial.stat().st_size if partial.exists() else 0
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={held}-"} if held else {})
    try:
        with httpx2.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as reply:
            if reply.status_code == 416:  # nothing is left, or another file is there now; the hash tells
                os.replace(partial, path)
                return
            reply.raise_for_status()
            with partial.open("ab" if reply.status_code == 206 else "wb") as file:
                for chunk in reply.iter_bytes():
                    file.write(chunk)
                    if file.tell() > most_bytes:
                        raise PromptError(
                            f"{url} must have at most {most_bytes} bytes, got more: this is no prompt set"
                        )
    except httpx2.HTTPError as error:
        raise PromptError(
            f"{url} cannot be fetched: {one_line(error) or type(error).__name__}; run the command again to go on, or"
            f" put the file at {path}"
        ) from None
    os.replace(partial, path)

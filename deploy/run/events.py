"""A run's events and conditions: lines of `events.jsonl` and `run.log`, and on the terminal what calls for a person."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from deploy.folder.files import append_whole
from deploy.folder.names import EVENTS
from protocol.sink import StatusSink

log = logging.getLogger(__name__)


class Relay:
    """A `StatusSink` that hands on to others. Who joins later is told which conditions were stated before."""

    def __init__(self, *sinks: StatusSink) -> None:
        self._sinks = list(sinks)
        self._said: dict[str, tuple[bool | None, str, str]] = {}

    def join(self, sink: StatusSink) -> None:
        """Hand on to this one too."""
        for type, (holds, reason, message) in self._said.items():  # noqa: A001
            sink.condition(type, holds, reason, message)
        self._sinks.append(sink)

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """To all."""
        self._said[type] = (holds, reason, message)
        for sink in self._sinks:
            sink.condition(type, holds, reason, message)

    def event(self, message: str, kind: str = "info") -> None:
        """To all."""
        for sink in self._sinks:
            sink.event(message, kind)


class Events:
    """A `StatusSink`. Never fails: what a full disk does not take stands in the log and on the terminal."""

    def __init__(
        self, folder: Path, say: Callable[[str], None], *, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self._path = folder / EVENTS
        self._say = say
        self._may_write = may_write
        self._held: dict[str, tuple[bool | None, str]] = {}

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """One line when a condition's status or reason changes; what is well from the start is not worth one."""
        before = self._held.get(type)
        self._held[type] = (holds, reason)
        if (holds, reason) == before or (before is None and holds):
            return
        log.log(logging.INFO if holds else logging.WARNING, "%s is %s (%s): %s", type, holds, reason, message)
        self._say(message if holds is False else f"{type}: {message}")
        self._write({"type": type, "holds": holds, "reason": reason, "message": message})

    def event(self, message: str, kind: str = "info") -> None:
        """Something happened."""
        log.warning("%s", message) if kind != "info" else log.info("%s", message)
        self._write({"type": kind, "message": message})

    def _write(self, line: dict[str, object]) -> None:
        if not self._may_write():
            return
        try:
            append_whole(self._path, json.dumps({"time": round(time.time(), 3), **line}) + "\n")
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error)

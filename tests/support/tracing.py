"""Which of the product's files are at work: a call trace of this process and of Ray actors."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from flowcredit.packages import PACKAGES
from tests.support.paths import ROOT


class Trace:
    """The product's files in which a function was called since `start`, in its thread and in those that began later."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def start(self) -> None:
        self.found.clear()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> set[str]:
        sys.setprofile(None)
        threading.setprofile(None)
        return self.found

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            if name.startswith(PACKAGES):
                self.found.add(name)


class TracedClass:
    """A Ray actor class whose actors can be traced: `options(...).remote(...)` makes one."""

    def __init__(self, actor_class: Any) -> None:
        self._class = actor_class
        self._actors: list[Any] = []

    def options(self, **options: Any) -> "TracedClass":
        self._options = options
        return self

    def remote(self, *arguments: Any) -> Any:
        self._actors.append(self._class.options(**self._options).remote(*arguments))
        return self._actors[-1]

    def start(self) -> None:
        """Trace the actors from their next call on."""
        ray.get([actor.__ray_call__.remote(_start) for actor in self._actors])

    def end(self) -> set[str]:
        """End the trace; return what all of them called."""
        return set().union(*ray.get([actor.__ray_call__.remote(_end) for actor in self._actors]))


def _start(actor: Any) -> None:
    actor.trace = Trace()
    actor.trace.start()


def _end(actor: Any) -> set[str]:
    return actor.trace.end()

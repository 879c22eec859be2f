"""Which of the product's files are at work: a call trace of this process."""

import sys
import threading
from pathlib import Path
from types import FrameType

from tests.support.paths import ROOT

PRODUCT = ("protocol", "flow", "toyworld", "rewards", "learner", "actors", "deploy")


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
            if name.startswith(PRODUCT):
                self.found.add(name)

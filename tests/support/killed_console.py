"""A kill of a pretraining recipe."""

from typing import Any

from rich.console import Console


class KilledConsole(Console):
    """A console that stops the program when a given line is printed, as a kill between two checkpoints would."""

    def __init__(self, at: str) -> None:
        super().__init__(quiet=True)
        self._at = at

    def print(self, *objects: Any, **settings: Any) -> None:
        """Stop if the line begins with `at`."""
        if str(objects[0]).startswith(self._at):
            raise KeyboardInterrupt

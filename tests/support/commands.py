"""`flowcredit …` in the test's own process."""

import sys

import pytest

from deploy.cli.app import main


class Cli:
    """Commands, and what they say; made by the fixture `cli`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def done(self, *words: str) -> str:
        """Run a command that ends well; what it says on stdout."""
        return self.ended(*words, code=0)[0]

    def refused(self, *words: str) -> str:
        """Run a command that ends with exit code 2 and one line; that line."""
        (line,) = self.ended(*words, code=2)[1].splitlines()
        return line

    def ended(self, *words: str, code: int) -> tuple[str, str]:
        """Run a command to its end with this exit code; what it says on stdout and on stderr."""
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["flowcredit", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, out + err
        return out, err

"""`flowcredit …` in the test's own process."""

import sys

import pytest

from deploy.cli.app import main


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run a command to its end; its exit code. What it says is on stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["flowcredit", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0

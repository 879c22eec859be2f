"""A run goes on when its output is lost."""

import errno
import io
import logging
import os

import pytest

from deploy.monitor.journal import RUN_FAILED
from deploy.monitor.progress import Progress
from protocol.status import Condition


class Broken(io.StringIO):
    """Takes one text; then every write fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        if self.getvalue():
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO], ids=["pipe", "disk", "terminal"])
def test_a_lost_output_is_one_line_of_the_log_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    stream = Broken(number)
    monkeypatch.setattr("sys.stdout", stream)
    progress = Progress()
    with caplog.at_level(logging.WARNING):
        for text in ("first", "second", "third"):
            progress.say(text)
    assert stream.getvalue() == "first\n"
    (said,) = caplog.messages
    assert os.strerror(number) in said


def test_what_ends_a_run_is_shown_by_its_error_only(capsys: pytest.CaptureFixture[str]) -> None:
    ends = Condition(type="Guard/contract", status="False", reason=RUN_FAILED, message="no score", since=0.0)
    Progress().condition(ends, None)
    assert not capsys.readouterr().out
    Progress().condition(ends.model_copy(update={"reason": "Broken"}), None)
    assert capsys.readouterr().out == "no score\n"

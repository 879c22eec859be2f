"""The page's server: a token of its own, started again when it is killed, gone with the run."""

import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from deploy import page_server
from deploy.page_server import TOKEN_FILE, PageServer


class Said:
    def __init__(self) -> None:
        self.conditions: list[tuple[str, bool | None, str]] = []

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        self.conditions.append((type, holds, reason))

    def event(self, message: str, kind: str = "info") -> None:
        raise AssertionError("the page's server states conditions")


def serves(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def until_served(address: str) -> None:
    end = time.monotonic() + 60
    while not serves(address):
        assert time.monotonic() < end, "the page is not served"
        time.sleep(0.1)


@pytest.mark.timeout(200)
def test_a_page_s_server_that_is_killed_is_started_again_at_the_same_address(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(page_server, "EVERY_S", 0.0)
    page, said = PageServer(tmp_path), Said()
    assert ((tmp_path / TOKEN_FILE).stat().st_mode & 0o777) == 0o600
    until_served(page.address)
    page.look_after(said)
    for process in psutil.Process(page._child._process.pid).children(recursive=True):
        process.kill()
    page._child._process.wait(20)
    page.look_after(said)
    until_served(page.address)
    page.look_after(said)
    assert said.conditions == [
        ("PageServed", True, "Serving"),
        ("PageServed", False, "Ended"),
        ("PageServed", True, "Serving"),
    ]
    page.stop()
    assert not serves(page.address)
    assert not (tmp_path / TOKEN_FILE).exists()

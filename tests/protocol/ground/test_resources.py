"""Paths of a config: what the system cannot look for is one line."""

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.ground.resources import resolve


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "loop/x", "\ud800", "~nobody_of_this_name/x"])
def test_a_path_that_the_system_refuses_is_one_line(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot be resolved: ") as caught:
        resolve(path)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["nothing", "file/inside"])
def test_a_path_need_not_exist(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert resolve(path) == Path(path)

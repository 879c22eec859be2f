"""A class is named by its module or by its file; what is wrong is one line."""

import re
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.ground.import_path import find_class


def test_a_file_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    found = find_class("./mine.py:Mine")
    assert found.__name__ == "Mine"
    assert find_class(f"{tmp_path}/mine.py:Mine") is found


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("none.py:Mine", None, "does not exist: a relative path starts in the working folder"),
        ("odd.py:Mine", "class Other: pass", "odd.py has no 'Mine': known: Other"),
        ("broken.py:Mine", "class Mine(:", "broken.py cannot be run: SyntaxError: "),
        ("raises.py:Mine", "1 / 0", "raises.py cannot be run: ZeroDivisionError: division by zero"),
        ("exits.py:Mine", "raise SystemExit(0)", "exits.py cannot be run: SystemExit: 0"),
        ("mine.py:", "", "must read package.module:Name or folder/file.py:Name, got 'mine.py:'"),
        ("rewards.nothing:Mine", None, "name your file by its path, ./rewards/nothing.py:Mine"),
        ("nothing_here:Mine", None, "check its spelling, the working folder and PYTHONPATH"),
    ],
)
def test_what_is_wrong_is_one_line(
    path: str, content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(path.partition(":")[0]).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_class(path)

"""`make gpu-test` says in one line that there is no GPU, where pytest would skip every test."""

import runpy

import pytest

from tests.support.paths import ROOT

CHECK = "tests.support.worlds.devices"


def test_make_gpu_test_begins_with_the_check() -> None:
    _, _, recipe = (ROOT / "Makefile").read_text().partition("\ngpu-test:")
    assert CHECK in recipe.splitlines()[1]
    assert recipe.splitlines()[2].endswith("-m pytest -m gpu")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_check_fails_with_one_line_without_a_gpu_and_says_nothing_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="^make gpu-test needs an NVIDIA GPU, got torch") as ended:
        runpy.run_module(CHECK, run_name="__main__")
    assert "\n" not in str(ended.value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    runpy.run_module(CHECK, run_name="__main__")

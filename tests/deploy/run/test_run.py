"""The end of a run: what it says and shows."""

from pathlib import Path

import pytest

from tests.support.commands import run_cli
from tests.support.runs.presets import small_preset


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_damaged_gallery_costs_the_images_before_and_after_alone(
    tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, iteration: int
) -> None:
    status = {"board": "off", "trajectories": 0}
    preset = small_preset(tmp_path, tiny_sd3, scorer="tests.support.rewards.dark:Dark", status=status)
    run = tmp_path / "run"
    words = ("train", str(preset), "--local", "--run", str(run))
    assert run_cli(monkeypatch, *words) == 0
    assert "images    " in capsys.readouterr().out
    gallery = run / "gallery" / f"iteration_{iteration:06d}.npz"
    gallery.write_bytes(gallery.read_bytes()[:500])
    assert run_cli(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert "LoRA      " in said and "images    " not in said
    assert f"gallery {gallery} cannot be read" in (run / "run.log").read_text()

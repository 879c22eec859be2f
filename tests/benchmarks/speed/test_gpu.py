"""The GPU benchmark from end to end on its tiny architecture, so that it works the first time it meets a GPU."""

import json
import math
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.speed.gpu import REPLAYS, main
from benchmarks.speed.gpu_model import SD35_MEDIUM
from benchmarks.speed.slot.timing import KINDS


def run(*words: str) -> str:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    assert done.exit_code == 2
    return done.output


@pytest.mark.whole
def test_it_runs_from_end_to_end_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--tiny", "--device", "cpu", "--members", "2", "--guidance", "4.5", "--checkpointing"]
    run(*words, "--peak-tflops", "1", "--json", str(file))
    figures = json.loads(file.read_text())
    assert figures.pop("device") == "CPU"
    assert figures.pop(f"learner, largest |log ratio| of {REPLAYS} replays") == 0.0
    for name, value in figures.items():
        assert "peak GiB" in name or (math.isfinite(value) and value > 0), name
    assert figures.keys() >= {f"completion T'={substeps}, times plain" for substeps in (2, 5)}
    assert all(figures[f"learner, ms of 2 pairs: {kind}"] > 0 for kind in (*KINDS, "the rest"))
    assert figures["learner, share of bf16 peak"] == pytest.approx(figures["learner, TFLOP/s"])


@pytest.mark.whole
def test_whole_iterations_of_the_preset_run_from_end_to_end_on_the_cpu(tmp_path: Path) -> None:
    """The same command trains on a GPU, there on Ray."""
    file, folder, prompts = tmp_path / "figures.json", tmp_path / "runs" / "run", tmp_path / "prompts.txt"
    prompts.write_text("two zebras\na red bench\n")
    words = ["--tiny", "--device", "cpu", "--members", "4", "--run", str(folder), "--iterations", "1"]
    run(*words, "--peak-tflops", "1", "--json", str(file), f"data.heldout={prompts}", "completion.substeps=2")
    figures = json.loads(file.read_text())
    assert figures.pop("device") == "CPU"
    assert figures.pop("largest |ratio - 1| before an update") == 0.0
    assert figures.keys() >= {"iteration, s", "images/s", "images scored/s", "mfu", "completing, s", "training, s"}
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    assert (folder / "checkpoints" / "iteration_000001").is_dir()
    assert "that does not exist" in refused(*words)
    assert "need --iterations" in refused("--tiny", "--device", "cpu", "group.size=2")


def test_it_estimates_without_a_gpu() -> None:
    assert re.search(r"^learner worker +1 +[\d.]+ GiB ", run("--tiny", "--estimate"), re.M)


def test_the_architecture_is_the_published_one() -> None:
    import diffusers
    import torch

    with torch.device("meta"):
        transformer = diffusers.SD3Transformer2DModel(**SD35_MEDIUM)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == pytest.approx(2.24e9, rel=0.01)
    assert transformer.transformer_blocks[12].attn2 is not None
    assert transformer.transformer_blocks[13].attn2 is None

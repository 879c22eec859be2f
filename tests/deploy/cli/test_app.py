"""Mistakes in the input end in one line with rule, value and remedy, exit code 2, and nothing half written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from deploy.folder.run_folder import open_run_folder
from flow.models.completed import completed
from protocol.config.parse import parse_config
from protocol.messages import Adapter, LearnerState, digest_of
from tests.support.commands import Cli


@pytest.fixture
def preset(tmp_path: Path, tiny_sd3: Path) -> dict:
    train = tmp_path / "train.jsonl"
    line = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}], "prompt": "a red circle"}
    train.write_text(json.dumps(line) + "\n")
    return {
        "iterations": 1,
        "model": {"path": str(tiny_sd3), "max_sequence_length": 1},
        "data": {"train": str(train), "heldout": str(train)},
        "group": {"size": 2, "shard": 2, "per_iteration": 2},
        "rewards": {"geneval": {"scorer": "geneval", "args": {"detector": "toyworld.world.detector:ShapeDetector"}}},
    }


def complaint(preset: dict, tmp_path: Path, cli: Cli, *words: str) -> str:
    """The one line that a `train` with this preset ends in."""
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    run = tmp_path / "run"
    words = (*words,) if "--run" in words else (*words, "--run", str(run))
    line = cli.refused("train", str(path), "--local", *words)
    assert not run.exists()
    return line


def test_unknown_preset_is_refused_with_a_suggestion(cli):
    line = cli.refused("train", "toy_genevl")
    assert line.startswith("flowcredit: unknown preset 'toy_genevl': ")
    assert line.endswith("; or give the path of a .yaml file")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "No such command 'trian'. "),
        (["status", "--wach"], "No such option: --wach "),
        (["--vresion", "train"], "No such option: --vresion "),
        (["stop"], "Missing argument 'run' "),
        (["scale", "mine", "rollout", "many"], "Invalid value for 'count': "),
    ],
)
def test_words_that_no_command_takes_are_one_line(words, line, cli):
    said = cli.refused(*words)
    assert said.startswith(f"flowcredit: {line}")


def test_missing_preset_file_is_refused(cli):
    assert "config file nowhere.yaml does not exist" in cli.refused("train", "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("grup.size=4", "flowcredit: unknown key 'grup': "),
        ("group.sise=4", "flowcredit: unknown key 'group.sise'"),
        ("rewards.geneval.wieght=2", "flowcredit: unknown key 'rewards.geneval.wieght'"),
        ("iterations=many", "flowcredit: iterations: input should be a valid integer"),
        ("group.size=1", "flowcredit: group.size must be at least 2, got 1"),
        ("group.shard=3", "flowcredit: group.shard must divide group.size 2, got 3"),
        ("sampling.kernel=brown", "flowcredit: sampling.kernel: input should be"),
        ("model.dtype=int8", "flowcredit: model.dtype: "),
        ("model.height=16", "flowcredit: model.height and model.width "),
        ("model.path=no/such_folder/here", "flowcredit: model folder no/such_folder/here "),
        ("evaluation.component=geneval/nope", "flowcredit: evaluation.component must be one of ['reward', 'geneval', "),
        ("evaluation.component=reward/strict", "flowcredit: evaluation.component "),
        ("nonsense", "flowcredit: an override must read key=value, got 'nonsense'"),
        ("rewards.geneval.scorer=genevl", "flowcredit: a scorer must be a known name"),
        ("rewards.geneval.args.detektor=x", "flowcredit: rewards.geneval.scorer:GenEval takes no argument 'detektor'"),
    ],
)
def test_wrong_override_is_one_line(override, line, preset, tmp_path, cli):
    assert complaint(preset, tmp_path, cli, override).startswith(line)


def test_missing_model_folder_is_refused(preset, tmp_path, cli):
    preset["model"]["path"] = str(tmp_path / "nothing")
    assert "does not exist: set model.path" in complaint(preset, tmp_path, cli)


def test_model_folder_of_another_family_is_refused(preset, tmp_path, cli):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    preset["model"]["path"] = str(folder)
    line = complaint(preset, tmp_path, cli)
    assert "'StableDiffusion3Pipeline'" in line and "got StableDiffusionXLPipeline" in line


def test_folder_without_model_index_is_refused(preset, tmp_path, cli):
    preset["model"]["path"] = str(tmp_path)
    assert "must hold a readable model_index.json" in complaint(preset, tmp_path, cli)


def test_lora_targets_that_bind_nothing_are_refused(preset, tmp_path, cli):
    preset["model"]["lora"] = {"targets": ["no_such_module"]}
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    assert "no module matches" in cli.refused("train", str(path), "--local", "--run", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.lora.targets=[attn.to_q, attn.to_qq]", "got none for ['attn.to_qq']"),
        ("sampling.std_min=10", "sampling must leave a step"),
        ("evaluation.component=geneval/nope", "evaluation.component must be one of"),
        ("cluster.rollout.gpus=1", "cluster.*.gpus must be 0 where torch finds no GPU, got 1"),
        ("learner.betas=[1.5, 0.9]", "learner.betas.0: input should be less than 1, got 1.5"),
        ("model.path=~nobody_of_this_name/x", "cannot be resolved"),
    ],
)
def test_a_mistake_that_only_the_model_shows_leaves_no_folder_either(
    override, line, preset, tmp_path, monkeypatch, cli
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert line in complaint(preset, tmp_path, cli, override)


def test_a_fork_with_a_mistake_that_only_an_actor_finds_leaves_no_folder(preset, tmp_path, monkeypatch, cli):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arrays = {"transformer.q.lora_A.weight": np.zeros((2, 4), np.float32)}
    weights = Adapter(version=1, arrays=arrays, digest=digest_of(arrays))
    old = open_run_folder(tmp_path / "old", completed(parse_config(preset)))
    old.save(LearnerState(iteration=1, adapter=weights, optimizer={}))
    old.close()
    words = ("--fork", str(tmp_path / "old"), "cluster.rollout.gpus=1")
    assert "gpus must be 0 where torch finds no GPU" in complaint(preset, tmp_path, cli, *words)


def test_a_damaged_model_leaves_no_folder(preset, tiny_sd3, tmp_path, cli):
    preset["model"]["path"] = str(shutil.copytree(tiny_sd3, tmp_path / "model"))
    (tmp_path / "model" / "text_encoder" / "model.safetensors").write_bytes(b"no weights")
    assert f"text_encoder of model folder {tmp_path / 'model'} cannot be loaded" in complaint(preset, tmp_path, cli)
    shutil.rmtree(tmp_path / "model" / "tokenizer")
    assert "got none for ['tokenizer']" in complaint(preset, tmp_path, cli)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:x"])
def test_an_address_where_no_cluster_answers_is_one_line_at_once(address, preset, tmp_path, monkeypatch, cli):
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    monkeypatch.setenv("RAY_ADDRESS", address)
    line = cli.refused("train", str(path), "--run", str(tmp_path / "run"))
    assert f"cannot use a Ray cluster at {address}" in line
    assert not (tmp_path / "run").exists()


def test_a_run_folder_in_use_is_refused(preset, tmp_path, cli):
    config = completed(parse_config(preset))
    run = open_run_folder(tmp_path / "taken", config)
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    assert "is in use by another process" in cli.refused(
        "train", str(path), "--local", "--run", str(tmp_path / "taken")
    )
    run.close()


def test_eval_refuses_a_run_whose_adapter_belongs_to_another_model_section(preset, tmp_path, cli):
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    run = str(tmp_path / "taken")
    cli.done("train", str(path), "--local", "--run", run)
    line = cli.refused("eval", str(path), "model.lora.alpha=3", "seed=9", "--run", run)
    assert "model.lora.alpha (there 64, now 3)" in line
    assert "seed" not in line


def test_broken_prompt_line_is_named(preset, tmp_path, cli):
    with Path(preset["data"]["train"]).open("a") as file:
        file.write('{"prompt": "cut of\n')
    line = complaint(preset, tmp_path, cli)
    assert f"{preset['data']['train']}:2: a line must be one JSON object" in line


def test_prompt_that_the_scorer_cannot_judge_is_refused(preset, tmp_path, cli):
    Path(preset["data"]["heldout"]).write_text('{"prompt": "a red circle"}\n')
    assert "a red circle" in complaint(preset, tmp_path, cli)


def test_unwritable_run_folder_is_refused(preset, tmp_path, cli):
    (tmp_path / "file").write_text("")
    line = complaint(preset, tmp_path, cli, "--run", str(tmp_path / "file" / "run"))
    assert line.endswith("cannot be written: Not a directory; fix that or set --run")


@pytest.mark.parametrize("words", ["train {preset} --local --run", "status", "report"])
def test_a_folder_that_the_system_refuses_to_look_for_is_one_line(words, preset, tmp_path, cli):
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    line = cli.refused(*words.format(preset=path).split(), str(tmp_path / ("x" * 256)))
    assert ": File name too long" in line and len(line) < 400


def test_folder_with_other_files_is_not_taken_for_a_run(preset, tmp_path, cli):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    line = complaint(preset, tmp_path, cli, "--run", str(tmp_path / "mine"))
    assert "must be new, empty or a run's own" in line
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_run_folder_of_another_config_lists_the_keys(preset, tmp_path, cli):
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(preset))
    run = str(tmp_path / "taken")
    cli.done("train", str(path), "--local", "--run", run)
    line = complaint(preset, tmp_path, cli, "seed=7", "--run", run)
    assert "belongs to another config: seed (there 0, now 7); set --run" in line


@pytest.mark.parametrize(("command", "allowed"), [("--help", set()), ("status", {"pydantic"})])
def test_a_command_that_only_shows_something_loads_no_heavy_library(tmp_path, command, allowed):
    """So it starts fast: `python -m benchmarks.speed.start`."""
    (tmp_path / "runs").mkdir()
    code = (
        f"import sys; sys.argv = ['flowcredit', {command!r}]\n"
        "from flowcredit.start import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"fastapi", "fsspec", "httpx2", "matplotlib", "numpy", "pydantic", "ray", "redis", "safetensors", "torch"}
    assert "typer" in loaded
    assert heavy & loaded <= allowed


def test_a_terminal_without_arrows_shows_their_codes():
    """As tables of the status have them."""
    code = (
        "import sys; from flowcredit.start import main; sys.argv = ['flowcredit', 'presets']\n"
        "try:\n    main()\nexcept SystemExit:\n    print('\\u2192')"
    )
    variables = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    assert done.stdout.decode("ascii").endswith("\\u2192\n")


def test_a_program_without_an_output_runs():
    """Some services close it."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "flowcredit", "presets"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("called", "path", "shown"),
    [
        (".venv/bin/flowcredit", "", ".venv/bin/flowcredit"),
        ("/x/.venv/bin/flowcredit", str(Path(sys.executable).parent), "flowcredit"),
    ],
)
def test_the_way_to_the_page_is_a_command_that_the_shell_finds(
    called, path, shown, preset, tmp_path, monkeypatch, capsys
):
    from deploy.cli.app import app

    (file := tmp_path / "preset.yaml").write_text(yaml.safe_dump(preset))
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setenv("PATH", path)
    run = tmp_path / "run"
    app(["train", str(file), "--local", "--run", str(run), "evaluation.steps=1"], standalone_mode=False)
    assert f"page      {shown} serve {run}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train toy_geneval --iterations 5", "No such option: --iterations (keys of the config have no dashes: write"),
        ("train toy_geneval --lr 5", "write learner.learning_rate=…)"),
        ("train toy_geneval --bogus", "(see `flowcredit train --help`)"),
        ("config toy_geneval model=black-forest-labs/FLUX.1-dev", "write model.path=black-forest-labs/FLUX.1-dev"),
        ("config toy_geneval model.dtype=bf16", "write model.dtype=bfloat16"),
        ("config toy_geneval method=ppo", "unknown method 'ppo': write method=flow_grpo"),
    ],
)
def test_the_words_of_other_programs_get_one_line_with_ours(words, said, cli):
    line = cli.refused(*words.split())
    assert said in line


def test_the_help_shows_the_commands_in_groups():
    from deploy.cli.app import COMMANDS, GROUPS, app

    shown = CliRunner().invoke(app, ["--help"], prog_name="flowcredit").output
    positions = [shown.index(f"─ {panel} ") for panel in GROUPS]
    assert positions == sorted(positions)
    assert sum(map(len, GROUPS.values())) == len(COMMANDS) == len(app.registered_commands)


@pytest.mark.parametrize(("option", "most"), [("--steps", "10000"), ("--count", "1000")])
def test_more_steps_or_images_than_anyone_needs_are_refused(option, most, tmp_path, cli):
    said = cli.refused("generate", str(tmp_path), "x", option, "9" * 23)
    assert option in said and f"equal to {most} " in said

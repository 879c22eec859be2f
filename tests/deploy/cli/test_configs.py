"""The commands about configs, and what holds for every command."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner, Result

from deploy.api.history.configs import view
from deploy.cli.app import COMMANDS, app
from deploy.cli.training import DEMO
from deploy.folder.read import lines_of
from deploy.folder.run_folder import open_run_folder
from deploy.presets import load_config, method_names, preset_names, sources
from protocol.errors import FlowcreditError, InputError
from tests.support.full_disk import files_limited


def said(*words: str) -> str:
    """What a command says; its errors are raised."""
    done: Result = CliRunner().invoke(app, list(words))
    if isinstance(done.exception, FlowcreditError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_every_value_has_its_source() -> None:
    rows = {row["key"]: row for row in json.loads(said("config", "toy_geneval", "group.size=8", "--json"))}
    assert rows["group.size"] == {"key": "group.size", "value": 8, "source": "override"}
    assert rows["sampling.steps"] == {"key": "sampling.steps", "value": 6, "source": "preset toy_geneval"}
    assert rows["seed"] == {"key": "seed", "value": 0, "source": "default"}
    assert {key: row["value"] for key, row in rows.items()} == load_config(
        "toy_geneval", overrides=["group.size=8"]
    ).flat_fields()


def test_a_run_remembers_what_set_its_values_and_a_resume_what_set_those_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def opened(*words: str) -> None:
        config = load_config("toy_geneval", overrides=words)
        open_run_folder(path, config, sources=sources("toy_geneval", overrides=words)).close()

    opened("seed=7", "method=flow_grpo")
    opened("seed=7", "method=flow_grpo", "iterations=3", "group.size=36")
    shown = said("config", str(path), "--changed")
    assert shown.startswith("# method flow_grpo\n")
    lines = {line.split()[0]: line.rpartition("  # ")[2] for line in shown.splitlines()[1:]}
    assert lines["seed"] == lines["iterations"] == "override"
    assert lines["credit.rule"] == "method flow_grpo"
    assert lines["group.size"] == "preset toy_geneval", "it has the same value as before"
    assert "checkpoint.keep" not in lines
    assert view(path).sources == lines


def test_a_method_that_is_asked_for_wins_over_the_preset_and_one_of_the_preset_does_not(tmp_path: Path) -> None:
    asked = sources("toy_geneval", overrides=["method=tp_grpo", "credit.ddof=1"])
    assert asked["sampling.kernel"] == "method tp_grpo"
    assert asked["sampling.steps"] == "preset toy_geneval"
    assert asked["learner.kl.weight"] == "method tp_grpo"
    assert asked["credit.ddof"] == "override"
    path = tmp_path / "own.yaml"
    tree = yaml.safe_load(load_config("toy_geneval").to_yaml())
    path.write_text(
        yaml.safe_dump({"method": "tp_grpo", **{key: tree[key] for key in ("iterations", "model", "data")}})
    )
    with path.open("a") as file:
        file.write("sampling: {kernel: flow_sde}\nrewards: {geneval: {scorer: geneval}}\n")
    assert sources(path)["sampling.kernel"] == f"file {path}"
    assert sources(path)["credit.rule"] == "method tp_grpo"
    assert "method" not in sources(path)


def test_the_shown_config_can_be_written_back(tmp_path: Path) -> None:
    """Key by key the lines are overrides that change nothing."""
    lines = [line.rpartition("  # ")[0] for line in said("config", "toy_mix").splitlines()]
    words = dict(line.split(maxsplit=1) for line in lines)
    again = load_config("toy_mix", overrides=[f"{key}={value}" for key, value in words.items()])
    assert again == load_config("toy_mix")


def test_keys_lists_every_key_with_its_meaning() -> None:
    keys = {row["key"]: row for row in json.loads(said("config", "--keys", "--json"))}
    own = {key for key in load_config("toy_geneval").flat_fields() if not key.startswith("rewards.")}
    sections = {key.rpartition(".")[0] for key in keys}  # one that may be null is a value too
    assert {key for key in own if not any(key.startswith(f"{held}.") for held in keys)} <= keys.keys() | sections
    assert all(row["meaning"] for row in keys.values())
    assert keys["seed"]["limits"] == "≥ 0, < 2^63"
    assert "rewards.NAME.scorer" in keys
    assert "group.size" in said("config", "--keys")


def test_a_config_needs_a_preset_or_keys() -> None:
    for words, rule in (
        (["config"], "a preset must be named"),
        (["config", "toy_geneval", "--keys"], "leave preset and overrides out"),
        (["config", "toy_genevl"], "did you mean 'toy_geneval'"),
    ):
        with pytest.raises(InputError, match=rule):
            said(*words)


def test_listing_commands_list_in_lines_and_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert [row["name"] for row in json.loads(said("presets", "--json"))] == preset_names()
    assert [row["name"] for row in json.loads(said("methods", "--json"))] == method_names()
    assert {"name": "geneval", "path": "rewards.geneval.scorer:GenEval", "extra": None} in json.loads(
        said("scorers", "--json")
    )
    assert json.loads(said("status", "--json")) == []
    for line in said("presets").splitlines():
        assert len(line.split(maxsplit=1)) == 2
        assert line[-1] not in ".;"
    with pytest.raises(InputError, match="leave --watch out"):
        said("status", "--watch", "--json")


def test_a_flag_has_no_value_in_the_help() -> None:
    shown = said("train", "--help")
    assert re.search(r"--local ", shown)
    assert "bool" not in shown.lower()


def test_the_first_command_is_the_demo_and_the_next_trains() -> None:
    assert list(COMMANDS)[:2] == ["demo", "train"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name: str) -> None:
    command = get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    shown = command.epilog.removeprefix("Example: ")
    program, own, *words = shlex.split(shown)
    assert (program, own) == ("flowcredit", name)
    command.make_context(name, words)
    assert shown in " ".join(said(name, "--help").split())


def test_a_shell_completes_commands_and_presets() -> None:
    def completed(words: str) -> str:
        env = {"_FLOWCREDIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        return CliRunner().invoke(app, [], env={**os.environ, **env}, prog_name="flowcredit").output

    assert completed("flowcredit repo").split() == ["report"]
    assert completed("flowcredit train toy_g").split() == ["toy_geneval"]


@pytest.mark.parametrize("has_credit", [False, True])
def test_what_init_writes_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_credit: bool) -> None:
    monkeypatch.chdir(tmp_path)
    written = said("init", "work/mine", *["--credit"] * has_credit).splitlines()
    names = ("run.yaml", "scorer.py", "train.txt", "heldout.txt", *["credit.py"] * has_credit)
    assert written[:-1] == [f"work/mine/{name}" for name in names]
    config = load_config("work/mine/run.yaml")
    assert config.credit.rule == ("work/mine/credit.py:late" if has_credit else "tree")
    text = Path("work/mine/run.yaml").read_text()
    assert "$" not in text
    assert text.count("#") > 10
    if not has_credit:
        monkeypatch.chdir("work")  # the file's paths are its own folder's, whatever the working folder is
        assert "8 prompts to train on, 4 held out" in said("train", "mine/run.yaml", "--dry-run")
        return
    small = ("iterations=1", "group.size=2", "group.shard=2", "group.per_iteration=2")
    said(
        "train", "work/mine/run.yaml", "--local", "--no-page", "--run", "run", *small, "evaluation.images_per_prompt=1"
    )
    lines = lines_of(tmp_path / "run")
    assert [line["iteration"] for line in lines] == [0, 1, 1]
    assert 0 < lines[1]["reward/mine"] < 1
    assert "credit.rule" in json.loads((tmp_path / "run" / "inputs.json").read_text())


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "scorer.py").write_text("years of work")
    with pytest.raises(InputError, match=r"files must not exist yet, got .*scorer.py"):
        said("init", str(mine))
    assert [path.name for path in mine.iterdir()] == ["scorer.py"]
    assert (mine / "scorer.py").read_text() == "years of work"
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        said("init", str(mine / "scorer.py" / "deeper"))
    with pytest.raises(InputError, match="name must consist of letters"):
        said("init", str(tmp_path / "a: b"))


def test_init_on_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    for name in ("deep/mine", "held/mine", "held"):
        with pytest.raises(InputError, match="cannot be written: File too large"), files_limited(100):
            said("init", str(tmp_path / name))
        assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["held"]


def test_changed_shows_what_was_set_and_the_method_that_the_config_has() -> None:
    words = ("config", "toy_geneval", "--changed", "learner.clip_range=0.5")
    rows = {row["key"]: row for row in json.loads(said(*words, "--json"))}
    assert rows["learner.clip_range"]["source"] == "override"
    assert rows["credit.rule"]["source"] == "preset toy_geneval"
    assert "seed" not in rows
    assert said(*words).startswith("# method stepwise_tree\n")
    assert not said("config", "toy_mix").startswith("#")


def test_what_the_demo_adds_to_its_preset_measures_and_never_trains() -> None:
    preset, demo = (load_config("toy_geneval", overrides=words) for words in ((), DEMO))
    fields, found = preset.outcome_fields(), demo.outcome_fields()
    differing = {key for key in fields.keys() | found.keys() if fields.get(key) != found.get(key)}
    assert {key.split(".")[0] for key in differing} == {"evaluation", "rewards"}
    assert demo.reward_weights == preset.reward_weights
    assert demo.diversity_reading == "diversity"
    assert (demo.evaluation.every, demo.evaluation.shown) == (8, 48)

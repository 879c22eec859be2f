"""The commands that look and steer: they say what is, and refuse in one line what cannot be."""

import json
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from deploy.cli.tables import show_run
from deploy.folder.names import CONFIG, STATUS
from deploy.folder.read import StatusFile
from protocol.status import ActorStatus, Condition, Event, Rewards, RunStatus


@pytest.fixture
def ended(tmp_path: Path, tiny_config) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(tiny_config(iterations=2).to_yaml())
    lines = [{"iteration": n, "reward/mean": n / 4} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = RunStatus(
        run="mine",
        session="s",
        phase="finished",
        iteration=2,
        iterations=2,
        started=1.0,
        updated=time.time(),
        actors=[ActorStatus(name="rollout-0", kind="rollout", state="idle", node="here", adapter_version=2)],
        conditions=[
            Condition(type="Disk", status="False", reason="Full", message="no room left [/exit] :bomb:", since=1.0)
        ],
        errors=[Event(number=1, time=1.0, kind="error", message="no score of [ocr, pickscore]")],
    )
    (folder / STATUS).write_text(StatusFile(status=status).model_dump_json())
    return folder


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_status_shows_a_run_by_its_folder_and_all_runs_by_default(ended, monkeypatch, cli):
    out = cli.done("status", str(ended))
    for part in (
        "finished",
        "2/2",
        "0.500",
        "Disk: no room left [/exit] :bomb:",
        "no score of [ocr, pickscore]",
        "rollout-0",
    ):
        assert part in out
    monkeypatch.chdir(ended.parents[1])
    assert "mine" in cli.done("status")
    assert "finished" in cli.done("status", "mine")
    Path("mine").mkdir()  # as `flowcredit init mine` makes it
    assert "finished" in cli.done("status", "mine")


def test_status_lists_a_folder_of_runs_and_a_command_asks_for_one_of_them(ended, cli):
    runs = str(ended.parent)
    out = cli.done("status", runs)
    assert out.split()[:2] == ["run", "phase"] and "mine" in out
    assert [each["run"] for each in json.loads(cli.done("status", runs, "--json"))] == ["mine"]
    line = cli.refused("pause", runs)
    assert line.startswith(f"flowcredit: {runs} ") and f"`flowcredit status {runs}`" in line


def test_a_narrow_terminal_keeps_every_actor_s_name_and_time_on_one_line():
    kinds = ("learner", "rollout", "reward/geneval")
    told = {"state": "idle", "node": "vm", "adapter_version": 32, "adapter_digest": "e1c17866c690", "last_seen": 5.0}
    actors = [ActorStatus(name=f"{kind}-0", kind=kind.split("/")[0], busy_share=0.2, **told) for kind in kinds]
    status = RunStatus(run="mine", session="s", phase="running", iteration=1, iterations=2, started=1.0, updated=9.0)
    console = Console(width=80, record=True, file=StringIO())
    console.print(show_run(status.model_copy(update={"actors": actors})))
    lines = console.export_text().splitlines()
    for kind in kinds:
        assert any(line.startswith(f"{kind}-0 ") and "0:00:04 ago" in line and "e1c1786" in line for line in lines)


@pytest.mark.parametrize(("error", "word"), [(0.03, ", within chance"), (0.02, "")])
def test_a_trend_within_two_standard_errors_is_said_to_be_chance(error, word):
    status = RunStatus(run="mine", session="s", phase="running", iteration=20, iterations=32, started=1.0, updated=9.0)
    console = Console(width=100, record=True, file=StringIO())
    console.print(show_run(status.model_copy(update={"rewards": Rewards(now=0.5, trend=0.05, trend_error=error)})))
    assert f"0.500  (+0.050 in 10 iterations{word})" in console.export_text()


def test_a_run_that_starts_shows_no_empty_facts():
    status = RunStatus(run="mine", session="s", phase="starting", iteration=0, iterations=2, started=1.0, updated=9.0)
    console = Console(width=80, record=True, file=StringIO())
    console.print(show_run(status))
    assert "none" not in (said := console.export_text())
    assert not any(head in said for head in ("reward", "held-out", "step reward", "update", "seconds"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("status", "nobody"), 2, "runs/nobody: give one of these; FLOWCREDIT_BOARD names the board of a run"),
        (("pause", "mine"), 1, "run mine has finished: it takes no commands"),
        (("scale", "mine", "rollout", "2"), 1, "run mine has finished"),
        (("status", "x", "--board", "redis://127.0.0.1:1"), 1, "the board at redis://127.0.0.1:1 does not answer"),
        (("serve", "nowhere"), 2, "nowhere is not a folder: give a run folder, a folder of runs or a board's address"),
        (("serve", ".", "--host", "0.0.0.0"), 2, "is open to other machines and needs a token"),
        (("serve", ".", "--token-file", "none"), 2, "token file none cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(ended, monkeypatch, cli, words, code, message):
    monkeypatch.chdir(ended.parents[1])
    monkeypatch.delenv("FLOWCREDIT_TOKEN", raising=False)
    (line,) = cli.ended(*words, code=code)[1].splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://host", "must begin with redis://, rediss://, unix://, got http://host"),
        ("redis://:word@host", "must hold no password"),
    ],
)
def test_a_board_s_address_in_a_config_is_checked_and_holds_no_password(tiny_config, address, message):
    from protocol.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        tiny_config(status={"board": address})

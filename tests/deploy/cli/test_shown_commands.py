"""The commands that README and docs show run, on small overrides; `tests/support/pages.py` names those that cannot.

A page is a story: its commands run from top to bottom in one folder. A run that a page takes for granted is there.
"""

import argparse
import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from starlette.testclient import TestClient
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.cli.training import demo, train
from deploy.folder.read import lines_of
from protocol.status import PoolStatus
from tests.support.pages import metric_patterns, name_of, program_of, stories, words_of
from tests.support.paths import ROOT
from tests.support.runs.played import played_run
from tests.support.services.serving import AUTHORISED, TOKEN

SMALL = {
    "iterations": "1",
    "group.size": "4",
    "group.shard": "2",
    "group.per_iteration": "1",
    "learner.updates_per_iteration": "1",
    "evaluation.images_per_prompt": "2",
    "evaluation.steps": "2",
}
"""Overrides that every run and evaluation of a page gets, after those that the page shows."""
FEW = {"toy_geneval": "heldout.jsonl", "toy_ocr": "signs_heldout.jsonl"}
"""Held-out prompts of presets, of which few are taken."""
JUDGE = """
from tests.support.rewards.judges import Redness


class Judge(Redness):
    def __init__(self, *, gain):
        assert gain == 2
"""
"""`my_package.judges` of the pages."""
TO_A_LIVE_RUN = ("scale", "pause", "resume", "checkpoint", "stop")
STORIES = stories()

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]  # a page may show twenty commands


class Reader:
    """Runs a page's commands in this process, in a folder of its own."""

    def __init__(self, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.finished, self.monkeypatch = finished, monkeypatch
        self.open = ExitStack()
        self.served: TestClient | None = None
        monkeypatch.setattr("deploy.api.serve.serve_until_interrupted", self._look_at)

    def run(self, line: str) -> str:
        """What the command says; AssertionError unless it ends well."""
        program, words = words_of(line)
        if program == "curl":
            return self._curl(words)
        if program != "flowcredit":
            return self._call(program_of(program), words)
        self._provide(words)
        with self.monkeypatch.context() as meanwhile:
            if "--watch" in words:
                watched = SimpleNamespace(run=asyncio.run, sleep=end_of_watching())
                meanwhile.setattr("deploy.cli.status.asyncio", watched)
            return self._call(app, small(words))

    def _call(self, program: typer.Typer | None, words: list[str]) -> str:
        assert program is not None
        outcome = CliRunner().invoke(program, words)
        assert outcome.exit_code == 0, f"{words}: {outcome.output} {outcome.exception!r}"
        return outcome.output

    def _provide(self, words: list[str]) -> None:
        """Put a finished run wherever the page takes one for granted."""
        is_new = words[0] == "train" and words[1] != "--run" and "--run" in words
        made = words[words.index("--run") + 1] if is_new else None
        for word in words:
            if not re.fullmatch(r"runs/\w+", word) or word == made:
                continue
            if not Path(word).exists():
                shutil.copytree(self.finished, word)
        if words[0] in ("serve", "status"):
            Path("runs").mkdir(exist_ok=True)

    def _look_at(self, served: Any, listener: Any, **_: Any) -> None:
        """Instead of serving until Ctrl-C: what `flowcredit serve` serves answers."""
        listener.close()
        path = "/v1/health" if "/v1/health" in served.openapi()["paths"] else "/runs"
        self.served = self.open.enter_context(TestClient(served, base_url="http://127.0.0.1:8400"))
        answer = self.served.get(path, headers=AUTHORISED)
        assert answer.status_code == 200
        assert answer.json()

    def _curl(self, words: list[str]) -> str:
        """The request that curl would make to the page's server."""
        parser = argparse.ArgumentParser()
        parser.add_argument("-H", action="append")
        parser.add_argument("-X", default="GET")
        parser.add_argument("-d")
        parser.add_argument("url")
        given = parser.parse_args(words)
        headers = dict(header.replace("$FLOWCREDIT_TOKEN", TOKEN).split(": ") for header in given.H)
        if self.served is None:
            self.run("flowcredit serve --host 0.0.0.0")
        assert self.served is not None
        path = given.url.removeprefix("http://STATUS:8400").replace("RUN", "mine")
        answer = self.served.request(given.X, path, headers=headers, content=given.d)
        assert answer.is_success, answer.text
        return answer.text


def small(words: list[str]) -> list[str]:
    """The arguments of `flowcredit` with `SMALL`, in one process, on a free port."""
    name, *rest = words
    function = {"train": train, "demo": demo}.get(name)
    if name in ("serve", "serve-rewards"):
        return [*words, "--port", "0"]
    if name == "eval" or (function and "--run" not in words[1:2]):
        preset = rest[0] if rest[0:1] and rest[0] in FEW else "toy_geneval"
        words = [*words, *(f"{key}={value}" for key, value in SMALL.items()), *few(preset)]
    if (function or name == "eval") and "--local" not in words:
        words.append("--local")
    return words


def few(preset: str, folder: Path = Path()) -> list[str]:
    """Overrides that take a preset's few prompts."""
    return [f"data.{part}={folder / preset}.jsonl" for part in ("train", "heldout")]


def end_of_watching() -> Any:
    """A sleep that a user ends by Ctrl-C the second time."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 1:
            raise KeyboardInterrupt

    return sleep


def few_prompts(folder: Path) -> None:
    """One held-out prompt of each kind, for each preset, and a prompt file."""
    for preset, name in FEW.items():
        lines = (ROOT / "toyworld" / "prompts" / name).read_text().splitlines()
        first = {json.loads(line).get("tag"): line for line in lines}
        (folder / f"{preset}.jsonl").write_text("\n".join(first.values()) + "\n")
    (folder / "prompts.txt").write_text("a red circle\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration, which all pages share."""
    folder = tmp_path_factory.mktemp("finished")
    few_prompts(folder)
    overrides = [f"{key}={value}" for key, value in SMALL.items()]
    words = ["train", "toy_geneval", "--local", "--run", str(folder / "run"), *overrides]
    done = CliRunner().invoke(app, [*words, *few("toy_geneval", folder)])
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a board with a run that carries out commands."""
    pools = [PoolStatus(name=name, desired=2, ready=2, busy=0) for name in ("rollout", "learner")]
    with played_run(tmp_path_factory.mktemp("live"), "mine", pools=pools) as (address, _):
        yield address


@pytest.mark.parametrize("page", STORIES, ids=name_of)
def test_the_commands_of_a_page_run(
    page: Path, finished: Path, live: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWCREDIT_TOKEN", TOKEN)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    few_prompts(tmp_path)
    shown = r"```(?:python|yaml)\n# (mine\.\w+)\n(.*?)```"
    for name, content in re.findall(shown, page.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(content)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "judges.py").write_text(JUDGE)
    reader = Reader(finished, monkeypatch)
    with reader.open:
        for line in STORIES[page]:
            program, words = words_of(line)
            is_live = program == "curl" or words[:1] in ([name] for name in TO_A_LIVE_RUN)
            is_live |= page.name == "cluster.md" and words[:1] in (["serve"], ["status"])
            with monkeypatch.context() as meanwhile:
                if is_live:
                    meanwhile.setenv("FLOWCREDIT_BOARD", live)
                said = reader.run(line)
            if words[:1] and words[0] in TO_A_LIVE_RUN:
                assert said == "done: as asked\n"


def test_every_metric_of_a_run_is_documented(finished: Path) -> None:
    patterns = metric_patterns()
    names = {name for line in lines_of(finished) for name in line} - {"iteration"}
    assert len(names) > 40
    assert [name for name in sorted(names) if not any(fnmatchcase(name, pattern) for pattern in patterns)] == []

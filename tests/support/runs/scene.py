"""A short run as a process of its own, and what it leaves behind."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.folder.read import lines_of
from deploy.tools.verify import verify
from learner.checkpoint import newest_checkpoint
from protocol.ground.files import ADAPTER_FILE
from tests.support.paths import ROOT
from tests.support.runs.metrics import untimed
from tests.support.warm.command import start_python

ITERATIONS = 20
Story = tuple[str, list[dict[str, Any]]]
"""sha256 of the last adapter, and all metrics but wall times and counts of what had to be tried again."""
LINE_S = 180.0
"""Seconds until the next line of a run at the latest."""


def preset(folder: Path, model: Path, /, **sections: Any) -> Path:
    """A run of 20 short iterations; sections are merged into its own."""
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle\na blue square\ntwo triangles\na green star\n")
    tree: dict[str, Any] = {
        "seed": 3,
        "iterations": ITERATIONS,
        "model": {"path": str(model), "max_sequence_length": 2, "lora": {"rank": 4, "alpha": 8}},
        "data": {"train": str(prompts), "heldout": str(prompts)},
        "sampling": {"steps": 4},
        "completion": {"substeps": 2},
        "group": {"size": 4, "shard": 2, "per_iteration": 2, "max_lag": 1},
        "learner": {"updates_per_iteration": 1, "learning_rate": 1e-3},
        "rewards": {"redness": {"scorer": "tests.support.rewards.judges:Redness"}},
        "evaluation": {"component": "reward", "steps": 2, "images_per_prompt": 1, "batch": 2},
        "checkpoint": {"every": 4},
        "cluster": {"heartbeat_s": 5, "max_restarts": 20, "restart_window_s": 60},
    }
    for name, value in sections.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Driver:
    """One `flowcredit train` and what it says."""

    def __init__(self, preset: Path, run: Path, *words: str, program: Sequence[str] = ("-m", "flowcredit")) -> None:
        command = ("-u", *program, "train", str(preset), "--run", str(run), *words)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = start_python(*command, environment=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        self.run = run
        self.said: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, is_it: Callable[[str], bool], *, begin: int = 0) -> str:
        """The first line from `begin` on, said or to come, for which this holds; AssertionError when none comes in
        time."""
        seen = begin
        with self._news:
            while True:
                for line in self.said[seen:]:
                    if is_it(line):
                        return line
                seen = len(self.said)
                if not self._reader.is_alive() and seen == len(self.said):
                    raise AssertionError(f"the run ended first:\n{self.text}")
                if not self._news.wait(LINE_S) and seen == len(self.said):
                    raise AssertionError(f"the run says nothing:\n{self.text}")

    def wait_for_iteration(self, number: int) -> None:
        """Returns when this iteration, or a later one, is done."""

        def is_it(line: str) -> bool:
            word = line.removeprefix("iteration ").partition("/")[0]
            return line.startswith("iteration ") and word.isdigit() and int(word) >= number

        self.wait_for(is_it)

    def finish(self, timeout_s: float = 300.0) -> str:
        """Everything it said; AssertionError unless it ended well."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        assert code == 0, self.text
        return self.text

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(60)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The run stands still inside, however fast its iterations are."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def text(self) -> str:
        """All lines so far."""
        return "\n".join(self.said)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.said.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


def story(run: Path) -> Story:
    """What a run left behind, to be compared with another's."""
    import hashlib

    found = newest_checkpoint(run / "checkpoints")
    assert found is not None
    sha = hashlib.sha256((found[1] / ADAPTER_FILE).read_bytes()).hexdigest()
    # The interval of a change needs the first evaluation's scores, which a copy of checkpoints does not hold.
    told = ({name: line[name] for name in line if not name.startswith("heldout_change/")} for line in lines_of(run))
    return sha, [untimed(line) for line in told]


def events(run: Path) -> list[dict[str, Any]]:
    """What the run told about itself."""
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def require_undisturbed(run: Path, expected: Story) -> None:
    """The same weights, the same metrics, every group once, and no failed score used."""
    sha, lines = story(run)
    assert sha == expected[0]
    assert lines == expected[1]
    assert [each for each in verify(run) if not each.is_whole] == []
    assert all(line.get("reward/missing", 0) == 0 for line in lines)

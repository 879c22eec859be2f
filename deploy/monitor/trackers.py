"""Experiment trackers behind one small port: TensorBoard, Weights & Biases, or a class of your own.

A tracker works on its own thread behind a bounded queue: a slow one misses lines, a failing one is left out of the
rest of the run. Both are conditions, and neither delays the run.
"""

import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from deploy.folder.names import WANDB
from deploy.monitor.journal import TOLD, Listener
from learner.loop.evaluate import Evaluation
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError, one_line
from protocol.files import write_whole
from protocol.import_path import find_class
from protocol.sink import StatusSink

log = logging.getLogger(__name__)
LINES_WAITING = 1_000
CLOSING_S = 20.0
STARTING_S = 60.0
Values = Mapping[str, Any]


class Tracker(Protocol):
    """The interface of a tracker: `Tracker(config, folder)` begins or continues the record of this run folder."""

    def log(self, iteration: int, values: Values) -> None:
        """Record one line of metrics, names as in docs/metrics.md; numbers that are not finite are left out."""
        ...

    def close(self) -> None:
        """Write the lines that are not written yet."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run folder; `tensorboard --logdir runs` shows them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:  # noqa: ARG002
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, iteration: int, values: Values) -> None:
        """Write one summary with every number."""
        numbers = [self._summary.Value(tag=name, simple_value=number) for name, number in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=iteration, summary=self._summary(value=numbers)))

    def close(self) -> None:
        """Write the lines that are not written yet."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run in the project that the environment's WANDB_PROJECT names, or `flowcredit`.

    It is named like the folder. Its id is drawn once and kept in the run folder: a run that goes on continues it, and
    two folders of one name never share it.
    """

    @staticmethod
    def check() -> None:
        """Raise ConfigError if W&B would ask for a login."""
        import wandb  # pyright: ignore[reportMissingImports]

        is_online = os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared")
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "tracker wandb must be logged in, got no key: run `wandb login`, set WANDB_API_KEY or"
                " WANDB_MODE=offline, or leave it out of status.trackers"
            )

    def __init__(self, config: RunConfig, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        name = folder.resolve().name
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flowcredit"),
            name=name,
            id=_wandb_id(folder),
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, values: Values) -> None:
        """Log one line; the iteration is a value, so that a resumed run may repeat it."""
        self._run.log({**values, "iteration": iteration})

    def close(self) -> None:
        """Write the lines that are not written yet."""
        self._run.finish()


def _wandb_id(folder: Path) -> str:
    path = folder / WANDB
    if not path.exists():
        write_whole(path, uuid.uuid4().hex)
    found = path.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found):
        raise RunFolderError(f"{path} must hold the id of a W&B run, got {found[:64]!r}: remove it to begin a new one")
    return found


BUILT_IN: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Trackers(Listener):
    """All trackers of a run. A tracker's failure is a condition; `close` waits at most `CLOSING_S` seconds."""

    def __init__(self, config: RunConfig, folder: Path, sink: StatusSink) -> None:
        """
        Args:
            config: names the trackers.
            folder: the run folder.
            sink: is told of trackers that fail or are too slow, from their threads.
        """
        self._running = [_Running(name, config, folder, sink) for name in config.status.trackers]

    def wait_for_start(self) -> None:
        """Wait until every tracker has begun, `STARTING_S` at most.

        Raises:
            ConfigError: one cannot.
        """
        until = time.monotonic() + STARTING_S
        for tracker in self._running:
            tracker.wait_for_start(until - time.monotonic())

    def recorded(self, iteration: int, line: Values) -> None:
        """Hand an iteration's numbers to every tracker."""
        for tracker in self._running:
            tracker.put(iteration, line)

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Hand an evaluation's numbers to every tracker."""
        self.recorded(iteration, evaluation.line(iteration))

    def close(self) -> None:
        """Let the trackers write the lines that they have not written yet."""
        for tracker in self._running:
            tracker.close()


class _Running:
    def __init__(self, name: str, config: RunConfig, folder: Path, sink: StatusSink) -> None:
        self._name = name
        self._sink = sink
        self._lines: queue.Queue[tuple[int, Values] | None] = queue.Queue(LINES_WAITING)
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(config, folder), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def wait_for_start(self, seconds: float) -> None:
        try:
            self._started.result(max(0.0, seconds))
        except TimeoutError:
            self._state("Slow", f"{self._name} has not started within {STARTING_S:g} s")
        except Exception as error:
            raise ConfigError(
                f"tracker {self._name} cannot start: {one_line(error)}; mend that or leave it out of status.trackers"
            ) from error

    def put(self, iteration: int, values: Values) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._lines.put_nowait((iteration, values))
        except queue.Full:
            self._state("Slow", f"{self._name} is too slow, lines are left out")

    def close(self) -> None:
        try:
            self._lines.put(None, timeout=CLOSING_S)
        except queue.Full:
            return
        self._thread.join(CLOSING_S)

    def _work(self, config: RunConfig, folder: Path) -> None:
        try:
            tracker = find_tracker(self._name)(config, folder)
            self._started.set_result(None)
            self._state("Recording", f"{self._name} records", holds=True)
            while (line := self._lines.get()) is not None:
                iteration, values = line
                tracker.log(iteration, {k: v for k, v in values.items() if isinstance(v, int | float) and v == v})
            tracker.close()
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
            log.exception("tracker %s is left out", self._name, extra={TOLD: True})
            self._state("Failed", f"{self._name} is left out: {one_line(error)}")

    def _state(self, reason: str, message: str, *, holds: bool = False) -> None:
        self._sink.condition(f"Tracker/{self._name}", holds, reason, message)


def find_tracker(name: str) -> Any:
    """Find the class of a tracker by its name in the config.

    Raises:
        ConfigError: no such tracker, or its library is not installed.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(f"status.trackers must be {', '.join(BUILT_IN)} or package.module:Class, got {name!r}")
    try:
        return find_class(name)
    except ImportError as error:
        raise ConfigError(f"tracker {name} cannot be found: {error}") from None


def check_trackers(names: tuple[str, ...]) -> None:
    """Check before a run that every tracker can be found, is installed and passes its own `check` (ConfigError)."""
    for name in names:
        tracker = find_tracker(name)
        if name in BUILT_IN and find_spec(name) is None:
            raise ConfigError(f"tracker {name} is not installed: pip install 'flowcredit[{name}]' or leave it out")
        if check := getattr(tracker, "check", None):
            check()

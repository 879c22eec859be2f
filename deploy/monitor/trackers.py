"""Experiment trackers with one small interface: TensorBoard, Weights & Biases, MLflow, or a class of your own.

Each tracker has its own thread and a bounded queue: a slow tracker misses lines, a failed one gets no more of them.
Both are conditions, and neither delays the run.
"""

import io
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deploy.monitor.journal import IN_JOURNAL, Listener
from deploy.monitor.tracker_kinds import MLflow, TensorBoard, TrackedImage, Tracker, Values, WeightsAndBiases
from deploy.monitor.trajectories import sheet
from learner.loop.evaluate import Evaluation
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ContractError, one_line
from protocol.ground.import_path import find_class
from protocol.sink import StatusSink
from protocol.status import TrajectoryRecord
from rewards.images import encoded

log = logging.getLogger(__name__)
LINES_WAITING = 1_000
IMAGES_WAITING = 4
"""Most evaluations and records with images that may wait for a tracker: they are large."""
LARGEST = 512
"""Side of the largest image for trackers, in pixels; larger images are scaled down."""
CLOSING_S = 20.0
STARTING_S = 60.0
TrackerCall = Callable[[Tracker], None]


BUILT_IN: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


class Trackers(Listener):
    """All trackers of a run. A failure becomes a condition; `close` waits at most `CLOSING_S` seconds for each."""

    def __init__(self, config: RunConfig, folder: Path, sink: StatusSink) -> None:
        self._running = [_Running(name, config, folder, sink) for name in config.status.trackers]

    def wait_for_start(self) -> None:
        """Wait until every tracker has started, for at most `STARTING_S` seconds.

        Raises:
            ConfigError: a tracker cannot start; the others are closed.
        """
        until = time.monotonic() + STARTING_S
        try:
            for tracker in self._running:
                tracker.wait_for_start(until - time.monotonic())
        except ConfigError:
            self.close()
            raise

    def recorded(self, iteration: int, line: Values) -> None:
        """Pass an iteration's numbers to every tracker."""
        for tracker in self._running:
            tracker.put(iteration, line)

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Pass an evaluation's numbers and images to every tracker."""
        self.recorded(iteration, evaluation.line(iteration))
        if evaluation.gallery:
            self._show(iteration, lambda: list(shown_gallery(evaluation)))

    def recorded_trajectories(self, record: TrajectoryRecord) -> None:
        """Pass recorded trajectories to every tracker, drawn as one sheet."""
        self._show(record.iteration, lambda: [shown_record(record)])

    def _show(self, iteration: int, images: Callable[[], Sequence[TrackedImage]]) -> None:
        for tracker in self._running:
            tracker.put_images(iteration, images)

    def close(self) -> None:
        """Let the trackers write their pending lines."""
        for tracker in self._running:
            tracker.close()


class _Running:
    def __init__(self, name: str, config: RunConfig, folder: Path, sink: StatusSink) -> None:
        self._name = name
        self._sink = sink
        self._work: queue.Queue[TrackerCall | None] = queue.Queue(LINES_WAITING)
        self._images = threading.BoundedSemaphore(IMAGES_WAITING)
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(config, folder), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def wait_for_start(self, seconds: float) -> None:
        try:
            self._started.result(max(0.0, seconds))
        except TimeoutError:
            self._state("Slow", f"{self._name} has not started within {STARTING_S:g} s")
        except Exception as error:
            raise ConfigError(
                f"tracker {self._name} cannot start: {one_line(error)}; fix that or leave it out of status.trackers"
            ) from error

    def put(self, iteration: int, values: Values) -> None:
        finite = {k: v for k, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
        self._put(lambda tracker: tracker.log(iteration, finite))

    def put_images(self, iteration: int, images: Callable[[], Sequence[TrackedImage]]) -> None:
        def show(tracker: Tracker) -> None:
            try:
                if take := getattr(tracker, "show", None):
                    take(iteration, images())
            except ContractError as error:  # the images are at fault, not the tracker
                log.warning("images of iteration %d are not tracked: %s", iteration, error)
            finally:
                self._images.release()

        if not self._images.acquire(blocking=False):
            self._state("Slow", f"{self._name} is too slow, images are left out")
        elif not self._put(show):
            self._images.release()

    def _put(self, work: TrackerCall) -> bool:
        if not self._thread.is_alive():
            return False
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._state("Slow", f"{self._name} is too slow, lines are left out")
            return False
        return True

    def close(self) -> None:
        try:
            self._work.put(None, timeout=CLOSING_S)
        except queue.Full:
            return
        self._thread.join(CLOSING_S)

    def _run(self, config: RunConfig, folder: Path) -> None:
        try:
            tracker = find_tracker(self._name)(config, folder)
            self._started.set_result(None)
            self._state("Recording", f"{self._name} records", holds=True)
            while (work := self._work.get()) is not None:
                work(tracker)
            tracker.close()
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
            log.exception("tracker %s is left out", self._name, extra={IN_JOURNAL: True})
            self._state("Failed", f"{self._name} is left out: {one_line(error)}")

    def _state(self, reason: str, message: str, *, holds: bool = False) -> None:
        self._sink.condition(f"Tracker/{self._name}", holds, reason, message)


def shown_gallery(evaluation: Evaluation) -> Iterator[TrackedImage]:
    """Yield the images of an evaluation, each with its prompt and its score."""
    from PIL import Image

    from deploy.folder.gallery import gallery_images, side_by_side

    prompts = [prompt.text for prompt, _, _ in evaluation.gallery]
    for index, (prompt, kept) in enumerate(zip(prompts, gallery_images(evaluation.gallery), strict=True)):
        held = Image.fromarray(side_by_side(kept))
        held.thumbnail((LARGEST * held.width // kept.image.shape[1], LARGEST))
        score = kept.reading
        caption = f"{prompt} ({'no score' if score != score else f'{score:.3f}'})"
        yield TrackedImage(f"evaluation/image_{index:02d}", caption, encoded(held, "PNG"), held.size)


def shown_record(record: TrajectoryRecord) -> TrackedImage:
    """Return recorded trajectories as one image (ContractError: the record is damaged)."""
    from PIL import Image

    png = sheet(record)
    return TrackedImage("trajectories/sheet", record.prompt, png, Image.open(io.BytesIO(png)).size)


def find_tracker(name: str) -> Any:
    """Find the class of a tracker by its name in the config.

    Raises:
        ConfigError: there is no such tracker, or its library is not installed.
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
    """Check that every tracker can be found, is installed and passes its own `check` (ConfigError)."""
    for name in names:
        tracker = find_tracker(name)
        if name in BUILT_IN and find_spec(name) is None:
            raise ConfigError(f"tracker {name} is not installed: pip install 'flowcredit[{name}]' or leave it out")
        if check := getattr(tracker, "check", None):
            check()

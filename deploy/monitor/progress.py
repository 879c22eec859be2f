"""The output of a run in progress: a progress bar on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from deploy.monitor.journal import RUN_FAILED, Listener, is_news
from deploy.monitor.summary import TREND, change_words, duration, eta_s, number, step_rewards_of
from learner.loop.evaluate import Evaluation
from protocol.errors import reason_of
from protocol.status import Condition

log = logging.getLogger(__name__)

STAGES = {"rollout_and_reward": "rollout+reward", "update": "update", "publish": "publish"}


class Output:
    """Standard output of a run, which goes on when a pipe's reader ends, a terminal closes or a disk is full."""

    def __init__(self) -> None:
        self._is_lost = sys.stdout is None

    def write(self, text: str) -> int:
        """Write a text unless the output is lost."""
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush unless the output is lost."""
        self._attempt(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def _stream(self) -> TextIO:
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # rich's bar replaces it

    def _attempt(self, work: Callable[[TextIO], object]) -> None:
        if self._is_lost:
            return
        try:
            work(self._stream)
        except OSError as error:
            self._is_lost = True
            log.warning("the output of this run cannot be written any more (%s); it goes on", reason_of(error))
            sys.stdout = None  # type: ignore[assignment]  # otherwise Python flushes it at its end, and fails


class Progress(Listener):
    """Shows a run's progress; it listens to the run's journal."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `console`, by default the terminal; measure with `clock`, in seconds."""
        self._console = console or Console(file=cast(TextIO, Output()), highlight=False, soft_wrap=True)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._has_step_rewards = True
        self._clock = clock
        self._finished_at: deque[float] = deque(maxlen=TREND)

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False, emoji=False)

    @contextmanager
    def bar(self, start: int, total: int, *, has_step_rewards: bool = True) -> Iterator[None]:
        """Show the progress from iteration `start` to `total`.

        Args:
            has_step_rewards: whether to show step rewards; with uniform credit each is the reward, shown already.
        """
        self._total, self._has_step_rewards = total, has_step_rewards
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        with RichProgress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task("iteration", total=total, completed=start, numbers="")
            yield
        self._bar = None

    def condition(self, now: Condition, before: Condition | None) -> None:
        """Show a condition if it has changed; what ends the run is shown as its error."""
        if is_news(now, before) and now.reason != RUN_FAILED:
            self.say(now.message if now.status == "False" else f"{now.type}: {now.message}")

    def recorded(self, iteration: int, line: Mapping[str, Any]) -> None:
        """Show a finished iteration: reward, mean size of a step reward, KL, seconds by stage, time left."""
        seconds = ", ".join(f"{name} {line[f'seconds/{stage}']:.1f} s" for stage, name in STAGES.items())
        numbers = f"reward {number(line['reward/mean'])}"
        sizes = [value for value in step_rewards_of(line).values() if value is not None]
        if sizes and self._has_step_rewards:
            numbers += f", |step reward| {number(fmean(sizes))}"
        if (divergence := line.get("train/approx_kl")) is not None:
            numbers += f", KL {divergence:.2g}"
        numbers += f" ({seconds})"
        if line["reward/missing"]:
            numbers += f", {line['reward/missing']:.0f} scores missing"
        self._finished_at.append(self._clock())
        left_s = eta_s(self._finished_at, left=self._total - iteration)
        if self._bar is None:
            left = f", {duration(left_s)} left" if left_s else ""
            self.say(f"iteration {iteration}/{self._total}: {numbers}{left}")
        else:
            self._bar.update(self._task, completed=iteration, numbers=numbers)

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        by_tag = ", ".join(f"{tag} {number(value, '.2f')}" for tag, value in evaluation.by_tag.items())
        scorers = {name: mean for name, mean in evaluation.readings.items() if "/" not in name}
        readings = (
            "; " + ", ".join(f"{name} {number(mean, '.2f')}" for name, mean in scorers.items())
            if len(scorers) > 1
            else ""
        )
        missing = f", {evaluation.missing} without a score" if evaluation.missing else ""
        change = f", since the first one {change_words(*evaluation.change)}" if evaluation.change else ""
        self.say(
            f"held-out score at iteration {iteration}: {number(evaluation.score)}{change}"
            f" ({by_tag}{readings}; {evaluation.images} images{missing}, {evaluation.seconds:.0f} s)"
        )

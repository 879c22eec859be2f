"""One run from start to end: check everything, open the folder, start the parts, run the loop, leave a result."""

import asyncio
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.encode import encode_ahead
from deploy.progress import Progress
from deploy.run_folder import RunFolder, open_run_folder
from flow.folder import completed, read_index
from flow.lora_file import FILE_NAME
from learner.evaluate import Evaluation
from learner.loop import train
from protocol.config import RunConfig
from protocol.errors import InputError
from protocol.messages import LearnerState, Prompt
from protocol.ports import Metrics
from protocol.prompts import read_prompts
from rewards.scorer import check_prompts

if TYPE_CHECKING:
    from actors.sources import Fleet
    from deploy.local import LocalFleet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    finished: bool
    """False when it was stopped before its last iteration."""
    iteration: int
    lora: Path | None
    picture: Path | None
    before: float | None
    """Held-out score before the first iteration."""
    after: float | None
    """Held-out score of the newest evaluation."""


def run_training(config: RunConfig, *, folder: Path, is_local: bool, progress: Progress) -> Outcome:
    """Train, or go on training, in a run folder. A mistake in the input leaves no folder behind.

    Raises:
        InputError: something that the user can mend.
    """
    config = completed(config)
    prompts, heldout = check_inputs(config)
    run = open_run_folder(folder, config)
    try:
        return asyncio.run(_train(config, run, prompts, heldout, is_local=is_local, progress=progress))
    except InputError as error:
        log.error("the run ends: %s", error)
        run.discard_if_unused()
        raise
    except Exception:
        log.exception("the run failed")
        raise
    finally:
        run.close()


def check_inputs(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Train and held-out prompts, after everything that a user can get wrong has been looked at.

    Raises:
        InputError: model folder, prompt file or scorer.
    """
    read_index(config.model)
    prompts, heldout = (read_prompts(config.data, path) for path in (config.data.train, config.data.heldout))
    for reward in config.rewards.values():
        if not reward.runtime_env:
            check_prompts(reward.scorer, reward.args, [*prompts, *heldout])
    return prompts, heldout


class RunJournal:
    """Writes a run's story: metrics and checkpoints into the run folder, progress to the terminal, pictures."""

    def __init__(self, run: RunFolder, progress: Progress) -> None:
        self._run = run
        self._progress = progress
        self.iteration = 0

    def record(self, iteration: int, metrics: Metrics) -> None:
        """One iteration's numbers."""
        self.iteration = iteration
        self._run.append({"iteration": iteration, **metrics})
        self._progress.iteration(iteration, metrics)
        log.info("iteration %d done, reward %.4f", iteration, metrics["reward/mean"])

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """One evaluation, its pictures as a file."""
        from deploy.pictures import write_gallery

        with self._run.writing():
            write_gallery(self._run.samples, iteration, evaluation)
        scores = {f"evaluation/{tag}": value for tag, value in evaluation.by_tag.items()}
        self._run.append(
            {
                "iteration": iteration,
                "evaluation/score": evaluation.score,
                **scores,
                **{f"evaluation/reward/{name}": value for name, value in evaluation.readings.items()},
                "evaluation/missing": evaluation.missing,
                "seconds/evaluation": evaluation.seconds,
            }
        )
        self._progress.evaluation(iteration, evaluation)
        log.info("evaluation at iteration %d: %.4f", iteration, evaluation.score)

    def save(self, state: LearnerState) -> None:
        """A checkpoint."""
        path = self._run.save(state)
        log.info("checkpoint %s, adapter %s", path, state.weights.digest)


async def _train(
    config: RunConfig,
    run: RunFolder,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    *,
    is_local: bool,
    progress: Progress,
) -> Outcome:
    found = run.newest()
    start = found[0].step if found else 0
    run.rewind(start if found else -1)
    journal = RunJournal(run, progress)
    journal.iteration = start
    is_evaluated = start in run.evaluation_scores()
    if start < config.iterations or not is_evaluated:
        progress.say("starting " + ("in this process" if is_local else "on Ray"))
        with nullcontext() if is_local else _cluster(config), _stop_on_signal(progress) as stop:
            await encode_ahead(config, [*prompts, *heldout], is_local=is_local, say=progress.say)
            fleet = _fleet(config, is_local=is_local)
            try:
                await fleet.start()
                await fleet.check([*prompts, *heldout])
                if found:
                    await fleet.parts.learner.restore(found[0])
                    progress.say(f"going on from {found[1]}")
                with progress.bar(start, config.iterations):
                    await train(
                        config,
                        prompts=prompts,
                        heldout=heldout,
                        parts=fleet.parts,
                        journal=journal,
                        stop=stop,
                        start=start,
                        is_evaluated=is_evaluated,
                    )
            finally:
                fleet.stop()
    return _outcome(config, run, journal)


def _fleet(config: RunConfig, *, is_local: bool) -> "Fleet | LocalFleet":
    if is_local:
        from deploy.local import LocalFleet

        return LocalFleet(config)
    from actors.sources import Fleet

    return Fleet(config)


def _cluster(config: RunConfig) -> AbstractContextManager[None]:
    from deploy.cluster import ray_cluster

    return ray_cluster(config)


@contextmanager
def _stop_on_signal(progress: Progress) -> Iterator[asyncio.Event]:
    """Ctrl-C or SIGTERM: the first ends the run after the update in progress, the second at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def on_signal() -> None:
        if stop.is_set():
            main.cancel()
        else:
            progress.say("stopping with a checkpoint; once more stops at once")
            stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _outcome(config: RunConfig, run: RunFolder, journal: RunJournal) -> Outcome:
    newest = run.newest()
    scores = run.evaluation_scores()
    last = max(scores, default=0)
    return Outcome(
        finished=journal.iteration >= config.iterations,
        iteration=journal.iteration,
        lora=newest[1] / FILE_NAME if newest else None,
        picture=_before_after(run, last) if last else None,
        before=scores.get(0),
        after=scores.get(last) if last else None,
    )


def _before_after(run: RunFolder, last: int) -> Path | None:
    """None when a person has tidied the galleries away."""
    from deploy.pictures import write_before_after

    if not all((run.samples / f"iteration_{iteration:06d}.npz").exists() for iteration in (0, last)):
        return None
    with run.writing():
        return write_before_after(run.samples, first=0, last=last)

"""One run from start to end: checks the inputs, opens the folder, starts the actors, runs the loop."""

import gc
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from deploy.folder.heldout import read_heldout
from deploy.folder.names import CONFIG, TOKEN
from deploy.folder.paired import change_text
from deploy.folder.read import adapter_to_fork, require_fork_of
from deploy.folder.run_folder import RunFolder, open_run_folder
from deploy.monitor.journal import RunJournal
from deploy.monitor.observe import Observed
from deploy.monitor.progress import Progress
from deploy.monitor.summary import change_words, line_of, rewards_of
from deploy.run.encode import encode_ahead
from deploy.run.inputs import Inputs, check_inputs, concerns, local_concerns
from deploy.run.signals import StopRequest, run_to_end, stop_on_signal
from deploy.run.supervise import supervise
from deploy.run.warm.workers import warm_python
from flow.models.completed import completed
from learner.loop.groups import drawn_prompts
from learner.loop.stopping import unless_stopped
from protocol.config.run import RunConfig
from protocol.errors import InputError
from protocol.ground.files import ADAPTER_FILE, by_iteration
from protocol.messages import LearnerState
from protocol.ports import Fleet

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose inputs are checked and whose folder is open."""

    python: str | None
    """What starts the workers of a local cluster; see `deploy.run.warm.workers`."""
    run: RunFolder
    named: Path
    """The run folder as the user named it; `run` has its absolute path."""
    inputs: Inputs
    progress: Progress
    concerns: Sequence[tuple[str, str]]
    """See `deploy.run.inputs.concerns`."""
    is_local: bool
    has_page: bool
    stop: StopRequest | None

    def shown(self, path: Path) -> Path:
        """Return a path in the run folder as the user would name it."""
        return self.named / path.relative_to(self.run.path)


@dataclass(frozen=True)
class Outcome:
    finished: bool
    """False if the run was stopped before its last iteration."""
    iteration: int
    lora: Path | None
    """Absolute, as `image`: a scorer of a run in this process may have changed the working folder."""
    image: Path | None
    before: float | None
    """Held-out score before the first iteration."""
    after: float | None
    """Held-out score of the newest evaluation."""
    change: str
    """The 95 % interval of their difference, or that it may be chance; empty if it is not known."""
    diversity: str = ""
    """The diversity of the held-out images before and after, and whether it falls; empty if it is not measured."""


def run_training(
    config: RunConfig,
    *,
    folder: Path,
    fork: Path | None = None,
    is_local: bool,
    progress: Progress,
    sources: Mapping[str, str] | None = None,
    has_page: bool = False,
    stop: StopRequest | None = None,
) -> Outcome:
    """Train in a new run folder, or continue the run of a folder. After an error in the input, no new folder is left.

    Args:
        fork: another run's folder; a new run begins with its newest adapter, at iteration 0 with a new optimizer.
        sources: what set each key of the config, see `deploy.presets.sources`.
        has_page: serve the run's page on loopback during the run.

    Raises:
        InputError: a mistake that the user can correct.
        LeaseLostError: another process has taken the run over.
    """
    named, folder = folder, folder.absolute()  # a scorer in this process may change the working folder
    fork = fork and fork.absolute()
    with warm_python(config, is_local=is_local) as python:
        config = completed(config)
        inputs = check_inputs(config, is_local=is_local)
        noticed = [*concerns(config, inputs), *(local_concerns(config) if is_local else ())]
        is_new = not (folder / CONFIG).exists()
        adapter, origin = adapter_to_fork(fork, config) if fork and is_new else (None, None)
        if fork and not is_new:
            held = require_fork_of(folder, fork)
            progress.say(f"{named} already is a fork of {held.run} at iteration {held.iteration} and continues")
        if origin:
            progress.say(f"fork of {origin.run} at iteration {origin.iteration}")
        start = LearnerState(iteration=0, adapter=adapter, optimizer={}) if adapter else None
        run = open_run_folder(folder, config, fork=origin, start=start, sources=sources, say=progress.say)
        try:
            return _run(
                PreparedRun(
                    python=python,
                    run=run,
                    named=named,
                    inputs=inputs,
                    progress=progress,
                    concerns=noticed,
                    is_local=is_local,
                    has_page=has_page,
                    stop=stop,
                )
            )
        except InputError as error:
            log.error("the run ends: %s", error)
            run.discard_if_unused(is_forked=adapter is not None)
            raise
        except Exception:
            log.exception("the run failed")
            raise
        finally:
            run.close()


def _run(prepared: PreparedRun) -> Outcome:
    """Start Ray outside the event loop, where Ctrl-C ends it at once, and train."""
    run, config, say = prepared.run, prepared.run.config, prepared.progress.say
    newest = run.newest()
    start = newest[0].iteration if newest else 0
    run.rewind(start if newest else -1)
    journal = RunJournal(run, prepared.progress)
    journal.iteration = start
    if newest:
        say(f"continuing from {prepared.shown(newest[1])}")
        if changes := run.version_changes(newest[1]):
            message = f"the run may compute differently from here on: {', '.join(changes)}"
            journal.condition("SameVersions", holds=False, reason="Changed", message=message)
        if start >= config.iterations:
            say(f"{start} iterations are done, as iterations={config.iterations} demands: raise it to continue")
    if start < config.iterations or start not in run.evaluation_scores():
        say("starting " + ("in this process" if prepared.is_local else "on Ray") + f"; {config.mixture}")
        for kind, message in prepared.concerns:
            journal.condition(kind, holds=False, reason="Noticed", message=message)
        with nullcontext() if prepared.is_local else _cluster(prepared, journal):
            run_to_end(_train(prepared, journal, newest[0] if newest else None))
        run.require_writer()
    return _outcome(run, journal)


async def _train(prepared: PreparedRun, journal: RunJournal, resume_from: LearnerState | None) -> None:
    run, config, progress = prepared.run, prepared.run.config, prepared.progress
    with stop_on_signal(progress.say, within_s=config.cluster.stop_within_s, request=prepared.stop) as stop:
        if not prepared.is_local:
            from actors.rewards.readiness import require_ready_on_ray

            await require_ready_on_ray(config)
        groups = config.iterations * config.group.per_iteration
        asked = [*drawn_prompts(prepared.inputs.prompts, groups, seed=config.seed), *prepared.inputs.heldout]
        await encode_ahead(config, asked, is_local=prepared.is_local, say=progress.say)
        fleet = _fleet(config, journal, is_local=prepared.is_local)
        journal.actors = fleet.actors
        try:
            async with Observed(run, fleet, journal, stop) as observed:
                if prepared.has_page and (address := observed.open_page()):
                    progress.say(f"page      {address}  (its controls ask for the token in {prepared.named / TOKEN})")
                await unless_stopped(stop, fleet.start())
                if stop.is_set():
                    return
                await fleet.check(prepared.inputs.all_prompts)
                start = resume_from.iteration if resume_from else 0
                observed.reporter.begin(start)
                gc.freeze()  # these objects live until the end; without it, collections would delay the loop
                with progress.bar(start, config.iterations, has_step_rewards=config.credit.rule != "uniform"):
                    await supervise(
                        config,
                        run=run,
                        fleet=fleet,
                        journal=journal,
                        prompts=prepared.inputs.prompts,
                        heldout=prepared.inputs.heldout,
                        stop=stop,
                        between=observed.control.between,
                        observer=observed,
                        resume_from=resume_from,
                    )
        finally:
            fleet.stop()


def _fleet(config: RunConfig, journal: RunJournal, *, is_local: bool) -> Fleet:
    if is_local:
        from deploy.run.local import LocalFleet

        return LocalFleet(config, journal)
    from actors.fleet import RayFleet

    return RayFleet(config, journal)


def _cluster(prepared: PreparedRun, journal: RunJournal) -> AbstractContextManager[None]:
    from deploy.run.cluster import ray_cluster

    return ray_cluster(prepared.run.config, journal, prepared.python)


def _outcome(run: RunFolder, journal: RunJournal) -> Outcome:
    newest = run.newest()
    scores = run.evaluation_scores()
    last = max(scores, default=0)
    return Outcome(
        finished=journal.iteration >= run.config.iterations,
        iteration=journal.iteration,
        lora=newest[1] / ADAPTER_FILE if newest else None,
        image=_before_after(run, last) if last else None,
        before=scores.get(0),
        after=scores.get(last) if last else None,
        change=_change(run),
        diversity=_diversity(run),
    )


def _change(run: RunFolder) -> str:
    interval = rewards_of([line_of(number, values) for number, values in enumerate(run.lines())]).heldout_change
    return change_words(*interval) if interval else ""


def _diversity(run: RunFolder) -> str:
    name, held = run.config.diversity_reading, read_heldout(run.path)
    return change_text(held[0], held[-1], name) if name and len(held) > 1 else ""


def _before_after(run: RunFolder, last: int) -> Path | None:
    """Draw the first and the last gallery; return None if one of them was removed or is damaged."""
    from deploy.folder.gallery import write_before_after

    if not {0, last} <= by_iteration(run.gallery, ".npz").keys():
        return None
    try:
        with run.writing():
            return write_before_after(run.gallery, first=0, last=last, diversity=run.config.diversity_reading)
    except ValueError as error:
        log.warning("the images before and after are not drawn: %s", error)
        return None

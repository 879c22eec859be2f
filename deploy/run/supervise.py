"""Continues a run after its learner failed: starts another one, restores the newest checkpoint, repeats iterations.

All randomness of an iteration is keyed by its number, so repeated iterations give the same bits. Rollout and reward
actors are not restarted: they hold no state that a repetition depends on.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from actors.pool.restarts import RestartBudget
from deploy.folder.heldout import read_heldout
from deploy.folder.read import evaluation_means
from deploy.folder.run_folder import RunFolder
from learner.loop.groups import Observer
from learner.loop.hacking import Measured
from learner.loop.loop import BetweenIterations, Journal, no_pause, train
from learner.loop.stopping import unless_stopped
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from protocol.messages import LearnerState, Prompt
from protocol.ports import Fleet

FAILURES_PER_ITERATION = 3
"""Number of learner failures in one iteration that ends the run: a restart does not fix a reproducible failure."""


async def supervise(
    config: RunConfig,
    *,
    run: RunFolder,
    fleet: Fleet,
    journal: Journal,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    stop: asyncio.Event,
    between: BetweenIterations = no_pause,
    observer: Observer | None = None,
    resume_from: LearnerState | None,
) -> None:
    """Train to the end, or until `stop` is set.

    Args:
        fleet: the run's actors; the learner is restarted if it fails.
        journal: receives failures, and everything that the loop reports.
        stop: event that ends the run after the update in progress.
        between: awaited between two iterations; it may pause the loop.

    Raises:
        LearnerFailedError: `FAILURES_PER_ITERATION` learners failed in one iteration.
        PoolError: the learner used up `cluster.max_restarts`.
    """
    cluster = config.cluster
    budget = RestartBudget("the learner", limit=cluster.max_restarts, within_s=cluster.restart_window_s)
    failures: Counter[int] = Counter()
    while True:
        try:
            if failures:
                await fleet.restart_learner()
                budget.succeed()
                journal.condition("LearnerReady", holds=True, reason="Restarted", message="the learner works again")
            if resume_from:
                await fleet.ports.learner.restore(resume_from)
            done = resume_from.iteration if resume_from else 0
            means = evaluation_means(run.path)
            readings = {
                held.iteration: {name: held.table(name) for name in held.scores} for held in read_heldout(run.path)
            }
            return await train(
                config,
                prompts=prompts,
                heldout=heldout,
                ports=fleet.ports,
                journal=journal,
                stop=stop,
                between=between,
                observer=observer,
                resume_from=resume_from,
                is_evaluated=done in means,
                evaluated=[
                    Measured(
                        iteration,
                        readings.get(iteration, {}),
                        {name: math.nan if mean is None else mean for name, mean in each.items()},
                    )
                    for iteration, each in means.items()
                    if iteration <= done  # later iterations are repeated and reported again
                ],
            )
        except LearnerFailedError as error:
            reached = max((line["iteration"] for line in run.lines()), default=0)
            failures[reached] += 1
            if failures[reached] >= FAILURES_PER_ITERATION:
                raise LearnerFailedError(
                    f"{error}; iteration {reached + 1} failed with {FAILURES_PER_ITERATION} learners, so the run ends:"
                    " if memory is short, make group.shard or the model smaller; the same command continues from the"
                    " checkpoint"
                ) from error
            pause_s = budget.spend(str(error))
            newest = run.newest()
            resume_from = newest[0] if newest else None
            again = resume_from.iteration if resume_from else 0
            message = f"{error}; a new one continues from iteration {again}"
            journal.event(message, "learner_failed")
            journal.condition("LearnerReady", holds=False, reason="Failed", message=message)
            await unless_stopped(stop, asyncio.sleep(pause_s))
            if stop.is_set():
                return None
            run.rewind(again)

"""Keeping a run going when its learner is lost: a new learner, the newest checkpoint, and the same iterations again.

Everything that an iteration depends on is keyed by its number, so what is repeated is repeated bit for bit. The rest
of the fleet goes on: rollout and reward actors hold no state that a repetition could miss.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from actors.pool.restarts import RestartBudget
from deploy.folder.run_folder import RunFolder
from learner.loop.groups import Observer
from learner.loop.loop import Journal, Rest, no_rest, train
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from protocol.messages import LearnerState, Prompt
from protocol.ports import Fleet

log = logging.getLogger(__name__)
FAILURES_PER_ITERATION = 3
"""Learners that one iteration may cost: what kills every learner, such as too little memory, is no accident."""


async def supervise(
    config: RunConfig,
    *,
    run: RunFolder,
    fleet: Fleet,
    journal: Journal,
    prompts: Sequence[Prompt],
    heldout: Sequence[Prompt],
    stop: asyncio.Event,
    rest: Rest = no_rest,
    observer: Observer | None = None,
    resume_from: LearnerState | None,
) -> None:
    """Train to the end, or until `stop`; `resume_from` is the checkpoint that the run goes on from.

    Raises:
        LearnerFailedError: one iteration cost `FAILURES_PER_ITERATION` learners.
        PoolError: the learner used up `cluster.max_restarts`.
    """
    losses = LearnerFailures(config)
    is_lost = False
    while True:
        try:
            if is_lost:
                await fleet.restart_learner()
                journal.condition("LearnerReady", holds=True, reason="Restarted", message="the learner works again")
            if resume_from:
                await fleet.ports.learner.restore(resume_from)
            return await train(
                config,
                prompts=prompts,
                heldout=heldout,
                ports=fleet.ports,
                journal=journal,
                stop=stop,
                rest=rest,
                observer=observer,
                resume_from=resume_from,
                is_evaluated=(resume_from.iteration if resume_from else 0) in run.evaluation_scores(),
            )
        except LearnerFailedError as error:
            pause_s = losses.bear(error, reached=max((line["iteration"] for line in run.lines()), default=0))
            is_lost, resume_from = True, _newest(run)
            again = resume_from.iteration if resume_from else 0
            _tell(journal, f"{error}; a new one goes on from iteration {again}")
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
            if stop.is_set():
                return None
            run.rewind(again)


class LearnerFailures:
    """How many learners a run has lost, and how many it may lose."""

    def __init__(self, config: RunConfig) -> None:
        cluster = config.cluster
        self._budget = RestartBudget("the learner", limit=cluster.max_restarts, within_s=cluster.restart_window_s)
        self._at: Counter[int] = Counter()

    def bear(self, error: LearnerFailedError, *, reached: int) -> float:
        """Seconds to wait before the next learner; `reached` is the last iteration that was done.

        Raises:
            LearnerFailedError: one iteration cost `FAILURES_PER_ITERATION` learners.
            PoolError: the learner used up `cluster.max_restarts`.
        """
        self._at[reached] += 1
        if self._at[reached] >= FAILURES_PER_ITERATION:
            raise LearnerFailedError(
                f"{error}; iteration {reached + 1} cost {FAILURES_PER_ITERATION} learners and is given up: if memory"
                " is short, make group.shard or the model smaller; the same command goes on from the checkpoint"
            ) from error
        return self._budget.spend(str(error))


def _tell(journal: Journal, message: str) -> None:
    journal.event(message, "learner_failed")
    journal.condition("LearnerReady", holds=False, reason="Lost", message=message)


def _newest(run: RunFolder) -> LearnerState | None:
    newest = run.newest()
    return newest[0] if newest else None

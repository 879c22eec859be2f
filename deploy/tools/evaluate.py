"""Scoring held-out prompts once, in this process: the base model, or a run's newest adapter."""

import asyncio
from pathlib import Path

from deploy.folder.same_config import require_same
from deploy.run.local import LocalFleet
from deploy.run.run import check_inputs
from flow.models.folder import completed
from learner.checkpoint import newest_checkpoint
from learner.loop.evaluate import Evaluation, evaluate
from protocol.config.run import RunConfig
from protocol.errors import RunFolderError


def assess(config: RunConfig, run: Path | None) -> Evaluation:
    """The evaluation of `config` with the newest adapter of the folder `run`, or with none.

    Raises:
        RunFolderError: `run` holds no checkpoint, or its adapter was trained in another `model`.
        InputError: something else that the user can mend.
    """
    config = completed(config)
    _, heldout = check_inputs(config)
    found = newest_checkpoint(run / "checkpoints") if run else None
    if run and found is None:
        raise RunFolderError(f"run folder {run} must hold a checkpoint, got none")
    if run:
        require_same(run, config, section="model.", remedy="give the run's own values")

    async def once() -> Evaluation:
        fleet = LocalFleet(config)
        try:
            await fleet.start()
            if found:
                await fleet.restore(found[0])
            adapter = await fleet.adapter()
            if found and found[0].average and config.evaluation.adapter == "average":
                adapter = found[0].average
            await fleet.publish(adapter)
            return await evaluate(
                config, prompts=heldout, ports=fleet.ports, version=adapter.version, digest=adapter.digest
            )
        finally:
            fleet.stop()

    return asyncio.run(once())

"""Scoring held-out prompts once, in this process: the base model, or a run's newest adapter."""

from pathlib import Path

from deploy.folder.read import checkpoint_of, config_of, require_same
from deploy.run.inputs import check_inputs
from deploy.run.local import LocalFleet
from deploy.run.signals import run_to_end
from flow.models.folder import completed
from learner.loop.evaluate import Evaluation, evaluate
from protocol.config.run import RunConfig


def assess(config: RunConfig, run: Path | None) -> Evaluation:
    """Evaluate `config` once with the newest adapter of the run folder `run`, or with the base model.

    Raises:
        RunFolderError: `run` holds no checkpoint, or its adapter was trained in another `model`.
        InputError: another mistake that the user can correct.
    """
    config = completed(config)
    _, heldout = check_inputs(config, is_local=True)
    if run:
        require_same(run, config_of(run), config, section="model.", remedy="give the run's own values")
    found = checkpoint_of(run) if run else None

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
            return await evaluate(config, prompts=heldout, ports=fleet.ports, adapter=adapter)
        finally:
            fleet.stop()

    return run_to_end(once())

"""Beginning a new run with another run's adapter."""

from dataclasses import replace
from pathlib import Path

from deploy.folder.same_config import CONFIG, require_same
from learner.checkpoint import newest_checkpoint
from protocol.config.run import RunConfig
from protocol.errors import CheckpointError, RunFolderError
from protocol.messages import Adapter


def weights_to_fork(source: Path, folder: Path, config: RunConfig) -> Adapter | None:
    """The newest adapter of the run `source` as version 0; None when `folder` is a run already and just goes on.

    Raises:
        RunFolderError: no whole checkpoint there, or its adapter was trained in another `model`.
    """
    if (folder / CONFIG).exists():
        return None
    require_same(source, config, section="model.", remedy="a fork keeps the model and its adapter's shape")
    try:
        found = newest_checkpoint(source / "checkpoints")
    except CheckpointError as error:
        raise RunFolderError(f"run folder {source} cannot be forked: {error}") from None
    if found is None:
        raise RunFolderError(f"run folder {source} must hold a checkpoint to be forked, got none")
    return replace(found[0].adapter, version=0)

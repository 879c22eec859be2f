"""Reading a run folder that another command made: its config, and one of its checkpoints."""

from pathlib import Path

import yaml

from deploy.folder.run_folder import CONFIG
from learner.checkpoint import newest_checkpoint, read_checkpoint
from protocol.config.load import parse_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError, one_line
from protocol.messages import Adapter, LearnerState


def config_of(run: Path) -> RunConfig:
    """The config that a run folder keeps.

    Raises:
        RunFolderError: no run folder, or its config cannot be read.
    """
    try:
        return parse_config(yaml.safe_load((run / CONFIG).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunFolderError(
            f"run folder {run} must hold {CONFIG}, got none: give the folder that `train` made"
        ) from None
    except (OSError, UnicodeDecodeError, TypeError, yaml.YAMLError, ConfigError) as error:
        raise RunFolderError(f"run folder {run} holds no readable {CONFIG}: {one_line(error)}") from None


def average_of(state: LearnerState, run: Path) -> Adapter:
    """The running mean of a checkpoint's adapter.

    Raises:
        RunFolderError: the run keeps none.
    """
    if state.average is None:
        raise RunFolderError(
            f"run folder {run} keeps no running mean: set learner.average.decay, or leave --average out"
        )
    return state.average


def checkpoint_of(run: Path, iteration: int | None) -> tuple[LearnerState, Path]:
    """A run's checkpoint of this iteration, or its newest.

    Raises:
        RunFolderError: it has none, or not this one.
        CheckpointError: it is damaged.
    """
    root = run / "checkpoints"
    if iteration is not None:
        folder = root / f"iteration_{iteration:06d}"
        if not folder.is_dir():
            held = sorted(each.name for each in root.glob("iteration_*"))
            raise RunFolderError(f"run folder {run} must hold the checkpoint {folder.name}, got {held}")
        return read_checkpoint(folder), folder
    found = newest_checkpoint(root)
    if found is None:
        raise RunFolderError(f"run folder {run} must hold a checkpoint, got none")
    return found

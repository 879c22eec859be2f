"""The paths of run folders, outside a Ray job and in one.

| process of the run         | without `--run`               | `--run runs/NAME`     | `--run /a/path` |
|----------------------------|-------------------------------|-----------------------|-----------------|
| outside a Ray job          | `runs/PRESET`                 | `runs/NAME`           | `/a/path`       |
| in a Ray job               | `RUNS/PRESET-` and 8 digits   | `RUNS/NAME`           | `/a/path`       |

`RUNS` is `FLOWCREDIT_RUNS`, or `~/flowcredit/runs` of the node on which the job's driver runs. The current folder of a
job is Ray's copy of the working directory, which Ray deletes together with the package. The digits are a digest of all
config keys that may change a result: the same command finds its run again, another config gets a folder of its own.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.folder.names import CONFIG
from deploy.presets import find_preset
from protocol.errors import RunFolderError
from protocol.ground.addresses import shown_source
from protocol.ground.resources import resolve

if TYPE_CHECKING:
    from protocol.config.run import RunConfig

RUNS = "runs"
RUNS_VARIABLE = "FLOWCREDIT_RUNS"
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the driver of a job."""
STOP_VARIABLE, STOP_WAIT_S = "RAY_JOB_STOP_WAIT_TIME_S", 3
"""Seconds between `ray job stop` and the kill; Ray's default."""


def job_id() -> str | None:
    """Return the submission id of the Ray job whose driver this process is, None outside a job."""
    held = _of_job("metadata", "job_submission_id")
    return held if isinstance(held, str) else None


def job_variables() -> dict[str, str]:
    """Return the environment variables that were sent with the Ray job whose driver this process is."""
    return _of_job("runtime_env", "env_vars") or {}


def _of_job(part: str, name: str) -> Any:
    try:
        return json.loads(os.environ.get(JOB_VARIABLE, ""))[part][name]
    except (ValueError, KeyError, TypeError):
        return None


def runs_folder() -> Path:
    """Return the folder of runs: FLOWCREDIT_RUNS, in a Ray job `~/flowcredit/runs`, anywhere else `runs`.

    Raises:
        ConfigError: this user has no such home folder, or may not look there.
    """
    if given := os.environ.get(RUNS_VARIABLE):
        return resolve(given)
    return resolve(f"~/flowcredit/{RUNS}") if job_id() else Path(RUNS)


def job_name(preset: str, config: "RunConfig") -> str:
    """Name the run of a preset in a Ray job for which no `--run` is given."""
    deciding = json.dumps(config.outcome_fields(), sort_keys=True)
    return f"{preset}-{hashlib.sha256(deciding.encode()).hexdigest()[:8]}"


def default_folder(preset: str | Path, config: "RunConfig") -> Path:
    """Return the run folder of a preset for which no `--run` is given."""
    name = find_preset(preset).stem
    return runs_folder() / (job_name(name, config) if job_id() else name)


def folder_named(run: Path) -> Path:
    """Return the run folder that a `--run` names.

    Raises:
        RunFolderError: in a Ray job, a path that leads out of the folder of runs.
    """
    if job_id() is None or run.is_absolute():
        return run
    below = Path(*run.parts[1:]) if run.parts[:1] == (RUNS,) else run
    if ".." in below.parts or not below.parts:
        raise RunFolderError(f"--run must be a name or an absolute path in a Ray job, got {run}: name it runs/NAME")
    return runs_folder() / below


def found_run(run: str) -> Path:
    """Return the folder of a run, given its path or its name in the folder of runs.

    A folder without a config, such as `flowcredit init` makes, does not hide a run of its name.

    Raises:
        RunFolderError: there is none.
    """
    given, named = Path(run), runs_folder() / run
    folder = next((each for each in (given, named) if (each / CONFIG).is_file()), given if given.is_dir() else named)
    if not folder.is_dir():
        shown = shown_source(run)
        raise RunFolderError(
            f"there is no run folder {shown} and no {runs_folder()}/{shown}: give one of these; FLOWCREDIT_BOARD names"
            " the board of a run elsewhere"
        )
    return folder


def is_folder_of_runs(folder: Path) -> bool:
    """Tell whether a folder is no run itself, but a run is in it."""
    return not (folder / CONFIG).is_file() and any(folder.glob(f"*/{CONFIG}"))


def stop_grace_s() -> int:
    """Return the seconds between `ray job stop` and Ray's kill of this job's process."""
    given = os.environ.get(STOP_VARIABLE, "")
    return int(given) if given.isdigit() else STOP_WAIT_S


def stop_wait_s(config: "RunConfig") -> int:
    """Return the seconds that a job needs to stop: for the update in progress, the checkpoint and its copy."""
    from deploy.folder.mirror import CLOSE_S

    return math.ceil(config.cluster.stop_within_s + CLOSE_S)

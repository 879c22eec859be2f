"""Submits a `train` to a Ray cluster as a job.

Only the dependencies must be installed on the cluster: the job is sent with the working directory, and with the
project's packages if they are not in that directory.
"""

import logging
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.folder.location import RUNS_VARIABLE, STOP_VARIABLE, job_name, stop_wait_s
from deploy.presets import PRESETS, find_preset, load_config, preset_files, read_tree
from flowcredit.packages import PACKAGES as OURS
from protocol.errors import ConfigError, one_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

log = logging.getLogger(__name__)
ROOT = PRESETS.parents[1]
"""The folder that holds the project's packages."""
PACKAGES = ("flowcredit", *OURS)
EXCLUDES = ("/runs/", "/images/", ".git/", ".venv/", "venv/", "__pycache__/")
"""Files of a working directory that are not sent, besides what its .gitignore and .rayignore name."""
MIB = 1024**2
ZIP_BYTES = 76
"""What a zip archive stores about a file, besides its name twice; Ray does not compress."""

CHATTY = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")
"""Loggers of Ray that set their own levels."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A `train` command to submit."""

    preset: str
    overrides: Sequence[str] = ()
    run: str | None = None
    """Name of the run, or its folder as an absolute path on the cluster."""
    fork: str | None = None
    working_dir: Path = field(default_factory=Path)
    runtime_env: Path | None = None
    """YAML file of a Ray runtime environment to extend: pip, conda, image_uri …"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the job."""
    id: str | None = None
    """Submission id; Ray makes one for None."""

    def run_name(self) -> str:
        if self.run:
            return self.run
        config = load_config(self._local_preset(), overrides=self.overrides)
        return job_name(find_preset(self.preset).stem, config)

    def fetched_as(self) -> str:
        """Return what `flowcredit fetch` takes: the path if the job's environment names a folder of runs."""
        runs, name = self.environment()["env_vars"].get(RUNS_VARIABLE), self.run_name()
        return f"{runs}/{name.removeprefix('runs/')}" if runs and not Path(name).is_absolute() else name

    def entrypoint(self) -> str:
        """Return the command that the cluster runs, in its copy of the working directory."""
        words = ["python", "-m", "flowcredit", "train", self.preset, *self.overrides]
        words += ["--run", self.run] if self.run else []
        words += ["--fork", self.fork] if self.fork else []
        return shlex.join(words)

    def environment(self) -> dict[str, Any]:
        """Return the runtime environment of the job.

        Raises:
            ConfigError: there is no such working directory, the preset is outside it, or the config or the file of the
                environment is wrong.
        """
        if not self.working_dir.is_dir():
            raise ConfigError(f"--working-dir must be a folder, got {self.working_dir}")
        config = load_config(self._local_preset(), overrides=self.overrides)
        base = self._given_environment()
        variables = {STOP_VARIABLE: str(stop_wait_s(config))} | base.get("env_vars", {})
        made = {
            "working_dir": str(self.working_dir.resolve()),
            "excludes": [*EXCLUDES, *base.get("excludes", ())],
            "env_vars": variables | dict(self.variables),
        }
        if not (self.working_dir / "flowcredit" / "start.py").is_file():
            made["py_modules"] = [str(ROOT / name) for name in PACKAGES] + base.get("py_modules", [])
        return base | made

    def _given_environment(self) -> dict[str, Any]:
        if self.runtime_env is None:
            return {}
        from deploy.run.inputs import require_environment

        base = {key: value for key, value in read_tree(self.runtime_env).items() if value is not None}
        require_environment(base, f"--runtime-env {self.runtime_env}")
        return base

    def _local_preset(self) -> Path:
        """Find the preset; the user's own, with all that it extends, must be in the working directory.

        Raises:
            ConfigError: one is not.
        """
        found = find_preset(self.preset)
        if found.parent == PRESETS:
            return found
        path = self.working_dir / found
        if found.is_absolute() or not self._is_sent(path):
            raise self._not_sent(found)
        for file, _ in preset_files(path):
            if file.parent != PRESETS and not self._is_sent(file):
                raise self._not_sent(file)
        return path

    def _is_sent(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.working_dir.resolve())

    def _not_sent(self, path: Path) -> ConfigError:
        return ConfigError(
            f"the preset must be a path in the working directory {self.working_dir.resolve()}, got {path}:"
            " only that directory is sent with the job"
        )


def require_small(environment: Mapping[str, Any]) -> None:
    """Check that Ray's job server takes the files of a job's working directory.

    Raises:
        ConfigError: they are too large.
    """
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes  # Ray has no public function for this

    folder, sizes = Path(environment["working_dir"]), Counter[str]()

    def count(path: Path) -> None:
        if path.is_file():
            name = path.relative_to(folder)
            sizes[name.parts[0]] += path.stat().st_size + ZIP_BYTES + 2 * len(str(name))

    _dir_travel(folder, [_get_excludes(folder, environment["excludes"])], count, include_gitignore=True, logger=log)
    if sizes.total() > DASHBOARD_CLIENT_MAX_SIZE:
        largest = ", ".join(f"{name} ({size / MIB:.0f} MiB)" for name, size in sizes.most_common(3))
        raise ConfigError(
            f"the working folder {folder} must have at most {DASHBOARD_CLIENT_MAX_SIZE / MIB:.0f} MiB, which is all"
            f" that Ray takes with a job, got {sizes.total() / MIB:.0f} MiB: name what the job does not need in its"
            f" .rayignore; largest: {largest}"
        )


@contextmanager
def cluster_errors(address: str | None) -> Iterator[None]:
    """Turn an error of the job server or of the connection into one line.

    Raises:
        ConfigError: the server does not answer, or refuses the request.
    """
    from ray.exceptions import RayError

    where = address or "RAY_API_SERVER_ADDRESS, RAY_ADDRESS or this machine"
    try:
        yield
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"the Ray cluster at {where} does not accept jobs: {one_line(error)};"
            " check --address (http://HEAD:8265) and Ray's token (RAY_AUTH_MODE, ~/.ray/auth_token)"
        ) from None


def connect(address: str | None) -> "JobSubmissionClient":
    """Connect to the job server of a cluster.

    Raises:
        ConfigError: the server does not answer, or refuses the token.
    """
    from ray.job_submission import JobSubmissionClient

    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    with cluster_errors(address):
        return JobSubmissionClient(address)


def submit_run(client: "JobSubmissionClient", submission: Submission, address: str | None) -> str:
    """Submit a run.

    Args:
        address: address of the cluster, for the error.

    Raises:
        ConfigError: the config or the working directory is wrong, or the cluster does not accept jobs.
    """
    environment = submission.environment()
    with cluster_errors(address):
        return client.submit_job(
            entrypoint=submission.entrypoint(),
            runtime_env=environment,
            metadata={"run": submission.run_name()},
            submission_id=submission.id,
        )

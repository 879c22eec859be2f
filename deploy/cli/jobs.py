"""The commands for a remote cluster: `submit` and `fetch`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import Overrides, Preset
from protocol.errors import ConfigError
from protocol.ground.addresses import BOARD_VARIABLE, secrets_among

KEPT = (BOARD_VARIABLE, "HF_TOKEN", "WANDB_API_KEY")
"""Variables that a run reads and that may hold a secret: a job has the cluster's values."""
Address = Annotated[
    str | None,
    typer.Option(help="Job server, http://HEAD:8265; default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, this machine."),
]


def submit(
    preset: Preset,
    overrides: Overrides = None,
    address: Address = None,
    run: Annotated[str | None, typer.Option(help="Name of the run, or an absolute path on the head.")] = None,
    fork: Annotated[str | None, typer.Option(help="Run on the head whose adapter a new run starts from.")] = None,
    working_dir: Annotated[
        Path,
        typer.Option(
            help="Folder that is uploaded with the job, at most 100 MiB, without runs/, images/, .git, .venv and what"
            " .gitignore and .rayignore name."
        ),
    ] = Path(),
    runtime_env: Annotated[
        Path | None, typer.Option(help="YAML file of a Ray runtime environment to add to: pip, image_uri …")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, or NAME for this machine's value, in the job's environment; repeatable."),
    ] = None,
    identity: Annotated[str | None, typer.Option("--id", help="Submission id; default: Ray makes one.")] = None,
    is_waiting: Annotated[bool, typer.Option("--wait", help="Show the log; end with the run's exit code.")] = False,
) -> None:
    """Submit a `train` to a Ray cluster, after a check of its config; the same command again resumes the run."""
    from deploy.jobs.follow import follow
    from deploy.jobs.submit import Submission, connect, require_small, submit_run

    submission = Submission(
        preset=preset,
        overrides=overrides or (),
        run=run,
        fork=fork,
        working_dir=working_dir,
        runtime_env=runtime_env,
        variables=_variables(env or []),
        id=identity,
    )
    environment = submission.environment()  # finds mistakes in the input before the cluster is asked
    require_small(environment)
    if secrets := secrets_among(environment["env_vars"]):
        from deploy.run.inputs import SENT_SECRETS

        typer.echo(f"note: {', '.join(secrets)}: {SENT_SECRETS}", err=True)
    if kept := [name for name in KEPT if name in os.environ and name not in environment["env_vars"]]:
        typer.echo(f"note: {', '.join(kept)} not sent: a job has what was set where `ray start` ran", err=True)
    client = connect(address)
    job = submit_run(client, submission, address)
    at = f" --address {address}" if address else ""
    typer.echo(f"job       {job}")
    typer.echo(f"run       {submission.run_name()}")
    if is_waiting:
        try:
            raise typer.Exit(follow(client, job, say=lambda text: typer.echo(text, nl=False)))
        except KeyboardInterrupt:
            typer.echo(f"\njob {job} goes on; `ray job stop{at} {job}` stops it")
            raise
    typer.echo(f"follow    ray job logs --follow{at} {job}")
    typer.echo(f"stop      ray job stop{at} {job}")
    typer.echo(f"fetch     flowcredit fetch{at} {shlex.quote(submission.fetched_as())}")


def fetch(
    run: Annotated[
        str, typer.Argument(help="Name of a run on the cluster's head, its absolute path there, or a checkpoint.url.")
    ],
    address: Address = None,
    into: Annotated[Path | None, typer.Option(help="Folder to create; default: runs/NAME.")] = None,
) -> None:
    """Fetch a run's newest checkpoint, metrics and images to this machine.

    A small job sends them in its log, so it needs only the port of jobs. They make a run folder, which `serve`,
    `generate`, `eval` and `export` take.
    """
    from deploy.folder.location import runs_folder
    from deploy.jobs.fetch import fetch as fetch_run
    from protocol.ground.files import ADAPTER_FILE, by_iteration
    from protocol.status import run_id_of

    folder = fetch_run(run, into or runs_folder() / run_id_of(run.rstrip("/").rsplit("/", 1)[-1]), address=address)
    for checkpoint in list(by_iteration(folder / "checkpoints").values())[-1:]:
        typer.echo(f"LoRA      {checkpoint / ADAPTER_FILE}")
    if (image := folder / "gallery" / "before_after.png").exists():
        typer.echo(f"images    {image}")
    typer.echo(f"page      flowcredit serve {folder}")


def _variables(given: list[str]) -> dict[str, str]:
    """Read `--env`; a name alone takes the value of this machine (ConfigError: it has none)."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigError(f"--env must be NAME=VALUE, or the NAME of a variable that is set here, got {each!r}")
        found[name] = value if equals else os.environ[name]
    return found

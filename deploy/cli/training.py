"""The commands that train: `train`, `demo`."""

import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import IsLocal, Overrides, complete_preset, source_and_words
from deploy.folder.location import (
    STOP_VARIABLE,
    default_folder,
    folder_named,
    job_id,
    runs_folder,
    stop_grace_s,
    stop_wait_s,
)
from deploy.folder.names import CONFIG
from deploy.presets import METHOD, load_config, sources
from protocol.errors import ConfigError
from protocol.ground.addresses import EMBEDDED, OFF, without_password

if TYPE_CHECKING:
    from protocol.config.run import RunConfig

DEMO = (
    "evaluation.every=8",
    "evaluation.shown=48",
    "rewards.diversity={scorer: diversity, sees: group, use: evaluate, args: {model: pkg://toyworld/clip}}",
)
"""What the demo adds to its preset: a curve of the held-out score, an image of each held-out prompt, and diversity."""
COMPARED = ("flow_grpo_fast", "stepwise")
"""Methods that a dry run compares the run with: the published baseline, whose other keys it lists, and the paper's."""
HasPage = Annotated[bool, typer.Option("--page/--no-page", help="Serve the run's page on loopback while it runs.")]


def train(
    preset: Annotated[
        str | None,
        typer.Argument(
            help="Name of a preset, or path of a YAML file; default: the config of the run that --run holds.",
            autocompletion=complete_preset,
        ),
    ] = None,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder; default: runs/PRESET, in a Ray job ~/flowcredit/runs/PRESET-DIGEST of its driver's node."
            " An existing run is resumed."
        ),
    ] = None,
    fork: Annotated[Path | None, typer.Option(help="Run whose newest adapter a new run starts from.")] = None,
    is_local: IsLocal = False,
    has_page: HasPage = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, estimate costs, write nothing.")] = False,
    tflops: Annotated[
        float | None,
        typer.Option(
            help="With --dry-run: TFLOP/s that a device achieves (`doctor --measure`); adds seconds (7 % of an"
            " iteration for publication and waiting) and GPU-hours.",
            min=1e-6,
            max=1e9,
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run: a GPU such as H100. 20 % of its bf16 peak is used as --tflops, and its memory must"
            " hold each role."
        ),
    ] = None,
) -> None:
    """Train a preset in a run folder, or resume the run that the folder already holds.

    Without a preset, the run's own config is used, so its overrides need not be repeated.
    """
    folder = run and folder_named(run)
    source, words = source_and_words(preset, overrides, folder, "or --run with a run to resume")
    config = load_config(source, overrides=words)
    rate = _rate(tflops, card)
    if is_dry:
        source_run = fork and folder_named(fork)
        others = _by_method(source, words) if rate else {}
        _dry_run(config, folder, others=others, fork=source_run, is_local=is_local, tflops=rate, card=card)
        return
    if rate:
        raise ConfigError("--tflops and --card belong to an estimate: add --dry-run, or leave them out")
    folder = folder or default_folder(source, config)
    found = sources(source, overrides=words)
    _train(config, folder, sources=found, fork=fork and folder_named(fork), is_local=is_local, has_page=has_page)


def demo(overrides: Overrides = None, is_local: IsLocal = False, has_page: HasPage = True) -> None:
    """Train the toy world and show held-out scores and images before and after."""
    words = [*DEMO, *(overrides or [])]
    folder = runs_folder() / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    found = sources("toy_geneval", overrides=words)
    _train(load_config("toy_geneval", overrides=words), folder, sources=found, is_local=is_local, has_page=has_page)


def program() -> str:
    """Return what the user types for this program: after `make demo` the shell finds it only by its path."""
    called = sys.argv[0]
    return called if Path(called).name == "flowcredit" and not shutil.which("flowcredit") else "flowcredit"


def _train(
    config: "RunConfig",
    folder: Path,
    *,
    sources: Mapping[str, str],
    fork: Path | None = None,
    is_local: bool,
    has_page: bool,
) -> None:
    from deploy.monitor.progress import Progress
    from deploy.monitor.summary import number
    from deploy.run.run import run_training

    progress = Progress()
    home = folder.absolute()
    if job := job_id():
        _announce_job(job, config, folder, say=progress.say)
    outcome = run_training(
        config,
        folder=folder,
        fork=fork,
        sources=sources,
        is_local=is_local,
        has_page=has_page,
        progress=progress,
    )
    if outcome.before is not None and outcome.after is not None:
        change = f" ({outcome.change})" if outcome.change else ""
        progress.say(f"held-out score before {number(outcome.before)}, after {number(outcome.after)}{change}")
    if outcome.diversity:
        progress.say(outcome.diversity)
    if outcome.lora is not None:
        progress.say(f"LoRA      {folder / outcome.lora.relative_to(home)}")
    if outcome.image is not None:
        progress.say(f"images    {folder / outcome.image.relative_to(home)}")
    progress.say(f"page      {program()} serve {folder}")
    if job_id():
        progress.say(f"fetch     flowcredit fetch {home}  (on your machine, with the job's --address)")
    if not outcome.finished:
        progress.say(f"stopped at iteration {outcome.iteration} of {config.iterations}; the same command continues")


def _announce_job(job: str, config: "RunConfig", folder: Path, *, say: Callable[[str], None]) -> None:
    """Say where a job keeps its run, where it is watched, and how to stop it if Ray might kill it too early."""
    from protocol.config.status import board_address

    say(f"job       {job}")
    say(f"run       {folder} on {socket.gethostname()}")
    if (board := board_address(config.status)) == EMBEDDED:
        say("board     only on that machine; for others set FLOWCREDIT_BOARD where `ray start` runs")
    elif board != OFF:
        say(f"board     {without_password(board)}")
    grace_s, needed_s = stop_grace_s(), stop_wait_s(config)
    if grace_s < config.cluster.stop_within_s:
        say(
            f"`ray job stop` kills this job after {grace_s} s, perhaps before its checkpoint: stop it with"
            f" `flowcredit stop`, or set {STOP_VARIABLE}={needed_s} in its env_vars or where `ray start` runs"
        )


def _rate(tflops: float | None, card: str | None) -> float | None:
    from deploy.tools.measure import assumed_tflops

    if tflops and card:
        raise ConfigError(f"--tflops and --card exclude each other, got {tflops:g} and {card!r}: leave one out")
    return assumed_tflops(card) if card else tflops


def _by_method(source: str | Path, words: Sequence[str]) -> "dict[str, RunConfig]":
    """Return the config with each method of `COMPARED`, if it can be laid over it."""
    found = {}
    for name in COMPARED:
        try:
            found[name] = load_config(
                source, overrides=[*(word for word in words if word.partition("=")[0] != METHOD), f"{METHOD}={name}"]
            )
        except ConfigError as error:
            typer.echo(f"note: the estimate leaves out method={name}: {error}")
    return found


def _dry_run(
    config: "RunConfig",
    run: Path | None,
    *,
    others: "Mapping[str, RunConfig]",
    fork: Path | None,
    is_local: bool,
    tflops: float | None,
    card: str | None,
) -> None:
    """Show everything that is known before a run; print an error for each problem that would prevent it."""
    from deploy.folder.read import adapter_to_fork, require_fork_of
    from deploy.folder.run_folder import require_same_run, require_usable
    from deploy.run.inputs import (
        concerns,
        environment_problems,
        gpu_problems,
        label_problems,
        local_concerns,
        read_inputs,
        reward_problems,
    )
    from deploy.tools.estimate import estimate
    from deploy.tools.memory import fit_problems
    from deploy.tools.planning.plan import difference_lines, method_lines, plan_lines
    from flow.models.completed import completed_for_estimate

    asked = config.model.path, config.model.tiny_decoder
    config, missing_model = completed_for_estimate(config)
    inputs = read_inputs(config)
    if run:
        require_usable(run)
    held = run if run and (run / CONFIG).exists() else None
    if fork and held:
        require_fork_of(held, fork)
    elif fork:
        adapter_to_fork(fork, config)
    if held and not missing_model:
        require_same_run(held, config)
        typer.echo(f"{held} already holds this run; training would resume it")
    typer.echo(f"{len(inputs.prompts)} prompts to train on, {len(inputs.heldout)} held out; {config.mixture}")
    for _, message in (*concerns(config, inputs), *(local_concerns(config) if is_local else ())):
        typer.echo(f"note: {message}")
    if (config.model.path, config.model.tiny_decoder) != asked:
        typer.echo("note: this estimate takes the model's config files that flowcredit ships")
    prompts, heldout = inputs.prompts, inputs.heldout
    found = estimate(
        config,
        prompts=len(inputs.all_prompts),
        conditions=max(len(prompt.conditions) for prompt in inputs.all_prompts),
    )
    for line in plan_lines(config, found, prompts=len(prompts), heldout=len(heldout), tflops=tflops):
        typer.echo(line)
    same = {name: other.model_copy(update={"model": config.model}) for name, other in others.items()}
    if tflops and same:
        typer.echo("")
        for line in method_lines(config, found, same, heldout=len(heldout), tflops=tflops):
            typer.echo(line)
    baseline = COMPARED[0]
    if baseline in same:
        typer.echo("")
        for line in difference_lines(config, baseline, same[baseline]):
            typer.echo(line)
    problems = [
        *([missing_model] if missing_model else ()),
        *gpu_problems(config),
        *(() if is_local else (*label_problems(config), *environment_problems(config))),
        *fit_problems(config, found, card=card),
        *reward_problems(config, inputs.all_prompts, is_local=is_local),
    ]
    for problem in problems:
        typer.echo(f"flowcredit: {problem}", err=True)
    if problems:
        raise typer.Exit(2)

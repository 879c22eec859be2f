"""The commands that train and evaluate: `train`, `demo`, `eval`."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import IsJson, Iteration, Overrides, complete_preset
from deploy.folder.location import default_name, job_id, placed, runs_folder, stop_grace_s, stop_wait_s
from deploy.folder.names import CONFIG
from deploy.presets import find_preset, load_config
from protocol.errors import ConfigError
from protocol.files import require_folder_of

if TYPE_CHECKING:
    from deploy.tools.evaluate import Assessed
    from protocol.config.run import RunConfig

HasPage = Annotated[bool, typer.Option("--page/--no-page", help="Serve the run's page on loopback while it runs.")]
IsLocal = Annotated[bool, typer.Option("--local", help="Run in one process without Ray; the results are the same.")]


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
            " An existing run is continued."
        ),
    ] = None,
    fork: Annotated[Path | None, typer.Option(help="Run whose newest adapter a new run starts from.")] = None,
    is_local: IsLocal = False,
    has_page: HasPage = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, estimate costs, write nothing.")] = False,
    tflops: Annotated[
        float | None,
        typer.Option(help="With --dry-run: TFLOP/s that a GPU really does; adds seconds and GPU-hours.", min=0.001),
    ] = None,
) -> None:
    """Train a preset in a run folder; continue the run that the folder already holds.

    Without a preset the run's own config is taken, so its overrides need not be repeated.
    """
    source, words = _source(preset, overrides or [], run, "or --run with a run to go on with")
    config = load_config(source, overrides=words)
    if is_dry:
        _dry_run(config, run and placed(run), is_local=is_local, tflops=tflops)
        return
    folder = placed(run) if run else None
    if folder is None:
        folder = runs_folder() / default_name(find_preset(source).stem, config, is_job=job_id() is not None)
    _train(config, folder, fork=fork and placed(fork), is_local=is_local, has_page=has_page)


def demo(overrides: Overrides = None, is_local: IsLocal = False, has_page: HasPage = True) -> None:
    """Train the toy world and show held-out scores and images before and after."""
    config = load_config("toy_geneval", overrides=overrides or [])
    _train(config, runs_folder() / f"demo-{datetime.now():%Y%m%d-%H%M%S}", is_local=is_local, has_page=has_page)


def evaluate(
    preset: Annotated[
        str | None,
        typer.Argument(
            help="Name of a preset, or path of a YAML file; default: the config of --run.",
            autocompletion=complete_preset,
        ),
    ] = None,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option(help="Run whose newest adapter is evaluated; default: no adapter.")
    ] = None,
    iteration: Iteration = None,
    has_base: Annotated[bool, typer.Option("--base", help="Score the base model too, at the same noise.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="File with the prompts, instead of data.heldout; all of its kinds count.")
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(help="A further scorer, NAME or NAME=package.module:Class; repeatable. It adds readings."),
    ] = None,
    is_geneval: Annotated[
        bool,
        typer.Option(
            "--geneval", help="GenEval's protocol: all kinds of prompts, 4 images of each, mean of the kinds."
        ),
    ] = False,
    diversity: Annotated[
        str | None,
        typer.Option(
            metavar="CLIP",
            help="Measure how a prompt's images differ: 1 - cosine of this CLIP's image features, mean over pairs.",
        ),
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="PNG to write with some of the images, base and adapter.")] = None,
    is_json: IsJson = False,
) -> None:
    """Score held-out prompts, with the base model, the adapter of a run, or both with paired intervals."""
    from deploy.tools.evaluate import assess, document, write_images

    if grid:
        require_folder_of(grid, "--grid")
    source, words = _source(preset, overrides or [], run, "or --run")
    added = _added(load_config(source, overrides=words), prompts, scorer or [], is_geneval=is_geneval)
    config = load_config(source, overrides=[*added, *words])
    results = assess(config, run and placed(run), iteration=iteration, has_base=has_base, features=diversity)
    if is_json:
        typer.echo(json.dumps(document(results, diversity), indent=1))
    else:
        for line in _evaluation_lines(results, diversity):
            typer.echo(line)
    if grid:
        typer.echo(f"images    {write_images(results, grid)}", err=is_json)


def _source(preset: str | None, overrides: list[str], run: Path | None, other: str) -> tuple[str | Path, list[str]]:
    """Return a preset, or the config of a run for which none is named, and the overrides."""
    if preset is not None and "=" in preset and not preset.endswith((".yaml", ".yml")):
        preset, overrides = None, [preset, *overrides]  # a command without a preset begins with an override
    if preset is not None:
        return preset, overrides
    if run is None:
        raise ConfigError(f"a preset must be named, {other}: `flowcredit presets` lists them")
    from deploy.folder.read import config_of

    config_of(placed(run))  # its error names the remedy for a key of another version
    return placed(run) / CONFIG, overrides


def _added(config: "RunConfig", prompts: Path | None, scorers: list[str], *, is_geneval: bool) -> list[str]:
    """Return what options change in a config, as overrides."""
    added = []
    if prompts:
        added += [f"data.heldout={json.dumps(str(prompts))}", "data.tags=[]"]
    for entry in scorers:
        name, _, path = entry.partition("=")
        if name in config.rewards:
            raise ConfigError(f"--scorer must have a name of its own, got {name!r}, a reward of this config: rename it")
        added += [f"rewards.{name}.scorer={json.dumps(path or name)}", f"rewards.{name}.use=evaluate"]
    if is_geneval:
        named = [name for name, reward in config.rewards.items() if reward.scorer == "geneval"]
        if not named:
            raise ConfigError(
                f"--geneval needs a reward with the scorer geneval, got {sorted(config.rewards)}: add one"
            )
        added += ["data.tags=[]", "evaluation.images_per_prompt=4", f"evaluation.component={named[0]}/correct"]
    return added


def _evaluation_lines(results: Sequence["Assessed"], features: str | None) -> Iterator[str]:
    from deploy.tools.evaluate import differences

    found = [each.evaluation for each in results]
    width = max(14, *(len(f"reward/{name}") for each in found for name in each.readings))
    between = differences(results)
    if len(results) > 1:
        yield f"{'':{width}} " + "  ".join(f"{each.name:>7}" for each in results) + "  difference, 95 %"

    def line(name: str, values: Sequence[float], kind: str = "") -> str:
        shown = f"{name:{width}} " + "  ".join(f"{value:>{7 if len(values) > 1 else 0}.3f}" for value in values)
        if each := between.get(kind):
            shown += f"  {each.value:+.3f} [{each.low:+.3f}, {each.high:+.3f}]"
        return shown

    for tag in found[0].by_tag:
        yield line(tag, [each.by_tag[tag] for each in found], tag)
    for name in found[0].readings:
        yield line(f"reward/{name}", [each.readings[name] for each in found])
    if features:
        yield line("diversity", [each.diversity or 0.0 for each in results]) + f"  (1 - cosine of {features})"
    counts = ", ".join(f"{each.images} images, {each.missing} without a score" for each in found)
    yield line("overall", [each.score for each in found], "all kinds") + f"  ({counts})"


def _train(config: "RunConfig", folder: Path, *, fork: Path | None = None, is_local: bool, has_page: bool) -> None:
    from deploy.monitor.progress import Progress
    from deploy.run.run import run_training

    progress = Progress()
    if job := job_id():
        _announce_job(job, config, folder, say=progress.say)
    outcome = run_training(config, folder=folder, fork=fork, is_local=is_local, has_page=has_page, progress=progress)
    if outcome.before is not None and outcome.after is not None:
        progress.say(f"held-out score before {outcome.before:.3f}, after {outcome.after:.3f}")
    if outcome.lora is not None:
        progress.say(f"LoRA      {outcome.lora}")
    if outcome.image is not None:
        progress.say(f"images    {outcome.image}")
    progress.say(f"page      flowcredit serve {folder}")
    if job_id():
        progress.say(f"fetch     flowcredit fetch {folder.absolute()}  (on your machine, with the job's --address)")
    if not outcome.finished:
        progress.say(f"stopped at iteration {outcome.iteration} of {config.iterations}; the same command continues")


def _announce_job(job: str, config: "RunConfig", folder: Path, *, say: Callable[[str], None]) -> None:
    """Say where a job keeps its run, and how to stop it if Ray would kill it before its checkpoint."""
    say(f"job       {job}")
    say(f"run       {folder} on {socket.gethostname()}")
    grace_s, needed_s = stop_grace_s(), stop_wait_s(config)
    if grace_s < config.cluster.stop_within_s:
        say(
            f"`ray job stop` kills this job after {grace_s} s, maybe before its checkpoint: stop it with"
            f" `flowcredit stop`, or submit it with `flowcredit submit` or RAY_JOB_STOP_WAIT_TIME_S={needed_s}"
            " in its env_vars"
        )


def _dry_run(config: "RunConfig", run: Path | None, *, is_local: bool, tflops: float | None) -> None:
    """Show everything that can be known before a run; end with an error for each thing that would stop it."""
    from deploy.folder.run_folder import require_same_run
    from deploy.run.inputs import concerns, gpu_problems, local_concerns, memory_problems, read_inputs, reward_problems
    from deploy.tools.balance import advice
    from deploy.tools.estimate import estimate
    from flow.models.folder import completed_for_estimate

    config, missing_model = completed_for_estimate(config)
    prompts, heldout = read_inputs(config)
    if run and (run / CONFIG).exists() and not missing_model:
        require_same_run(run, config)
        typer.echo(f"{run} holds a run of this config and would go on")
    typer.echo(f"{len(prompts)} prompts to train on, {len(heldout)} held out")
    for _, message in (*concerns(config, prompts, heldout), *(local_concerns(config) if is_local else ())):
        typer.echo(f"note: {message}")
    if missing_model:
        typer.echo("note: this estimate takes the model's config files that flowcredit ships")
    found = estimate(config)
    for line in (*found.lines(), *advice(config, found.evaluations, tflops=tflops)):
        typer.echo(line)
    problems = [
        *([missing_model] if missing_model else ()),
        *gpu_problems(config),
        *memory_problems(config, found.shared),
        *reward_problems(config, [*prompts, *heldout], is_local=is_local),
    ]
    for problem in problems:
        typer.echo(f"flowcredit: {problem}", err=True)
    if problems:
        raise typer.Exit(2)

"""The commands that train and evaluate: `train`, `demo`, `eval`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import Overrides, Preset
from deploy.presets import find_preset, load_config
from protocol.config.run import RunConfig

HasPage = Annotated[bool, typer.Option("--page/--no-page", help="Serve the run's page on loopback while it runs.")]
IsLocal = Annotated[bool, typer.Option("--local", help="Run in one process without Ray; the results are the same.")]


def train(
    preset: Preset,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder; default: runs/PRESET. An existing run is continued.")
    ] = None,
    fork: Annotated[Path | None, typer.Option(help="Run whose newest adapter a new run starts from.")] = None,
    is_local: IsLocal = False,
    has_page: HasPage = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, estimate costs, write nothing.")] = False,
) -> None:
    """Train a preset in a run folder; continue the run that the folder already holds."""
    config = load_config(preset, overrides=overrides or [])
    if is_dry:
        _dry_run(config)
        return
    folder = run or Path("runs") / find_preset(preset).stem
    _train(config, folder, fork=fork, is_local=is_local, has_page=has_page)


def demo(overrides: Overrides = None, is_local: IsLocal = False, has_page: HasPage = True) -> None:
    """Train the toy world and show held-out scores and images before and after."""
    config = load_config("toy_geneval", overrides=overrides or [])
    _train(config, Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}", is_local=is_local, has_page=has_page)


def evaluate(
    preset: Preset,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option(help="Run whose newest adapter is evaluated; default: no adapter.")
    ] = None,
) -> None:
    """Score the held-out prompts of a preset, with the base model or the newest adapter of a run."""
    from deploy.tools.evaluate import assess

    result = assess(load_config(preset, overrides=overrides or []), run)
    for tag, value in result.by_tag.items():
        typer.echo(f"{tag:14} {value:.3f}")
    for name, value in result.readings.items():
        typer.echo(f"{'reward/' + name:14} {value:.3f}")
    typer.echo(f"{'overall':14} {result.score:.3f}  ({result.images} images, {result.missing} without a score)")


def _train(config: RunConfig, folder: Path, *, fork: Path | None = None, is_local: bool, has_page: bool) -> None:
    from deploy.monitor.progress import Progress
    from deploy.run.run import run_training

    progress = Progress()
    outcome = run_training(config, folder=folder, fork=fork, is_local=is_local, has_page=has_page, progress=progress)
    if outcome.before is not None and outcome.after is not None:
        progress.say(f"held-out score before {outcome.before:.3f}, after {outcome.after:.3f}")
    if outcome.lora is not None:
        progress.say(f"LoRA      {outcome.lora}")
    if outcome.image is not None:
        progress.say(f"images    {outcome.image}")
    progress.say(f"page      flowcredit serve {folder}")
    if not outcome.finished:
        progress.say(f"stopped at iteration {outcome.iteration} of {config.iterations}; the same command continues")


def _dry_run(config: RunConfig) -> None:
    from deploy.run.inputs import check_inputs
    from deploy.tools.estimate import estimate
    from flow.models.folder import completed

    config = completed(config)
    prompts, heldout = check_inputs(config)
    typer.echo(f"{len(prompts)} prompts to train on, {len(heldout)} held out")
    for line in estimate(config).lines():
        typer.echo(line)

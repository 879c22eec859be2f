"""The command line: `flowcredit …`, the same as `python -m deploy …`.

Exit codes: 0 done or stopped cleanly, 1 the run failed, 2 a mistake in the input (one line on stderr), 130 stopped at
once by a second Ctrl-C.
"""

import asyncio
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli import checks as cli_reliability
from deploy.cli import status as cli_status
from deploy.cli.methods import register as register_method_commands
from deploy.cli.models import dry_run
from deploy.cli.models import register as register_model_commands
from deploy.cli.rewards import register as register_rewards
from deploy.presets import find_preset, load_config
from protocol.config.run import RunConfig
from protocol.errors import FlowcreditError, InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune flow-matching text-to-image models with stepwise credit.",
)
cli_reliability.register(app)
register_rewards(app)
STOPPED = "stopped at once; `train` goes on from the newest checkpoint"
Overrides = Annotated[list[str] | None, typer.Argument(help="Config overrides, e.g. group.size=16 seed=3.")]
HasPage = Annotated[bool, typer.Option("--page/--no-page", help="Serve the run's page on loopback while it goes.")]
IsLocal = Annotated[bool, typer.Option("--local", help="One process without Ray: the same results, for debugging.")]


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or path of a YAML file.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/PRESET. One that exists goes on.")] = None,
    fork: Annotated[Path | None, typer.Option(help="Another run, whose newest weights a new run begins with.")] = None,
    is_local: IsLocal = False,
    has_page: HasPage = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, estimate costs, write nothing.")] = False,
) -> None:
    """Train a preset in a run folder; on an existing run folder go on where it stopped."""
    path = find_preset(preset)
    config = load_config(path, overrides=overrides or [])
    if is_dry:
        dry_run(config)
        return
    _train(config, run or Path("runs") / path.stem, fork=fork, is_local=is_local, has_page=has_page)


@app.command()
def demo(overrides: Overrides = None, is_local: IsLocal = False, has_page: HasPage = True) -> None:
    """Train the toy world with stepwise gains and show held-out scores and images before and after."""
    config = load_config("toy_geneval", overrides=overrides or [])
    _train(config, Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}", is_local=is_local, has_page=has_page)


cli_status.register(app)


@app.command("eval")
def evaluate(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or path of a YAML file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder whose newest LoRA is evaluated; default: no LoRA.")
    ] = None,
) -> None:
    """Score the held-out prompts of a preset, with the base model or a run's newest adapter."""
    from deploy.tools.evaluate import assess

    config = load_config(preset, overrides=overrides or [])
    result = assess(config, run)
    for tag, value in result.by_tag.items():
        typer.echo(f"{tag:14} {value:.3f}")
    for name, value in result.readings.items():
        typer.echo(f"{'reward/' + name:14} {value:.3f}")
    typer.echo(f"{'overall':14} {result.score:.3f}  ({result.images} images, {result.missing} without a score)")


register_model_commands(app)
register_method_commands(app)


def main() -> None:
    """Run the command line; mistakes in the input end in one line and exit code 2."""
    _quieten()
    try:
        app(standalone_mode=True)
    except InputError as error:
        sys.exit(_complain(str(error), 2))
    except FlowcreditError as error:
        sys.exit(_complain(str(error), 1))
    except asyncio.CancelledError:
        sys.exit(_complain(STOPPED, 130))
    except SystemExit as ended:
        if ended.code == 130:  # typer's wordless answer to Ctrl-C
            _complain(STOPPED, 130)
        raise


def _complain(message: str, code: int) -> int:
    typer.echo(f"flowcredit: {message}", err=True)
    return code


def _train(config: RunConfig, folder: Path, *, fork: Path | None = None, is_local: bool, has_page: bool) -> None:
    from deploy.cli.progress import Progress
    from deploy.run.run import run_training

    progress = Progress()
    outcome = run_training(config, folder=folder, fork=fork, is_local=is_local, has_page=has_page, progress=progress)
    if outcome.before is not None and outcome.after is not None:
        progress.say(f"held-out score before {outcome.before:.3f}, after {outcome.after:.3f}")
    if outcome.lora is not None:
        progress.say(f"LoRA      {outcome.lora}")
    if outcome.image is not None:
        progress.say(f"images  {outcome.image}")
    progress.say(f"page      flowcredit serve {folder}")
    if not outcome.finished:
        progress.say(f"stopped at iteration {outcome.iteration} of {config.iterations}; the same command goes on")


def _quieten() -> None:
    """Keep other libraries' notices about themselves away from the user's terminal."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray|diffusers|transformers|torch")

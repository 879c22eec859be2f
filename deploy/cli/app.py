"""The command line: `flowcredit …`, the same as `python -m deploy …`.

Exit codes: 0 done or stopped cleanly, 1 the run failed, 2 a mistake in the input (one line on stderr), 130 stopped at
once by a second Ctrl-C.
"""

import asyncio
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deploy.cli import checks, jobs, methods, models, reports, rewards, status, training
from flowcredit.start import own_version
from protocol.errors import FlowcreditError, InputError

STOPPED = "stopped at once; `train` continues from the newest checkpoint"
COMMANDS = {
    "train": training.train,
    "demo": training.demo,
    "submit": jobs.submit,
    "fetch": jobs.fetch,
    "eval": training.evaluate,
    "report": reports.report,
    "compare": reports.compare,
    "generate": models.generate,
    "export": models.export,
    "encode": models.encode,
    "methods": methods.methods,
    "calibrate-noise": methods.calibrate_noise,
    "scorers": rewards.scorers,
    "serve-rewards": rewards.serve_rewards,
    "serve": status.serve,
    "status": status.status,
    "scale": status.scale,
    "pause": status.pause,
    "resume": status.resume,
    "checkpoint": status.checkpoint,
    "stop": status.stop,
    "doctor": checks.doctor,
    "verify": checks.verify,
}
"""All commands by name, in the order of `flowcredit --help`."""


class Command(TyperCommand):
    """A command whose help shows a flag as `--local`, without a value."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """List the parameters, flags without a value."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def about(
    has_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Fine-tune flow-matching text-to-image models with credit for every denoising step."""
    if has_version:
        typer.echo(f"flowcredit {own_version()}")
        raise typer.Exit


for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)


def main() -> None:
    """Run the command line; an error of ours ends in one line on stderr and an exit code."""
    # Other libraries' notices about themselves are not for the user's terminal.
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray|diffusers|transformers|torch")
    try:
        app(standalone_mode=True)
    except FlowcreditError as error:
        _end(str(error), 2 if isinstance(error, InputError) else 1)
    except asyncio.CancelledError:
        _end(STOPPED, 130)
    except SystemExit as ended:
        if ended.code == 130:  # typer's wordless answer to Ctrl-C
            _end(STOPPED, 130)
        raise


def _end(message: str, code: int) -> None:
    typer.echo(f"flowcredit: {message}", err=True)
    sys.exit(code)

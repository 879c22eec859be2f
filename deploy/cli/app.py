"""The command line: `flowcredit …`, the same as `python -m flowcredit …`.

Exit codes: 0 done or stopped cleanly, 1 the run failed, 2 a mistake in the input (one line on stderr), 130 stopped at
once by a second Ctrl-C.
"""

import asyncio
import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from deploy.cli import checks, configs, jobs, models, prompts, reports, rewards, status, training
from deploy.cli.options import BETWEEN
from deploy.run.unfinished import end_process_if_left
from flowcredit.packages import VERSION
from protocol.errors import FlowcreditError, InputError, printable, reason_of

CONTINUES = "; `train` continues from the newest checkpoint"
TRAINING = ("train", "demo")
CLOSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path that this user cannot use, such as a run in another user's private folder."""
USAGE: Any = typer.BadParameter.__base__
"""What typer raises for words that a command does not take; it has no public name."""
GROUPS: dict[str, dict[str, tuple[Any, str]]] = {
    "Train": {
        "demo": (training.demo, ""),
        "train": (training.train, "toy_geneval --run runs/mine seed=3 group.size=16"),
        "init": (configs.init, "mine"),
        "config": (configs.config, "toy_geneval method=tp_grpo group.size=16"),
        "presets": (configs.presets, ""),
        "methods": (configs.methods, "--json"),
        "scorers": (rewards.scorers, ""),
        "prompts": (prompts.prompts, "geneval --count 50000 --seed 0 --out geneval.jsonl"),
    },
    "Look": {
        "serve": (status.serve, "runs"),
        "status": (status.status, "runs/mine --watch"),
        "report": (reports.report, "runs/seed_0 runs/seed_1 runs/other --out report.html"),
        "compare": (reports.compare, "runs/tree_0 runs/tree_1 -- runs/flow_0 runs/flow_1"),
        "evidence": (reports.evidence, "runs/mine --out evidence --device '8 x H100'"),
        "eval": (reports.evaluate, "runs/mine --base --best --out evaluation"),
        "generate": (models.generate, 'runs/mine "a red circle" --count 8'),
        "export": (models.export, "runs/mine merged/"),
    },
    "Control": {
        "pause": (status.pause, "runs/mine"),
        "resume": (status.resume, "runs/mine"),
        "checkpoint": (status.checkpoint, "runs/mine"),
        "scale": (status.scale, "runs/mine rollout 3"),
        "stop": (status.stop, "runs/mine"),
    },
    "Cluster": {
        "submit": (jobs.submit, "toy_geneval --run mine --address http://HEAD:8265"),
        "fetch": (jobs.fetch, "mine --address http://HEAD:8265"),
        "serve-rewards": (rewards.serve_rewards, "ocr pickscore --host 0.0.0.0 --token-file token"),
    },
    "Tools": {
        "doctor": (checks.doctor, "toy_geneval"),
        "verify": (checks.verify, "runs/mine"),
        "encode": (models.encode, "sd35_pickscore model.embedding_cache=runs/embeddings"),
        "calibrate-noise": (configs.calibrate_noise, "toy_geneval --out calibrated.yaml"),
    },
}
"""All commands by name, in the groups and the order of `flowcredit --help`, each with the arguments of an example."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class CliCommand(TyperCommand):
    """A command whose help shows a flag as `--local`, without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """List the parameters, flags without a value."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class TwoGroups(CliCommand):
    """A command with `--` between two groups of words; click takes `--` away, so it becomes `BETWEEN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [BETWEEN if each == "--" else each for each in args])


class Commands(TyperGroup):
    """The commands; a word that none of them takes is a mistake in the input, in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command (InputError: an unknown option); without any word, show the help."""
        if not args:
            return super().parse_args(ctx, args)
        with _usage_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the words name (InputError: they name none, or it does not take them)."""
        with _usage_in_one_line(ctx):
            return super().invoke(ctx)


@contextmanager
def _usage_in_one_line(ctx: Any) -> Iterator[None]:
    try:
        yield
    except USAGE as error:
        where = error.ctx.command_path if error.ctx else ctx.command_path
        message = " ".join(error.format_message().split()).rstrip(".")
        raise InputError(f"{message} ({_as_key(error) or f'see `{where} --help`'})") from None


def _as_key(error: Any) -> str:
    """Say how a config key is written that was given as an option; empty if none is meant."""
    from protocol.config.parse import WORDS
    from protocol.config.reference import sections

    word = (getattr(error, "option_name", None) or "").lstrip("-").replace("-", "_")
    known = [key.key for section in sections() for key in section.keys]
    meant = [key for key in known if word and word in (key, key.rpartition(".")[2])]
    keys = [word] if word in known else list(WORDS.get(word, meant))
    return f"keys of the config have no dashes: write {' or '.join(f'{key}=…' for key in keys[:3])}" if keys else ""


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def about(
    has_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Fine-tune flow-matching text-to-image models with credit for every denoising step."""
    if has_version:
        typer.echo(f"flowcredit {VERSION}")
        raise typer.Exit


for panel, commands in GROUPS.items():
    for name, (command, words) in commands.items():
        kind, example = TwoGroups if name == "compare" else CliCommand, f"Example: flowcredit {name} {words}".rstrip()
        app.command(name, cls=kind, epilog=example, rich_help_panel=panel)(command)


def main() -> None:
    """Run the command line; an error of ours ends in one line on stderr and an exit code."""
    try:
        _main()
    except SystemExit as ended:
        end_process_if_left(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


def _main() -> None:
    # Other libraries' notices about themselves are not for the user's terminal.
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray|diffusers|transformers|torch")
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # in a fork, the stream may belong to a pipe that it took for a file
            sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that know no arrows
    try:
        app(prog_name="flowcredit")
    except asyncio.CancelledError:
        _end(_stopped(), 130)
    except SystemExit as ended:
        if ended.code == 130:  # typer ends so after Ctrl-C, without a message
            _end(_stopped(), 130)
        raise
    except FlowcreditError as error:
        _end(str(error), 2 if isinstance(error, InputError) else 1)
    except OSError as error:
        if error.errno in CLOSED and error.filename is not None:
            _end(f"{str(error.filename)[:200]!r} cannot be used: {reason_of(error)}; name another path", 2)
        raise


def _stopped() -> str:
    is_training = sys.argv[1:2] and sys.argv[1] in TRAINING and "--dry-run" not in sys.argv
    return "stopped at once" + (CONTINUES if is_training else "")


def _end(message: str, code: int) -> None:
    typer.echo(f"flowcredit: {printable(message)}", err=True)
    sys.exit(code)

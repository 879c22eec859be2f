"""flowcredit as a library: `import flowcredit` offers the names in this module.

    import flowcredit

    outcome = flowcredit.train("toy_geneval", {"iterations": 5}, run="runs/mine", is_local=True)
    run = flowcredit.read_run("runs/mine")

Each function works in a script and in a notebook, where an event loop is already running. `train_async` and
`evaluate_async` do not block that loop.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import Console

from deploy.folder.location import default_folder, folder_named, found_run
from deploy.folder.read import source_of
from deploy.monitor.progress import Progress
from deploy.presets import Overrides, load_config, sources
from deploy.report import runs as report_runs
from deploy.report.compare import Comparison
from deploy.report.compare import compare as comparison_of
from deploy.report.runs import Run
from deploy.run.run import Outcome, run_training
from deploy.run.signals import StopRequest, run_to_end
from deploy.tools.evaluate import Assessed, assess
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError

P = ParamSpec("P")
Result = TypeVar("Result")


def train(
    preset: str | Path | None = None,
    overrides: Overrides = (),
    *,
    run: str | Path | None = None,
    fork: str | Path | None = None,
    is_local: bool = False,
    is_quiet: bool = False,
) -> Outcome:
    """Train a preset in a run folder, or continue the run in that folder; return at the end of the run.

    An interrupt (Ctrl-C, "interrupt the kernel") ends the run; the same call continues it from its newest checkpoint.

    Args:
        preset: name of a preset or path of a YAML file; None takes the config of the run in `run`.
        overrides: values by dotted key, such as `{"group.size": 16}`, or texts `key=value`; `method` is a key too.
        run: the run folder; `runs/PRESET` if it is left out.
        fork: a run whose newest adapter a new run starts from.
        is_local: run in this process without Ray; the results are the same.
        is_quiet: print nothing.

    Returns:
        Held-out scores before and after, and the paths of the LoRA and of images.

    Raises:
        InputError: a mistake that you can correct, described in one line.
        FlowcreditError: the run failed.
    """
    return _training(preset, overrides, run, fork, is_local=is_local, is_quiet=is_quiet)()


async def train_async(
    preset: str | Path | None = None,
    overrides: Overrides = (),
    *,
    run: str | Path | None = None,
    fork: str | Path | None = None,
    is_local: bool = False,
    is_quiet: bool = False,
) -> Outcome:
    """Train as `train` does, in a thread, without blocking the caller's event loop.

    If the awaiting task is cancelled, the run stops with a checkpoint within `cluster.stop_within_s`, and then the task
    ends. A second cancellation stops the run at once.

    Raises:
        InputError: see `train`.
        FlowcreditError: see `train`.
    """
    stop = StopRequest()
    work = partial(_training(preset, overrides, run, fork, is_local=is_local, is_quiet=is_quiet), stop=stop)
    done = asyncio.get_running_loop().run_in_executor(None, work)
    is_cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            is_cancelled = True
            stop.send()
    if is_cancelled:
        done.exception()  # it has been seen: the caller no longer asks for the outcome
        raise asyncio.CancelledError
    return done.result()


async def evaluate_async(
    run: str | Path | None = None,
    preset: str | Path | None = None,
    overrides: Overrides = (),
    *,
    iteration: int | None = None,
    is_best: bool = False,
    has_base: bool = False,
    adapter_share: float = 1.0,
    features: str | None = None,
    is_local: bool = False,
) -> list[Assessed]:
    """Score held-out prompts with a run's adapter, with the base model, or with both from the same noise.

    `evaluate_async` is awaited; `evaluate` takes the same arguments and returns at the end.

    Args:
        run: the run folder, or a run's name; None evaluates the base model of `preset`.
        preset: name of a preset or path of a YAML file; None takes the run's own config.
        overrides: see `train`; for example `data.heldout` and `evaluation.images_per_prompt`.
        iteration: of the checkpoint; None takes the newest.
        is_best: take the checkpoint with the highest held-out score instead.
        adapter_share: share of the steps that the adapter takes, from the first; the base model takes the others.
        features: a CLIP whose image features measure diversity.
        is_local: evaluate in this process without Ray; the results are the same.

    Returns:
        The adapter's result, or the base model's and the adapter's; `scores` has the score of every image.

    Raises:
        InputError: a mistake that you can correct, described in one line.
    """
    folder = found_run(_path("run", run)) if run else None
    _require_number("iteration", iteration, Integral)
    _require_number("adapter_share", adapter_share, Real)
    config = load_config(source_of(preset, folder, "or run= with a run"), overrides=overrides)
    return await assess(
        config,
        folder,
        iteration=iteration,
        is_best=is_best,
        has_base=has_base,
        adapter_share=adapter_share,
        features=features,
        is_local=is_local,
    )


def _waiting(function: Callable[P, Coroutine[Any, Any, Result]]) -> Callable[P, Result]:
    """Turn a coroutine function into one that returns at the end, even while a notebook's event loop is running."""

    @wraps(function)
    def waits(*args: P.args, **kwargs: P.kwargs) -> Result:
        return run_to_end(function(*args, **kwargs))

    waits.__name__ = waits.__qualname__ = function.__name__.removesuffix("_async")
    return waits


evaluate = _waiting(evaluate_async)


def read_run(run: str | Path) -> Run:
    """Read a finished run or one in progress: config, metrics, held-out scores by prompt, recorded trajectories.

    Raises:
        RunFolderError: this is not a run folder, or this version cannot read it.
    """
    return report_runs.read_run(found_run(_path("run", run)))


def compare(first: str | Path | Sequence[str | Path], second: str | Path | Sequence[str | Path]) -> Comparison:
    """Compare two runs, with intervals over held-out prompts, or two groups of seeds, with intervals over seeds too.

    Raises:
        RunFolderError: one of them is not a run folder, or has no line of metrics.
    """
    sides = (("first", first), ("second", second))
    return comparison_of(
        *(
            [found_run(_path(name, run)) for run in (side if isinstance(side, list | tuple) else [side])]
            for name, side in sides
        )
    )


def _path(argument: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise RunFolderError(f"{argument} must be a path, got {value!r}: give a text or a pathlib.Path")
    return path


def _require_number(argument: str, value: object, kind: type) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        what = "a whole number" if kind is Integral else "a number"
        raise ConfigError(f"{argument} must be {what}, got {value!r}: give one, or leave it out")


def _training(
    preset: str | Path | None,
    overrides: Overrides,
    run: str | Path | None,
    fork: str | Path | None,
    *,
    is_local: bool,
    is_quiet: bool,
) -> "partial[Outcome]":
    folder = folder_named(Path(_path("run", run))) if run else None
    source = source_of(preset, folder, "or run= with a run")
    config = load_config(source, overrides=overrides)
    return partial(
        run_training,
        config,
        sources=sources(source, overrides=overrides),
        folder=folder or default_folder(source, config),
        fork=found_run(_path("fork", fork)) if fork else None,
        is_local=is_local,
        progress=Progress(Console(quiet=True)) if is_quiet else Progress(),
    )


__all__ = (
    "Assessed",
    "Comparison",
    "Outcome",
    "Run",
    "RunConfig",
    "compare",
    "evaluate",
    "evaluate_async",
    "load_config",
    "read_run",
    "train",
    "train_async",
)

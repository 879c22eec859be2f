"""Commands about models: encode prompts, draw images, export, estimate."""

from pathlib import Path
from typing import Annotated

import typer

from protocol.config.run import RunConfig

Run = Annotated[Path, typer.Argument(help="A run folder.")]
IsBase = Annotated[bool, typer.Option("--base", help="Leave the adapter out.")]
IsAverage = Annotated[bool, typer.Option("--average", help="Take the adapter's running mean (learner.average).")]
Iteration = Annotated[int | None, typer.Option(help="Iteration of the checkpoint; default: the newest.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(generate)
    app.command()(export)
    app.command()(encode)


def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="What the images show.")],
    negative: Annotated[str, typer.Option(help="Negative prompt; counts when model.guidance is above 1.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Images.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Euler steps; default: evaluation.steps.")] = None,
    iteration: Iteration = None,
    is_base: IsBase = False,
    is_average: IsAverage = False,
    out: Annotated[Path, typer.Option(help="Folder of the images.")] = Path("images"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one.")] = None,
) -> None:
    """Draw images of a prompt with a run's adapter."""
    from deploy.tools.generate import generate_images

    for path in generate_images(
        run,
        prompt,
        out=out,
        count=count,
        seed=seed,
        negative=negative,
        steps=steps,
        iteration=iteration,
        is_base=is_base,
        is_average=is_average,
        device=device,
    ):
        typer.echo(path)


def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="New folder of the whole model.")],
    iteration: Iteration = None,
    is_average: IsAverage = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's own.")] = None,
) -> None:
    """Merge a run's adapter into its model and write a full folder in diffusers' format."""
    from deploy.tools.export import export_model
    from protocol.errors import ConfigError

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    typer.echo(export_model(run, folder, iteration=iteration, dtype=dtype, is_average=is_average))


def encode(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or path of a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides, e.g. model.dtype=bfloat16.")] = None,
) -> None:
    """Fill model.embedding_cache with a preset's prompts, in this process."""
    import asyncio

    from deploy.presets import load_config
    from deploy.run.encode import encode_ahead
    from protocol.errors import ConfigError
    from protocol.prompts import read_prompts

    config = load_config(preset, overrides=overrides or [])
    if config.model.embedding_cache is None:
        raise ConfigError("model.embedding_cache must name a folder, got none")
    prompts = [
        prompt for path in (config.data.train, config.data.heldout) for prompt in read_prompts(config.data, path)
    ]
    asyncio.run(encode_ahead(config, prompts, is_local=True, say=typer.echo))


def dry_run(config: RunConfig) -> None:
    """Everything that `train` checks before it starts, and what the run will cost; writes nothing."""
    from deploy.run.run import check_inputs
    from deploy.tools.estimate import estimate
    from flow.models.folder import completed

    config = completed(config)
    prompts, heldout = check_inputs(config)
    typer.echo(f"{len(prompts)} prompts to train on, {len(heldout)} held out")
    for line in estimate(config).lines():
        typer.echo(line)

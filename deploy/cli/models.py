"""The commands about models: `generate`, `export`, `encode`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import AdapterShare, IsAverage, IsBest, Iteration, Overrides, Preset, RunFolderArgument
from deploy.presets import load_config
from protocol.errors import ConfigError


def generate(
    run: RunFolderArgument,
    prompt: Annotated[str | None, typer.Argument(help="What the images should show; or use --prompts.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompt file, text or JSON lines, to generate images of each prompt.")
    ] = None,
    negative: Annotated[
        str, typer.Option(help="Negative prompt, if model.guidance is above 1; default: data.negative.")
    ] = "",
    count: Annotated[int, typer.Option(min=1, max=1_000, help="Number of images of each prompt.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Euler steps; default: evaluation.steps.")
    ] = None,
    height: Annotated[
        int | None, typer.Option(min=1, help="Height in pixels; default: as in the run's evaluation.")
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width in pixels; given together with --height.")] = None,
    iteration: Iteration = None,
    is_best: IsBest = False,
    is_base: Annotated[bool, typer.Option("--base", help="Use the base model, without the adapter.")] = False,
    is_average: IsAverage = False,
    adapter_share: AdapterShare = 1.0,
    out: Annotated[Path, typer.Option(help="Folder to write the images to.")] = Path("images"),
    has_grid: Annotated[
        bool, typer.Option("--grid", help="Write one PNG with all images instead of one for each.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU if there is one.")] = None,
) -> None:
    """Generate images of a prompt, or of a file of prompts, with the adapter of a run.

    Nothing is overwritten: new images get new numbers. Each PNG holds its prompt, seed, steps, adapter and share as
    text.
    """
    from deploy.tools.generate import generate_images, read_texts
    from protocol.messages import Prompt
    from protocol.prompts import require_unicode

    if (prompt is None) == (prompts is None):
        raise ConfigError('give either a prompt or --prompts FILE, such as: generate RUN "a red circle"')
    if prompts and negative:
        raise ConfigError("--negative belongs to a single prompt: put `negative_prompt` into the lines of --prompts")
    if (height is None) != (width is None):
        raise ConfigError(f"--height and --width must be given together, got {height} and {width}")
    require_unicode(prompt or "", "the prompt")
    require_unicode(negative, "--negative")
    wanted = [Prompt(index=0, text=prompt, negative=negative)] if prompt is not None else read_texts(prompts or Path())
    for path in generate_images(
        run,
        wanted,
        out=out,
        count=count,
        seed=seed,
        steps=steps,
        size=(height, width) if height and width else None,
        iteration=iteration,
        is_best=is_best,
        is_base=is_base,
        is_average=is_average,
        adapter_share=adapter_share,
        has_grid=has_grid,
        device=device,
    ):
        typer.echo(path)


def export(
    run: RunFolderArgument,
    target: Annotated[
        Path | None,
        typer.Argument(help="New folder for the whole model, or a new file NAME.safetensors for the LoRA alone."),
    ] = None,
    iteration: Iteration = None,
    is_average: IsAverage = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: the model's own, float32 for the LoRA alone."),
    ] = None,
    repository: Annotated[
        str | None,
        typer.Option(
            "--push", metavar="OWNER/NAME", help="Upload the LoRA and its model card to the Hugging Face hub."
        ),
    ] = None,
) -> None:
    """Merge the adapter of a run into its model and write a full folder in diffusers' format; or write the LoRA alone.

    The LoRA's file has its scale inside: programs that do not read alpha, such as ComfyUI, apply it at full strength.
    A folder and an upload get a model card: base model, rewards, method, the held-out score before and after with its
    paired interval, images from the same noise, how to load it, and the keys that can change a result, without
    addresses.
    """
    from deploy.tools.card import push, write_card
    from deploy.tools.export import LORA_SUFFIX, export_lora, export_model

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if target is None and repository is None:
        raise ConfigError(
            "export must be given a target, got none: name a folder, NAME.safetensors or --push OWNER/NAME"
        )
    if target is not None:
        write = export_lora if target.suffix == LORA_SUFFIX else export_model
        typer.echo(write(run, target, iteration=iteration, dtype=dtype, is_average=is_average))
        if write is export_model:
            typer.echo(write_card(run, target, iteration=iteration))
    if repository is not None:
        typer.echo(push(run, repository, iteration=iteration, dtype=dtype, is_average=is_average))


def encode(preset: Preset, overrides: Overrides = None) -> None:
    """Encode the prompts of a preset into model.embedding_cache, in this process."""
    from deploy.run.encode import encode_ahead
    from flow.models.located import locate
    from protocol.prompts import read_prompts

    config = load_config(preset, overrides=overrides or [])
    if config.model.embedding_cache is None:
        raise ConfigError("model.embedding_cache must name a folder, got none")
    prompts = [
        prompt for path in (config.data.train, config.data.heldout) for prompt in read_prompts(config.data, path)
    ]
    locate(config.model).require_conditions(prompts)
    asyncio.run(encode_ahead(config, prompts, is_local=True, say=typer.echo))

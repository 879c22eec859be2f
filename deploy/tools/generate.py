"""Generates images of any prompts with a run's adapter, in the same way as the run's evaluation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count as count_from
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from deploy.folder.gallery import png_of_grid
from deploy.folder.read import average_of, best_checkpoint, checkpoint_of, config_of
from flowcredit.packages import VERSION
from protocol.config.run import DataConfig
from protocol.errors import ConfigError, one_line
from protocol.ground.files import text_of, writing
from protocol.messages import GenerateRequest, Prompt
from protocol.prompts import read_prompts
from rewards.images import encoded

UInt8Images = np.ndarray[Any, np.dtype[np.uint8]]


def read_texts(path: Path) -> list[Prompt]:
    """Read the prompts of a prompt file of any kind.

    Raises:
        PromptError: the file does not exist, or a line is broken.
    """
    return read_prompts(DataConfig(train=str(path), heldout=str(path)), str(path))


def generate_images(
    run: Path,
    prompts: Sequence[Prompt],
    *,
    out: Path,
    count: int,
    seed: int,
    steps: int | None = None,
    size: tuple[int, int] | None = None,
    iteration: int | None = None,
    is_best: bool = False,
    is_base: bool = False,
    is_average: bool = False,
    adapter_share: float = 1.0,
    has_grid: bool = False,
    device: str | None = None,
) -> Iterator[Path]:
    """Generate `count` images of each prompt as `out/NNN.png`; equal arguments give equal images.

    Numbers begin after the existing images, so nothing is overwritten. A PNG's text chunks hold these arguments.

    Args:
        prompts: P prompts; one without a negative prompt takes the run's `data.negative`.
        steps: Euler steps of the ODE; None takes the run's `evaluation.steps`.
        size: height and width in pixels; None takes the size of the run's evaluation.
        iteration: of the checkpoint; None takes the newest, or with `is_best` the best by held-out score.
        adapter_share: share of the steps that the adapter takes (`flow.maths.hybrid`).
        has_grid: write one `grid_NNN.png` with all images instead.
        device: torch's name of the device; None takes a GPU if there is one.

    Raises:
        RunFolderError: there is no such run or checkpoint, or `out` cannot be written.
        ConfigError: torch cannot compute on the device, or options exclude each other.
        ModelError: the model cannot be loaded, or it cannot generate images of this size.
    """
    from flow.device import best_device
    from flow.maths.hybrid import first_steps
    from flow.models.located import locate
    from flow.policy import build_policy
    from flow.rollout import generate

    if sum([is_best, iteration is not None, is_base]) > 1:
        raise ConfigError("--best, --iteration and --base each name an adapter: give one of them")
    if is_base and is_average:
        raise ConfigError("--average is the running mean of an adapter, and --base has none: give one of them")
    if is_base and adapter_share != 1:
        raise ConfigError("--adapter-share is the share of an adapter, and --base has none: give one of them")
    config = config_of(run)
    prompts = [replace(each, negative=each.negative or config.data.negative) for each in prompts]
    located = locate(config.model)
    located.require_conditions(prompts)
    steps = steps or config.evaluation.steps
    first = first_steps(adapter_share, steps)
    if size:
        located.sizes.require(*size, names=("--height", "--width"))
    state = None if is_base else checkpoint_of(run, best_checkpoint(run) if is_best else iteration)[0]
    policy, lora = build_policy(config, device=_usable(device or best_device()))
    if state is not None:
        lora.load(average_of(state, run) if is_average else state.adapter)
    facts = {
        "seed": str(seed),
        "steps": str(steps),
        "run": text_of(run.resolve()),
        "iteration": "none" if state is None else str(state.iteration),
        "adapter": "base" if state is None else "average" if is_average else state.adapter.digest,
        "adapter_share": "none" if state is None else f"{adapter_share:g}",
        "adapter_steps": "none" if state is None else str(first),
        "flowcredit": VERSION,
    }
    wanted = [(prompt, number) for prompt in prompts for number in range(count)]
    batches: list[UInt8Images] = []
    with writing(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        paths = free_paths(out, "grid_" if has_grid else "")
    console = Console(stderr=True)
    for start in track(
        range(0, len(wanted), config.evaluation.batch), "images", console=console, disable=not console.is_terminal
    ):
        batch = wanted[start : start + config.evaluation.batch]
        request = GenerateRequest(
            prompts=tuple(prompt for prompt, _ in batch),
            numbers=tuple(number for _, number in batch),
            seed=seed,
            steps=steps,
            adapter_version=0,
            adapter_digest="",
            size=size or config.evaluation.size,
            adapter_steps=first,
        )
        images = generate(policy, request, lora)
        if has_grid:
            batches.append(images)
            continue
        for (prompt, number), image in zip(batch, images, strict=True):
            own = {"prompt": prompt.text, "negative": prompt.negative, "image": str(number)}
            yield _write_new(next(paths), _png(image, facts | own))
    if has_grid:
        rows = np.concatenate(batches).reshape(len(prompts), count, *batches[0].shape[1:])
        cells = [(prompt.text, list(row), []) for prompt, row in zip(prompts, rows, strict=True)]
        own = {"prompts": json.dumps([prompt.text for prompt in prompts], ensure_ascii=False), "images": str(count)}
        title = f"{text_of(run.resolve().name)}, iteration {facts['iteration']}, seed {seed}"
        if first < steps:
            title += f", adapter in the first {first} of {steps} steps"
        yield _write_new(next(paths), png_of_grid(cells, title, facts | own))


def free_paths(out: Path, stem: str) -> Iterator[Path]:
    """Yield names of new files: `out/STEM` and a number, beginning after the highest existing one."""
    held = [path.stem.removeprefix(stem) for path in out.glob(f"{stem}*.png")]
    first = max((int(number) for number in held if number.isdecimal()), default=-1) + 1
    return (out / f"{stem}{number:03d}.png" for number in count_from(first))


def _write_new(path: Path, content: bytes) -> Path:
    with writing(path.parent, "--out"), path.open("xb") as file:
        file.write(content)
    return path


def _png(image: UInt8Images, facts: Mapping[str, str]) -> bytes:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, value)
    return encoded(Image.fromarray(image), "PNG", pnginfo=info)


def _usable(device: str) -> str:
    import torch

    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(
            f"--device must be one that torch can use here, such as cpu, got {device!r}: {one_line(error)}"
        ) from None
    return device

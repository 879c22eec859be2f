"""Generates images of any prompt with a run's adapter, in the same way as the run's evaluation."""

from pathlib import Path

from deploy.folder.read import average_of, checkpoint_of, config_of
from flowcredit.start import VERSION
from protocol.errors import ConfigError, one_line
from protocol.files import writing
from protocol.messages import GenerateRequest, Prompt


def generate_images(
    run: Path,
    text: str,
    *,
    out: Path,
    count: int,
    seed: int,
    negative: str = "",
    steps: int | None = None,
    iteration: int | None = None,
    is_base: bool = False,
    is_average: bool = False,
    device: str | None = None,
) -> list[Path]:
    """Generate `count` images of a prompt as `out/NNN.png`; equal arguments give equal images.

    The first free number names the first image, so nothing is overwritten. A PNG's text chunks say how it was made.

    Args:
        run: the run folder.
        text: the prompt.
        out: the folder for the images.
        count: number of images.
        seed: of the initial noise.
        negative: the negative prompt, for models with guidance.
        steps: Euler steps of the ODE; the run's `evaluation.steps` without them.
        iteration: of the checkpoint; the newest without one.
        is_base: leave the adapter out.
        is_average: use the adapter's running mean.
        device: torch's name; a GPU if there is one.

    Returns:
        The paths of the images.

    Raises:
        RunFolderError: no such run or checkpoint, or `out` cannot be written.
        ConfigError: torch cannot compute on the device.
        ModelError: the model cannot be loaded.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    from flow.device import best_device
    from flow.policy import build_policy
    from flow.rollout import generate

    config = config_of(run)
    state = None if is_base else checkpoint_of(run, iteration)[0]
    policy, lora = build_policy(config, device=_usable(device or best_device()))
    if state is not None:
        lora.load(average_of(state, run) if is_average else state.adapter)
    request = GenerateRequest(
        prompts=(Prompt(index=0, text=text, negative=negative),) * count,
        numbers=tuple(range(count)),
        seed=seed,
        steps=steps or config.evaluation.steps,
        adapter_version=0,
        adapter_digest="",
    )
    images = generate(policy, request)
    facts = {
        "prompt": text,
        "negative": negative,
        "seed": str(seed),
        "steps": str(request.steps),
        "run": str(run.resolve()),
        "iteration": "none" if state is None else str(state.iteration),
        "adapter": "base" if state is None else "average" if is_average else state.adapter.digest,
        "flowcredit": VERSION,
    }
    with writing(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        held = [int(path.stem) for path in out.glob("*.png") if path.stem.isdecimal()]
        first = max(held, default=-1) + 1
        paths = [out / f"{first + number:03d}.png" for number in range(count)]
        for number, (path, image) in enumerate(zip(paths, images, strict=True)):
            info = PngInfo()
            for key, value in (facts | {"image": str(number)}).items():
                info.add_itxt(key, value)
            with path.open("xb") as file:
                Image.fromarray(image).save(file, format="PNG", pnginfo=info)
    return paths


def _usable(device: str) -> str:
    import torch

    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(
            f"--device must be one that torch can use here, such as cpu, got {device!r}: {one_line(error)}"
        ) from None
    return device

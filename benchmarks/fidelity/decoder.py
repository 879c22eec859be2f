"""What a tiny decoder costs and saves: the rank correlation of scores with those of the VAE's images, and the seconds.

    python -m benchmarks.fidelity.decoder toy_geneval group.size=24 method=stepwise_calibrated \
        model.tiny_decoder=pkg://toyworld/tiny_decoder --prompts 12

The base model generates one group for each prompt, and every point is completed as the config says, once. Both decoders
turn the same clean latents into images. Spearman's correlation is computed over the members at one point of one prompt,
and averaged over points and prompts, as in `benchmarks.fidelity.completion`. Seconds are CPU seconds of an image, the
least of several rounds over a shard's images at once.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import torch
import typer
from jaxtyping import Float
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.fidelity.completion import mean_correlation
from benchmarks.fidelity.groups import World, draw_group
from flow.models.contract import Backbone
from protocol.errors import ConfigError
from protocol.messages import Prompt

ROUNDS = 5
Pairs = dict[str, list[tuple[np.ndarray, np.ndarray]]]


def score_pairs(world: World, prompts: Sequence[Prompt], members: int) -> Iterator[tuple[Pairs, float]]:
    """Score every completed point of a group for each prompt with both decoders.

    Args:
        world: a model with a tiny decoder, and scorers.
        prompts: one group for each.
        members: size of a group.

    Yields:
        For each prompt: by scorer the points' scores of the tiny decoder's and of the VAE's images, each [N]; and the
        mean absolute difference of their pixels, of 255.
    """
    for number, prompt in enumerate(track(prompts, "groups")):
        group = draw_group(world.policy, world.config, number=number, prompt=prompt, members=members)
        pairs: Pairs = {name: [] for name in world.scorers}
        apart = []
        for point in group.points[1 if world.config.sampling.shared_noise else 0 :]:
            clean, _ = group.completed(point, world.config.completion)
            tiny, whole = (world.policy.backbone.decode(clean, points=points) for points in (len(clean), 0))
            apart.append(float(np.abs(tiny.astype(float) - whole).mean()))
            texts, facts = [prompt.text] * len(clean), [prompt.metadata] * len(clean)
            for name, scorer in world.scorers.items():
                pairs[name].append((scorer.score(tiny, texts, facts).values, scorer.score(whole, texts, facts).values))
        yield pairs, float(np.mean(apart))


def cpu_seconds(backbone: Backbone, latents: Float[Tensor, "B C H W"], *, is_tiny: bool) -> float:
    """Measure the CPU seconds of one decoded image.

    Args:
        backbone: a model with a tiny decoder.
        latents: of the images, which are decoded at once.
        is_tiny: with the tiny decoder instead of the VAE.

    Returns:
        The least of several rounds.
    """
    points = len(latents) if is_tiny else 0
    backbone.decode(latents, points=points)
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        backbone.decode(latents, points=points)
        rounds.append(time.process_time() - began)
    return min(rounds) / len(latents)


def main(
    preset: Annotated[str, typer.Argument(help="Preset whose model, prompts, sampling and scorers are used.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Config overrides, model.tiny_decoder above all.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, one group each.")] = 12,
    members: Annotated[int, typer.Option(min=3, help="Members of a group.")] = 24,
) -> None:
    """Measure and print."""
    world = World.of(preset, overrides or [])
    if not world.config.model.tiny_decoder:
        raise ConfigError("this benchmark compares two decoders, got no model.tiny_decoder: name one")
    backbone, rows = world.policy.backbone, members * len(world.policy.steps)
    with torch.no_grad():
        found = list(score_pairs(world, world.prompts(prompts), members))
        latents = torch.randn(rows, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
        tiny, whole = (cpu_seconds(backbone, latents, is_tiny=is_tiny) for is_tiny in (True, False))
    say = Console().print
    for name in world.scorers:
        correlation = mean_correlation([pair for pairs, _ in found for pair in pairs[name]])
        say(f"{name}: rank correlation {'none' if correlation is None else f'{correlation:.3f}'}")
    say(f"pixels: mean absolute difference {np.mean([apart for _, apart in found]):.2f} of 255")
    say(f"an image of {rows}: tiny decoder {1000 * tiny:.3f} ms, VAE {1000 * whole:.3f} ms, {whole / tiny:.1f} times")


if __name__ == "__main__":
    typer.run(main)

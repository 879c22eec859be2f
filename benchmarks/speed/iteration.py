"""Where the seconds of an iteration go, and the least that each part could take: the account of one preset.

    python -m benchmarks.speed.iteration                                   # toy_geneval in this process
    python -m benchmarks.speed.iteration toy_geneval group.size=24 method=flow_grpo sampling.steps=10 --iterations 3
    python -m benchmarks.speed.iteration toy_geneval --ray                 # seconds summed over the actors
    python -m benchmarks.speed.iteration toy_geneval --cpu                 # CPU seconds, where other programs run too

It trains a few iterations and reads the metrics `work/...` that every run writes, without the first iteration. The
bound of a part is its count times the least cost of one: the part is measured alone at several batch sizes in turn, and
the best size counts, by its median. Operations are torch's count, without the VAE's. The share of the peak (mfu) is
relative to `--peak-tflops`, or on a CPU to the rate of a large float32 matrix product on as many threads.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.clock import cpu_clock
from benchmarks.output import show
from benchmarks.speed.slot.timing import wait
from deploy.folder.read import lines_of
from deploy.monitor.progress import Progress
from deploy.presets import load_config
from deploy.run.run import run_training
from deploy.tools.estimate import estimate
from flow.device import computing, device_of, torch_threads
from flow.policy import FlowPolicy, build_policy
from flow.rollout import generate
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.messages import GenerateRequest, Prompt
from protocol.prompts import read_prompts
from rewards.scorer import build_scorer

ROUNDS = 9
BATCHES = (1 / 24, 0.5, 1, 2, 4, 8)
"""Batch sizes that are tried, as multiples of a shard."""
SPENT = "seconds/iteration"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One line of the account; all numbers are of one iteration."""

    name: str
    seconds: float
    """Summed over the actors that share the part."""
    count: float | None = None
    unit: str = ""
    bound_s: float | None = None
    """Seconds that the count takes at the least measured cost of one."""
    tflop: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The least measured seconds of one evaluation, image and score."""

    forward: float
    gradient: float
    decoding: float
    tiny_decoding: float
    """Of a completed point's image; the same without a tiny decoder."""
    scoring: float
    forwards: Mapping[int, float]
    """Seconds of one evaluation by the batch size."""


def account(config: RunConfig, *, is_local: bool) -> tuple[list[Part], Mapping[str, float], Cost]:
    """Train the config's iterations and divide the seconds of one among its parts.

    Args:
        config: of at least two iterations; the first one is left out.
        is_local: in this process instead of on Ray.

    Returns:
        The parts, the mean metrics of an iteration, and what one evaluation, image and score cost.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run_training(config, folder=run, is_local=is_local, progress=Progress())
        lines = [line for line in lines_of(run) if SPENT in line][1:]
    held = {name: fmean(line[name] for line in lines) for name in lines[0] if _is_timed(name)}
    cost, forward, gradient = _costs(config), *_flops(config)
    counts = {name.removeprefix("work/"): number for name, number in held.items() if name.startswith("work/")}

    def part(name: str, count: str, unit: str, each_s: float, flops: float = 0.0) -> Part:
        number = counts.get(count, 0.0)
        return Part(
            name=name,
            seconds=counts.get(f"{name}_seconds", 0.0),
            count=number,
            unit=unit,
            bound_s=number * each_s,
            tflop=number * flops / 1e12 if flops else None,
        )

    training = part("training", "gradient_evaluations", "gradients", cost.gradient, gradient)
    finished = config.group.per_iteration * config.group.size
    reference = counts.get("reference_evaluations", 0.0)
    parts = [
        part("sampling", "main_evaluations", "evaluations", cost.forward, forward),
        part("completing", "completion_evaluations", "evaluations", cost.forward, forward),
        replace(
            part("decoding", "images", "images", cost.decoding),
            bound_s=finished * cost.decoding + (counts["images"] - finished) * cost.tiny_decoding,
        ),
        part("scoring", "images", "images", cost.scoring),
        Part(name="crediting", seconds=counts.get("crediting_seconds", 0.0)),
        Part(name="fetching", seconds=counts.get("fetching_seconds", 0.0)),
        replace(
            training,
            bound_s=(training.bound_s or 0.0) + reference * cost.forward,
            tflop=(training.tflop or 0.0) + reference * forward / 1e12,
        ),
        Part(name="reducing", seconds=held.get("update/reduction_seconds", 0.0)),
        Part(name="publishing", seconds=held["seconds/publish"]),
    ]
    if is_local and not config.group.max_lag:  # with a lag, rollouts and updates share their seconds
        parts.append(Part(name="everything else", seconds=held[SPENT] - sum(part.seconds for part in parts)))
    return parts, held, cost


def _is_timed(name: str) -> bool:
    return name.startswith(("work/", "seconds/", "update/"))


def _costs(config: RunConfig) -> Cost:
    """Measure one evaluation, one gradient, one decoded and one scored image, each at its best batch size."""
    role = config.cluster.rollout
    policy, lora = build_policy(config, device=device_of(role))
    prompts = read_prompts(config.data, config.data.train)
    conditioning = policy.conditioning(prompts[0].text, prompts[0].negative)
    sizes = sorted({max(1, round(config.group.shard * factor)) for factor in BATCHES})
    with computing(role):
        with torch.inference_mode():
            forwards = _by_size(lambda size: lambda: _velocity(policy, size, conditioning), sizes)
            decoding, tiny = (
                _least(
                    lambda size, is_point=is_point: (
                        lambda: policy.backbone.decode(_latents(policy, size), points=size * is_point)
                    ),
                    sizes,
                )
                for is_point in (False, True)
            )
        mixed = Random(config.seed).choices(prompts, k=max(sizes))  # a scorer may take longer for some prompts
        images = _images(policy, config, mixed)
    scoring = 0.0
    with torch_threads(role.threads):
        for name in config.reward_weights:
            judge = build_scorer(config.rewards[name].scorer, **config.rewards[name].args)
            scoring += _least(
                lambda size, judge=judge: (
                    lambda: judge.score(
                        images[:size],
                        [prompt.text for prompt in mixed[:size]],
                        [prompt.metadata for prompt in mixed[:size]],
                    )
                ),
                sizes[1:],  # a single image says little about the others
            )
    with computing(config.cluster.learner):
        gradient = _least(lambda size: lambda: _velocity(policy, size, conditioning).square().mean().backward(), sizes)
    for parameter in lora.parameters.values():
        parameter.grad = None
    branches = 2 if config.model.guidance > 1 else 1
    return Cost(
        forward=min(forwards.values()) / branches,
        gradient=gradient / branches,
        decoding=decoding,
        tiny_decoding=tiny,
        scoring=scoring,
        forwards={size: seconds / branches for size, seconds in forwards.items()},
    )


def _latents(policy: FlowPolicy, size: int) -> torch.Tensor:
    device = next(policy.backbone.transformer.parameters()).device
    return torch.zeros(size, *policy.backbone.latent_shape, device=device)


def _images(policy: FlowPolicy, config: RunConfig, prompts: Sequence[Prompt]) -> np.ndarray:
    """Images of the untrained model: blank ones would cost a scorer less."""
    request = GenerateRequest(
        prompts=tuple(prompts),
        numbers=tuple(range(len(prompts))),
        seed=config.seed,
        steps=config.evaluation.steps,
        adapter_version=0,
        adapter_digest="",
    )
    return generate(policy, request)


def _velocity(policy: FlowPolicy, size: int, conditioning: tuple) -> torch.Tensor:
    latents = _latents(policy, size)
    return policy.velocity(latents, torch.full((size,), 0.5, device=latents.device), conditioning)


def _least(make: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> float:
    """Return the seconds of one sample at the batch size that makes them least."""
    return min(_by_size(make, sizes).values())


def _by_size(make: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> dict[int, float]:
    """Return the median seconds of one sample in `ROUNDS` runs, by batch size.

    The sizes take turns, so a machine that gets slower or faster does so for each of them.
    """
    works = {size: make(size) for size in sizes}
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    for work in works.values():
        work()
    for _ in range(ROUNDS):
        for size, work in works.items():
            wait()
            began = time.perf_counter()
            work()
            wait()
            costs[size].append((time.perf_counter() - began) / size)
    return {size: median(each) for size, each in costs.items()}


def _flops(config: RunConfig) -> tuple[float, float]:
    """Operations of one evaluation, and of one with its backward."""
    counts = estimate(config).evaluations
    return counts.forward_flops, counts.gradient_flops


def _peak(threads: int) -> float:
    """TFLOP/s of a large float32 matrix product on this CPU."""
    matrix = torch.ones(2048, 2048)
    with torch_threads(threads):
        seconds = min(_timed(lambda: matrix @ matrix) for _ in range(5))
    return 2 * 2048**3 / seconds / 1e12


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(
    preset: Annotated[str, typer.Argument(help="Name or file of the preset.")] = "toy_geneval",
    overrides: Annotated[list[str] | None, typer.Argument(help="Config values, as for `flowcredit train`.")] = None,
    iterations: Annotated[int, typer.Option(help="Iterations; the first one does not count.", min=2)] = 3,
    is_ray: Annotated[bool, typer.Option("--ray", help="On a local Ray cluster instead of in this process.")] = False,
    is_cpu: Annotated[bool, typer.Option("--cpu", help="CPU seconds of this process instead of wall seconds.")] = False,
    peak_tflops: Annotated[float | None, typer.Option(help="TFLOP/s of the device at most.", min=0.001)] = None,
) -> None:
    """Print the account of one iteration."""
    looks = [f"iterations={iterations}", f"evaluation.every={iterations}", "evaluation.images_per_prompt=1"]
    config = load_config(preset, overrides=[*(overrides or []), *looks])
    if is_cpu and is_ray:
        raise ConfigError("--cpu counts the seconds of this process alone, got --ray too: leave one out")
    with cpu_clock(sys.modules[__name__]) if is_cpu else nullcontext():
        parts, held, cost = account(config, is_local=not is_ray)
        role = config.cluster.rollout
        peak = peak_tflops or (None if role.gpus else _peak(max(role.threads, config.cluster.learner.threads)))
    rows = [
        {
            "part": part.name,
            "count": f"{part.count:,.0f} {part.unit}" if part.count is not None else "",
            "seconds": part.seconds,
            "bound s": part.bound_s or None,
            "bound / seconds": part.bound_s / part.seconds if part.bound_s and part.seconds else None,
            "GFLOP/s": f"{1000 * part.tflop / part.seconds:.1f}" if part.tflop and part.seconds else "",
        }
        for part in parts
    ]
    show(rows)
    spent, tflop = held[SPENT], sum(part.tflop or 0.0 for part in parts)
    trajectories = config.group.per_iteration * config.group.size
    facts = {
        "seconds an iteration": spent,
        "trajectories a second": trajectories / spent,
        "TFLOP an iteration": tflop,
        **({"mfu": tflop / spent / peak} if peak else {}),
    }
    typer.echo(", ".join(f"{name} {number:.3g}" for name, number in facts.items()))
    each = (f"{1000 * seconds:.2f} in a batch of {size}" for size, seconds in cost.forwards.items())
    typer.echo(f"ms of one evaluation: {', '.join(each)}")
    typer.echo(f"wall seconds: {', '.join(f'{n} {held[n]:.3f}' for n in held if n.startswith('seconds/'))}")


if __name__ == "__main__":
    typer.run(main)

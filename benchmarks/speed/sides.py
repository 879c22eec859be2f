"""How to share GPUs between rollout actors and learner workers, from counted forwards: the table of docs/cluster.md.

    python -m benchmarks.speed.sides                   # SD3.5-Medium and FLUX.1-dev; 1, 8 and 64 GPUs
    python -m benchmarks.speed.sides --tflops 400      # seconds at another rate

The architectures have no weights; forwards, gradients and evaluations are counted by torch and by the sampler itself.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.speed.gpu_model import random_backbone
from deploy.presets import load_config
from deploy.tools.estimate import IterationCounts, count_evaluations, count_shard, pass_cost
from deploy.tools.planning.balance import Balance, balance_of
from flow.models.backbones.flux import Flux
from flow.models.families import FLUX, SD3, Family
from flow.models.hollow import attach_hollow_adapter, backbone_of_parts
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig

GPUS = (1, 8, 64)
MOST_LANES = 64
METHODS = ("stepwise_tree", "flow_grpo_fast", "stepwise")


def flux_backbone(config: ModelConfig, fake: FakeTensorMode) -> PipelineBackbone:
    """Make FLUX.1-dev's architecture, which is diffusers' default, without weights."""
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    decoder: dict[str, Any] = {
        "latent_channels": 16,
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    with fake:
        vae = diffusers.AutoencoderKL(**decoder)
        transformer = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        parts: dict[str, Any] = {"transformer": transformer, "vae": vae, "scheduler": scheduler}
        return backbone_of_parts(Flux, config, parts, device="cpu")


def counted(preset: str, method: str, *, lanes: int) -> tuple[RunConfig, IterationCounts, float]:
    """Count an iteration of a preset.

    Args:
        preset: `sd35_pickscore` or `flux_pickscore`.
        method: the method that is laid over it.
        lanes: `learner.lanes`.

    Returns:
        The config, the counts, and the forwards that a gradient costs.
    """
    config = load_config(preset, overrides=[f"method={method}", f"learner.lanes={lanes}"])
    fake = FakeTensorMode()
    family: Family = FLUX if "flux" in preset else SD3
    if family is FLUX:
        backbone = flux_backbone(config.model, fake)
    else:
        backbone = random_backbone(config.model, is_tiny=False, device="cpu", within=fake)
    attach_hollow_adapter(backbone.transformer, family.adapter(config.model.lora), within=fake)
    with fake:
        forward, both = (pass_cost(backbone, 1, has_gradient=has_gradient).flops for has_gradient in (False, True))
    counts = count_evaluations(config, count_shard(config, backbone), forward=forward, gradient=both / forward)
    return config, counts, both / forward


def resized(config: RunConfig, *, actors: int, workers: int) -> RunConfig:
    """Change the numbers of rollout actors and learner workers."""
    learner = config.cluster.learner.model_copy(update={"workers": workers})
    cluster = config.cluster.model_copy(update={"rollout_actors": actors, "learner": learner})
    return config.model_copy(update={"cluster": cluster})


def best_split(config: RunConfig, counts: IterationCounts, gpus: int) -> tuple[str, Balance]:
    """Find the split of GPUs with the shortest iteration if both sides work at once, and the fewest workers of equals.

    Returns:
        Rollout actors + learner workers, and their balance.
    """
    sizes = [workers for workers in range(1, gpus) if config.learner.lanes % workers == 0]
    splits = [
        (f"{gpus - workers} + {workers}", balance_of(resized(config, actors=gpus - workers, workers=workers), counts))
        for workers in sizes
    ]
    return min(((name, replace(each, overlaps=True)) for name, each in splits), key=lambda split: split[1].iteration)


def best_bundles(config: RunConfig, counts: IterationCounts, gpus: int) -> tuple[int, Balance]:
    """Compute the balance of `cluster.layout: colocated` with as many bundles as GPUs and lanes allow."""
    bundles = max(size for size in range(1, gpus + 1) if config.learner.lanes % size == 0)
    return bundles, replace(balance_of(resized(config, actors=bundles, workers=bundles), counts), overlaps=False)


def main(tflops: Annotated[float, typer.Option(help="TFLOP/s that a GPU really does.", min=0.001)] = 200.0) -> None:
    """Print one row for each model, method and number of GPUs, as Markdown."""
    torch.manual_seed(0)
    typer.echo(
        "| model | method | TFLOP a forward | a gradient, forwards | rollout, forwards | update, forwards | GPUs"
        " | rollout + learner | iteration s | rollout waits | learner waits | bundles in turns | iteration s |"
    )
    typer.echo("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for preset in ("sd35_pickscore", "flux_pickscore"):
        for method in METHODS:
            config, counts, gradient = counted(preset, method, lanes=MOST_LANES)
            each_s = counts.forward_flops / (tflops * 1e12)
            for gpus in GPUS:
                bundles, turns = best_bundles(config, counts, gpus)
                split = ["", "", "", ""]
                if gpus > 1:
                    sizes, best = best_split(config, counts, gpus)
                    waits = [f"{share:.0%}" for share in best.waits().values()]
                    split = [sizes, f"{best.iteration * each_s:.0f}", *waits]
                cells = [
                    preset, method, f"{counts.forward_flops / 1e12:.2f}", f"{gradient:.2f}", counts.rollout,
                    counts.learner, gpus, *split, bundles, f"{turns.iteration * each_s:.0f}",
                ]  # fmt: skip
                typer.echo(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    typer.run(main)

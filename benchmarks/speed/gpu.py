"""How fast a GPU draws and learns: SD3.5-Medium's architecture with random weights, nothing downloaded, no Ray.

    python -m benchmarks.speed.gpu                       # 512 x 512, T = 10, bfloat16, LoRA rank 32
    python -m benchmarks.speed.gpu --members 8 --json gpu.json
    python -m benchmarks.speed.gpu --tiny --device cpu   # a tiny architecture: whether it runs at all
    python -m benchmarks.speed.gpu --estimate            # what it would take, computed without a GPU

Reported: images per second drawn plainly and with every point completed (T' = 2 and 5), learner pairs per second and
their share of the card's bf16 peak, peak memory beside the estimate, seconds to export and load the adapter.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.gpu_model import random_backbone
from deploy.tools.estimate import Estimate, estimate_of
from flow.adapter.lora import Lora
from flow.maths.noise import normal
from flow.models.families import SD3
from flow.models.pipeline import PipelineBackbone
from flow.policy import FlowPolicy, policy_of
from flow.rollout import rollout_shard
from learner.update.objective import clipped_surrogate
from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from protocol.messages import Prompt, ShardRequest

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40": 362.0, "B200": 2250.0}
"""Dense bf16, as the makers state it, by a part of the card's name."""
SUBSTEPS = (2, 5)
ROUNDS = 3


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Measure, print a table, and return the figures by name."""
    args = _arguments(words)
    config = _config(args)
    if args.estimate:
        for line in _estimate(config, args).lines():
            Console().print(line, soft_wrap=True)
        return {}
    backbone = random_backbone(config.model, is_tiny=args.tiny, device=args.device, within=torch.device(args.device))
    lora = Lora(backbone.transformer, SD3.adapter(config.model.lora), seed=0)
    figures: dict[str, float] = {}
    for substeps in (0, *SUBSTEPS):
        figures |= _rollout(config, backbone, substeps, args.device)
    for substeps in SUBSTEPS:
        figures[f"completion T'={substeps}, times plain"] = (
            figures["plain, images/s"] / figures[f"T'={substeps}, images/s"]
        )
    figures |= _learner(config, policy_of(backbone, config), lora, args)
    figures |= _publication(lora)
    if args.device == "cuda":
        figures |= _estimates(config, args, figures)
    _show(figures, args)
    return figures


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.gpu",
        description="How fast a GPU draws and learns, with SD3.5-Medium's architecture and random weights.",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--size", type=int, default=512, help="pixels of a side")
    parser.add_argument("--members", type=int, default=24, help="samples of a shard")
    parser.add_argument("--forward-batch", type=int, default=24, help="most samples of one forward")
    parser.add_argument("--learner-batch", type=int, default=8, help="samples of one forward and backward")
    parser.add_argument("--decode-batch", type=int, default=8, help="images that the VAE decodes at once")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in the learner")
    parser.add_argument("--compile", help="torch.compile backend, such as inductor")
    parser.add_argument("--peak-tflops", type=float, help="the card's dense bf16 peak, where its name is unknown")
    parser.add_argument("--tiny", action="store_true", help="a tiny architecture and 16 x 16 pixels")
    parser.add_argument("--estimate", action="store_true", help="only compute costs and memory; needs no GPU")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args(words)


def _config(args: argparse.Namespace) -> RunConfig:
    size = 16 if args.tiny else args.size
    return parse_config(
        {
            "iterations": 1,
            "model": {
                "path": "no/weights",
                "dtype": args.dtype,
                "height": size,
                "width": size,
                "max_sequence_length": 2 if args.tiny else 128,
                "guidance": args.guidance,
                "forward_batch": min(args.forward_batch, args.members),
                "decode_batch": args.decode_batch,
                "gradient_checkpointing": args.checkpointing,
                "compile": args.compile,
            },
            "data": {"train": "none", "heldout": "none"},
            "group": {"size": args.members, "shard": args.members, "per_iteration": 2},
            "rewards": {"none": {"scorer": "geneval"}},
            "evaluation": {"component": "reward", "batch": args.members},
        }
    )


def _rollout(config: RunConfig, backbone: PipelineBackbone, substeps: int, device: str) -> dict[str, float]:
    """Images per second of finished trajectories, decoding of everything that is scored included."""
    tree = config.model_dump(mode="json")
    tree["credit"]["rule"] = "gains" if substeps else "uniform"
    tree["completion"]["substeps"] = max(1, substeps)
    drawn = parse_config(tree)
    policy = policy_of(backbone, drawn)
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text=""),
        first_member=0,
        members=drawn.group.shard,
        adapter_version=0,
        adapter_digest="",
    )
    with _peak(device) as memory:
        seconds = _seconds(lambda: rollout_shard(policy, request, drawn), device)
    name = f"T'={substeps}" if substeps else "plain"
    return {f"{name}, images/s": drawn.group.shard / seconds, f"{name}, peak GiB": memory["gib"]}


def _learner(config: RunConfig, policy: FlowPolicy, lora: Lora, args: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of (trajectory, step) pairs, and an optimizer step for every eight batches."""
    batch = min(args.learner_batch, args.members)
    shape = policy.backbone.latent_shape
    latents, following = (normal(name, shape=(batch, *shape)).to(args.device) for name in ("now", "next"))
    conditioning = policy.conditioning("", "")
    optimizer = torch.optim.AdamW(lora.parameters.values(), lr=1e-9)
    k = policy.steps[len(policy.steps) // 2]

    def pairs() -> None:
        transition, _ = policy.transition(latents, k, conditioning=conditioning)
        log_prob = transition.log_prob(following)
        loss, _ = clipped_surrogate(
            log_prob=log_prob,
            old_log_prob=log_prob.detach(),
            advantages=torch.ones_like(log_prob),
            clip_range=config.learner.clip_range,
        )
        loss.mean().backward()

    def update() -> None:
        for _ in range(8):
            pairs()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with FlopCounterMode(display=False) as counter:
        pairs()
    with _peak(args.device) as memory:
        seconds = _seconds(update, args.device)
    figures = {
        "learner, pairs/s": 8 * batch / seconds,
        "learner, TFLOP/s": 8 * counter.get_total_flops() / seconds / 1e12,
        "learner, peak GiB": memory["gib"],
    }
    peak = args.peak_tflops or _peak_tflops(args.device)
    if peak:
        figures["learner, share of bf16 peak"] = figures["learner, TFLOP/s"] / peak
    return figures


def _publication(lora: Lora) -> dict[str, float]:
    began = time.perf_counter()
    weights = lora.export(version=1)
    exported = time.perf_counter()
    lora.load(weights)
    loaded = time.perf_counter()
    return {
        "adapter, MB": sum(array.nbytes for array in weights.arrays.values()) / 1e6,
        "adapter, export s": exported - began,
        "adapter, load s": loaded - exported,
    }


def _estimate(config: RunConfig, args: argparse.Namespace) -> Estimate:
    tree = config.model_dump(mode="json")
    tree["model"]["compile"] = None
    plain, fake = parse_config(tree), FakeTensorMode()
    hollow = random_backbone(plain.model, is_tiny=args.tiny, device="cpu", within=fake)
    return estimate_of(plain, hollow, [], SD3.adapter(plain.model.lora), fake=fake)


def _estimates(config: RunConfig, args: argparse.Namespace, figures: dict[str, float]) -> dict[str, float]:
    """The learner's estimated weights and activations beside what was measured, at the measured batch."""
    tree = config.model_dump(mode="json")
    tree["model"]["forward_batch"] = min(args.learner_batch, args.members)
    found = _estimate(parse_config(tree), args)
    tensors = sum(size for part, size in found.learner.items() if part != "context") / 2**30
    return {"learner, estimated GiB": tensors, "learner, estimated / measured": tensors / figures["learner, peak GiB"]}


def _seconds(work: Callable[[], Any], device: str) -> float:
    """Mean wall seconds of `ROUNDS` calls after one that warms up."""
    work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        work()
    _wait(device)
    return (time.perf_counter() - began) / ROUNDS


@contextmanager
def _peak(device: str) -> Iterator[dict[str, float]]:
    found = {"gib": float("nan")}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield found
    if device == "cuda":
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_tflops(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _show(figures: dict[str, float], args: argparse.Namespace) -> None:
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    table = Table("figure", "value", title=f"{'tiny' if args.tiny else 'SD3.5-Medium'}, {args.dtype}, {where}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"where": where, **figures}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

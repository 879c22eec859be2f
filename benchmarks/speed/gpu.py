"""How fast a GPU generates and learns: SD3.5-Medium's architecture with random weights, without downloads or Ray.

    python -m benchmarks.speed.gpu                       # 512 x 512, T = 10, bfloat16, LoRA rank 32
    python -m benchmarks.speed.gpu --members 8 --json gpu.json
    python -m benchmarks.speed.gpu --tiny --device cpu   # a tiny architecture, to check that the benchmark runs
    python -m benchmarks.speed.gpu --estimate            # costs and memory, computed without a GPU
    python -m benchmarks.speed.gpu --iterations 10       # a whole run of sd35_geneval on one GPU

It reports images per second without completions and with every point completed (T' = 2 and 5), learner pairs per second
(with a run's kernels, and with those that may give other bits every time) and their share of the GPU's bf16 peak,
what a batch of pairs spends its time on, peak memory and its estimate, and the seconds to export and load the adapter.

With `--iterations` it trains instead, on Ray as `flowcredit train sd35_geneval` does, and reports what its iterations
made. The run folder stays, and the model is written beside it (5 GB). One GPU gets the groups that it would have as one
of the preset's eight. Redness takes the part of GenEval: a random model paints no objects.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.output import show, write_json
from benchmarks.speed.gpu_model import random_backbone, random_lora, write_pipeline
from benchmarks.speed.slot.timing import milliseconds_by_kind, peak_memory, seconds_of, wait
from deploy.library import read_run, train
from deploy.report.account import SIDES, MfuPeak, rates_of
from deploy.report.runs import groups_of
from deploy.tools.estimate import Estimate, estimate_of
from deploy.tools.measure import find_card
from deploy.tools.planning.plan import memory_lines
from flow.adapter.lora import Lora
from flow.device import computing
from flow.maths.noise import normal
from flow.models.families import SD3
from flow.models.pipeline import PipelineBackbone
from flow.policy import FlowPolicy, policy_of
from flow.rollout import rollout_shard
from learner.update.objective import clipped_surrogate
from protocol.config.cluster import RoleConfig
from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from protocol.messages import Prompt, ShardRequest

Device = Literal["cuda", "cpu"]
Dtype = Literal["float32", "bfloat16", "float16"]
ONE_GPU = (
    "method=stepwise",
    "model.guidance=4.5",
    "learner.kl.weight=0.004",
    "learner.lanes=8",
    "model.embedding_cache=null",
    "rewards={geneval: null, redness: {scorer: 'benchmarks.scorers:Redness'}}",
    "evaluation.component=reward",
    "evaluation.images_per_prompt=1",
    "evaluation.steps=2",
    "group.per_iteration=6",
    "group.shard=null",
    "cluster.rollout_actors=1",
    "cluster.learner.workers=1",
)
"""Overrides of `sd35_geneval` for `--iterations`: the paper's method, which docs/performance.md has measured."""
REPLAYS = 20
"""Forwards with a gradient that are compared with one without."""
SMALL = ("model.max_sequence_length=2", "sampling.steps=3", "group.per_iteration=2")
"""Further ones for the tiny architecture."""
TUNED = {"attention": "cudnn", "norms": "triton", "lora": {"qkv": "joined"}}
"""Kernels that are off by default, in the section `model`."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of `main` that decide what is measured."""

    device: Device = "cuda"
    dtype: Dtype = "bfloat16"
    size: int = 512
    members: int = 24
    forward_batch: int = 24
    learner_batch: int = 8
    decode_batch: int = 8
    guidance: float = 1.0
    has_checkpointing: bool = False
    compile: str | None = None
    is_tuned: bool = False
    peak_tflops: float | None = None
    is_tiny: bool = False
    rounds: int = 3
    substeps: tuple[int, ...] = (2, 5)


def measure(setup: Setup) -> Iterator[dict[str, float]]:
    """Measure and yield the figures by name, the learner's first."""
    with computing(RoleConfig(gpus=float(setup.device == "cuda"), threads=torch.get_num_threads())):
        config = config_of(setup)
        backbone = random_backbone(config.model, is_tiny=setup.is_tiny, device=setup.device)
        lora = random_lora(backbone.transformer, config.model)
        learner = _learner(config, policy_of(backbone, config), lora, setup)
        yield learner
        plain = _rollout(config, backbone, 0, setup)
        yield plain
        for substeps in setup.substeps:
            found = _rollout(config, backbone, substeps, setup)
            slower = plain["plain, images/s"] / found[f"T'={substeps}, images/s"]
            yield {**found, f"completion T'={substeps}, times plain": slower}
        yield _publication(lora)
        if setup.device == "cuda":
            yield _estimates(config, setup, learner)


def estimate(setup: Setup) -> Estimate:
    """Compute costs and memory without a GPU."""
    return _estimate(config_of(setup), setup)


def iterate(setup: Setup, run: Path, *, iterations: int, words: Sequence[str] = ()) -> dict[str, float]:
    """Train `sd35_geneval` with random weights on one GPU, and return what its iterations made on average.

    Args:
        setup: its device, size, members of a group, compiler and architecture count.
        run: the run folder, which must not exist.
        iterations: how many.
        words: further overrides of the preset.

    Returns:
        The figures by name.
    """
    model = write_pipeline(run.with_name(f"{run.name}_model").absolute(), is_tiny=setup.is_tiny, device=setup.device)
    size, is_cpu = 16 if setup.is_tiny else setup.size, setup.device == "cpu"
    share = 0 if is_cpu else 0.5
    if not is_cpu:
        torch.cuda.empty_cache()  # the actors want the memory in which the model was made
    overrides = [
        f"iterations={iterations}",
        f"model.path={model}",
        f"model.height={size}",
        f"model.width={size}",
        f"model.compile={setup.compile or 'null'}",
        f"group.size={setup.members}",
        *ONE_GPU,
        f"cluster.rollout.gpus={share}",
        f"cluster.learner.gpus={share}",
        *(SMALL if setup.is_tiny else ()),
        *words,
    ]
    train("sd35_geneval", overrides, run=run, is_local=is_cpu)
    (group,) = groups_of([read_run(run)])
    rates = rates_of(group, _run_peak(setup))
    assert rates is not None, "a run that has ended has iterations"
    found: dict[str, float | None] = {
        "iteration, s": rates.seconds,
        **{f"{part}, s": group.mean(f"work/{part}_seconds") for parts in SIDES.values() for part in parts},
        "images/s": rates.images,
        "images/GPU/s": rates.images_per_gpu,
        "images scored/s": rates.scored,
        "mfu": rates.mfu,
        "largest |ratio - 1| before an update": max(group.values("train/first_ratio_deviation")[0][2].tolist()),
    }
    return {name: value for name, value in found.items() if value is not None}


def _run_peak(setup: Setup) -> MfuPeak | None:
    peak = setup.peak_tflops or _peak_tflops(setup.device)

    def operations(config: RunConfig) -> tuple[float, float]:
        counts = _estimate(config, setup).evaluations
        return counts.forward_flops, counts.gradient_flops

    return MfuPeak(tflops=peak, operations=operations) if peak else None


def config_of(setup: Setup) -> RunConfig:
    """Return the config of a run on the one GPU."""
    size = 16 if setup.is_tiny else setup.size
    return parse_config(
        {
            "iterations": 1,
            "model": {
                "path": "no/weights",
                "dtype": setup.dtype,
                "height": size,
                "width": size,
                "max_sequence_length": 2 if setup.is_tiny else 128,
                "guidance": setup.guidance,
                "forward_batch": min(setup.forward_batch, setup.members),
                "decode_batch": setup.decode_batch,
                "gradient_checkpointing": setup.has_checkpointing,
                "compile": setup.compile,
                **(TUNED if setup.is_tuned else {}),
            },
            "data": {"train": "none", "heldout": "none"},
            "cluster": {role: {"gpus": float(setup.device == "cuda")} for role in ("rollout", "learner")},
            "group": {"size": setup.members, "shard": setup.members, "per_iteration": 2},
            "rewards": {"none": {"scorer": "geneval"}},
            "evaluation": {"component": "reward", "batch": setup.members},
        }
    )


def _rollout(config: RunConfig, backbone: PipelineBackbone, substeps: int, setup: Setup) -> dict[str, float]:
    """Measure images per second of finished trajectories, including the decoding of all images to be scored."""
    tree = config.model_dump(mode="json")
    tree["credit"]["rule"] = "gains" if substeps else "uniform"
    tree["completion"]["substeps"] = max(1, substeps)
    varied = parse_config(tree)
    policy = policy_of(backbone, varied)
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text=""),
        first_member=0,
        members=varied.group.shard,
        adapter_version=0,
        adapter_digest="",
    )
    with peak_memory() as memory:
        seconds = seconds_of(lambda: rollout_shard(policy, request, varied), rounds=setup.rounds)
    name = f"T'={substeps}" if substeps else "plain"
    return {f"{name}, images/s": varied.group.shard / seconds, f"{name}, peak GiB": memory["gib"]}


def _learner(config: RunConfig, policy: FlowPolicy, lora: Lora, setup: Setup) -> dict[str, float]:
    """Measure forward and backward of (trajectory, step) pairs, with an optimizer step after every eight batches."""
    batch = min(setup.learner_batch, setup.members)
    log_probs, pairs = pairs_of(policy, config, batch)
    optimizer = torch.optim.AdamW(lora.parameters.values(), lr=1e-9, fused=setup.device == "cuda" or None)

    def update() -> None:
        for _ in range(8):
            pairs()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    with torch.inference_mode():
        drawn = log_probs()  # before any gradient, as a rollout does
    pairs()
    wait()
    first = time.perf_counter() - began
    # Before the optimizer moves the adapter, by however little.
    deviations = [float((log_probs().detach() - drawn).abs().max()) for _ in range(REPLAYS)]
    kinds = milliseconds_by_kind(pairs, device=setup.device)
    with peak_memory() as memory:
        seconds = seconds_of(update, rounds=setup.rounds)
    figures = {
        "learner, first forward and batch s": first,
        "learner, pairs/s": 8 * batch / seconds,
        "learner, TFLOP/s": 8 * batch * _operations_of_a_pair(config, setup) / seconds / 1e12,
        "learner, peak GiB": memory["gib"],
        f"learner, largest |log ratio| of {REPLAYS} replays": max(deviations),
        **{f"learner, ms of {batch} pairs: {kind}": spent for kind, spent in kinds.items()},
    }
    peak = setup.peak_tflops or _peak_tflops(setup.device)
    if peak:
        figures["learner, share of bf16 peak"] = figures["learner, TFLOP/s"] / peak
    if not setup.compile:  # it would compile all again
        figures["learner in any order, pairs/s"] = 8 * batch / _in_any_order(update, setup)
    return figures


def pairs_of(policy: FlowPolicy, config: RunConfig, rows: int) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """Make the work of a micro-batch of random pairs.

    Args:
        policy: computes the log-probs.
        config: sets the loss.
        rows: number of pairs.

    Returns:
        A function that returns the log-probs [rows], and one that computes the gradients of their loss.
    """
    device = next(policy.backbone.transformer.parameters()).device
    latents, following = (normal(at, shape=(rows, *policy.backbone.latent_shape)).to(device) for at in ("now", "next"))
    conditioning, k = policy.conditioning("", ""), policy.steps[len(policy.steps) // 2]

    def log_probs() -> Tensor:
        return policy.transition(latents, k, conditioning=conditioning)[0].log_prob(following)

    def pairs() -> None:
        found = log_probs()
        loss, _ = clipped_surrogate(
            found - found.detach(), advantages=torch.ones_like(found), clip_range=config.learner.clip_range
        )
        loss.mean().backward()

    return log_probs, pairs


def _operations_of_a_pair(config: RunConfig, setup: Setup) -> float:
    """Count them on a model of its own: torch counts nothing in compiled blocks."""
    tree = config.model_dump(mode="json")
    tree["model"]["compile"] = None
    plain = parse_config(tree)
    backbone = random_backbone(plain.model, is_tiny=setup.is_tiny, device=setup.device)
    random_lora(backbone.transformer, plain.model)
    with FlopCounterMode(display=False) as counter:
        pairs_of(policy_of(backbone, plain), plain, 1)[1]()
    return counter.get_total_flops()


def _in_any_order(work: Callable[[], Any], setup: Setup) -> float:
    """Return the seconds of the work with kernels that may give other bits every time."""
    torch.use_deterministic_algorithms(mode=False)
    try:
        return seconds_of(work, rounds=setup.rounds)
    finally:
        torch.use_deterministic_algorithms(mode=setup.device == "cuda")


def _publication(lora: Lora) -> dict[str, float]:
    began = time.perf_counter()
    adapter = lora.export(version=1)
    exported = time.perf_counter()
    lora.load(adapter)
    loaded = time.perf_counter()
    return {
        "adapter, MB": sum(array.nbytes for array in adapter.arrays.values()) / 1e6,
        "adapter, export s": exported - began,
        "adapter, load s": loaded - exported,
    }


def _estimate(config: RunConfig, setup: Setup) -> Estimate:
    tree = config.model_dump(mode="json")
    tree["model"]["compile"] = None
    plain, fake = parse_config(tree), FakeTensorMode()
    hollow = random_backbone(plain.model, is_tiny=setup.is_tiny, device="cpu", within=fake)
    return estimate_of(plain, hollow, [], SD3.adapter(plain.model.lora), fake=fake)


def _estimates(config: RunConfig, setup: Setup, figures: dict[str, float]) -> dict[str, float]:
    """Compare the learner's estimated memory with the measured one, for the same batch."""
    tree = config.model_dump(mode="json")
    tree["model"]["forward_batch"] = min(setup.learner_batch, setup.members)
    found = _estimate(parse_config(tree), setup)
    tensors = sum(size for part, size in found.learner.items() if part != "context") / 2**30
    return {"learner, estimated GiB": tensors, "learner, estimated / measured": tensors / figures["learner, peak GiB"]}


def _peak_tflops(device: str) -> float | None:
    card = find_card(torch.cuda.get_device_name()) if device == "cuda" else None
    return card.tflops if card else None


def main(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --iterations, overrides of the preset.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Torch device.")] = Setup.device,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the transformer.")] = Setup.dtype,
    size: Annotated[int, typer.Option(help="Height and width of an image in pixels.")] = Setup.size,
    members: Annotated[int, typer.Option(help="Samples of a shard.", min=2)] = Setup.members,
    forward_batch: Annotated[int, typer.Option(help="Most samples of one forward.", min=1)] = Setup.forward_batch,
    learner_batch: Annotated[
        int, typer.Option(help="Samples of one forward and backward.", min=1)
    ] = Setup.learner_batch,
    decode_batch: Annotated[int, typer.Option(help="Images that the VAE decodes at once.", min=1)] = Setup.decode_batch,
    substeps: Annotated[list[int], typer.Option(help="T' of the completions.", min=1)] = [2, 5],  # noqa: B006
    rounds: Annotated[
        int, typer.Option(help="Measured calls of each work, after one to warm up.", min=1)
    ] = Setup.rounds,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance weight.", min=1.0)] = Setup.guidance,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Use gradient checkpointing.")] = False,
    compile: Annotated[str | None, typer.Option(help="torch.compile backend, such as inductor.")] = None,  # noqa: A002
    tuned: Annotated[bool, typer.Option("--tuned", help="Take all kernels that are off by default.")] = False,
    peak_tflops: Annotated[float | None, typer.Option(help="The GPU's dense bf16 peak, if unknown.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Use a tiny architecture and 16 x 16 pixels.")] = False,
    is_estimate: Annotated[
        bool, typer.Option("--estimate", help="Only compute costs and memory; this needs no GPU.")
    ] = False,
    iterations: Annotated[
        int, typer.Option(help="Train sd35_geneval for so many iterations on one GPU instead.", min=0)
    ] = 0,
    run: Annotated[Path, typer.Option(help="With --iterations, the run folder; it must not exist.")] = Path("runs/gpu"),
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file that receives the figures too.")] = None,
) -> None:
    """Measure how fast a GPU generates and learns, with SD3.5-Medium's architecture and random weights."""
    setup = Setup(
        device=device,
        dtype=dtype,
        size=size,
        members=members,
        forward_batch=forward_batch,
        learner_batch=learner_batch,
        decode_batch=decode_batch,
        guidance=guidance,
        has_checkpointing=checkpointing,
        compile=compile,
        is_tuned=tuned,
        peak_tflops=peak_tflops,
        is_tiny=tiny,
        rounds=rounds,
        substeps=tuple(substeps),
    )
    if is_estimate:
        found = estimate(setup)
        for line in (*found.lines(), *memory_lines(config_of(setup), found)):
            Console().print(line, soft_wrap=True)
        return
    if words and not iterations:
        raise typer.BadParameter(f"overrides of the preset need --iterations, got {words[0]}")
    if iterations and run.exists():
        raise typer.BadParameter(f"--run must name a folder that does not exist, got {run}: name another one")
    figures: dict[str, float] = {}
    if iterations:
        figures = iterate(setup, run, iterations=iterations, words=words or ())
    else:
        for found in track(measure(setup), "measuring", total=len(substeps) + 3 + (device == "cuda")):
            figures |= found
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    title = f"{'tiny' if tiny else 'SD3.5-Medium'}, {dtype}, {name}"
    show([{"figure": figure, "value": f"{value:.4g}"} for figure, value in figures.items()], title)
    if json_file:
        write_json(json_file, {"device": name, **figures})


if __name__ == "__main__":
    typer.run(main)

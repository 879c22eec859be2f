"""FLUX.1 and Qwen-Image with random weights: time and memory of a gradient, and how weights move and are shared."""

import json
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.speed.slot.part import Figures, Where, tried
from benchmarks.speed.slot.timing import peak_memory, seconds_of, wait
from deploy.tools.estimate import pass_cost, pass_of
from flow.device import computing
from flow.fused import keep_as_on_gpu
from flow.models.contract import EMBEDS, Conditioning, stack
from flow.models.hollow import attach_hollow_adapter, hollow_backbone
from flow.models.hub import known_configs
from flow.models.located import adapter_config
from flow.models.pipeline import PipelineBackbone
from flow.spread import spread
from protocol.config.cluster import RoleConfig
from protocol.config.model import LoraConfig, ModelConfig

LORA = LoraConfig(rank=64, alpha=128)
TOKENS = {"black-forest-labs/FLUX.1-dev": 512, "Qwen/Qwen-Image": 64}
"""Text tokens, by model: FLUX.1's preset has 512, and a prompt for Qwen-Image rarely has more than 64."""
TINY = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 1,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 16,
}
"""Keys of a transformer's config that are made small."""
LENGTHS = 64, 48, 32, 16
"""Tokens of the prompts of Qwen-Image's four rows, which are masked."""
PATIENCE = 60
"""Seconds within which another process must have started and computed."""
GIB = 2**30


def flux(where: Where) -> Iterator[Figures]:
    """Measure FLUX.1 with 3 and 6 rows, with checkpointing and without, its rest in host memory, and a shared base."""
    with TemporaryDirectory() as folder:
        model = _model("black-forest-labs/FLUX.1-dev", where, Path(folder))
        backbone = hollow_backbone(model, device=where.device, within=torch.device(where.device))
        yield tried("base shared with another process", partial(_shared, model, backbone, where))
        attach_hollow_adapter(backbone.transformer, adapter_config(model), within=torch.device(where.device))
        counts = (1, 2) if where.is_tiny else (3, 6)
        for is_checkpointed in (True, False):
            for rows in counts:
                work = pass_of(backbone, rows, has_gradient=True, device=where.device)
                yield tried(
                    _name(rows, is_checkpointed=is_checkpointed),
                    partial(_gradient, backbone, work, is_checkpointed=is_checkpointed),
                )
        yield tried("rest in host memory", partial(_moved, backbone))


def flux_estimate(where: Where) -> Iterator[Figures]:
    """Estimate what `GiB above` of `flux` measures, as `train --dry-run` does; no GPU is needed, so no slot runs it."""
    with TemporaryDirectory() as folder:
        model, fake = _model("black-forest-labs/FLUX.1-dev", where, Path(folder)), FakeTensorMode()
        backbone = hollow_backbone(model, within=fake)
        attach_hollow_adapter(backbone.transformer, adapter_config(model), within=fake)
    keep_as_on_gpu(backbone.transformer)
    for is_checkpointed in (True, False):
        _checkpoint(backbone, is_checkpointed=is_checkpointed)
        for rows in (1, 2) if where.is_tiny else (3, 6):
            with fake:
                peak = pass_cost(backbone, rows, has_gradient=True).peak
            yield {f"{_name(rows, is_checkpointed=is_checkpointed)}, GiB above": peak / GIB}


def qwen(where: Where) -> Iterator[Figures]:
    """Measure Qwen-Image with four masked rows and checkpointing, and count what makes the CPU wait for the GPU."""
    with TemporaryDirectory() as folder:
        model = _model("Qwen/Qwen-Image", where, Path(folder))
        backbone = hollow_backbone(model, device=where.device, within=torch.device(where.device))
        attach_hollow_adapter(backbone.transformer, adapter_config(model), within=torch.device(where.device))
    rows = len(LENGTHS)
    latents, sigma, longest = _inputs(backbone, rows, where)
    prompts = zip(longest.tensors[EMBEDS].split(1), LENGTHS, strict=True)
    conditioning = stack([Conditioning.of({EMBEDS: embeds[:, :length]}) for embeds, length in prompts])

    def work(*, has_gradient: bool) -> None:
        with torch.set_grad_enabled(has_gradient):
            velocity = backbone.velocity(latents, sigma, conditioning)
            if has_gradient:
                velocity.square().mean().backward()

    @torch.no_grad()
    def one_by_one() -> None:  # as `model.splits_guidance` does with two rows
        for row in range(rows):
            here = slice(row, row + 1)
            backbone.velocity(latents[here], sigma[here], conditioning.rows(here))

    yield {f"{rows} masked rows, forward ms": 1e3 * seconds_of(partial(work, has_gradient=False), rounds=3)}
    yield {f"{rows} rows without a mask, one by one, forward ms": 1e3 * seconds_of(one_by_one, rounds=3)}
    yield tried(f"{rows} masked rows, checkpointed", partial(_gradient, backbone, partial(work, has_gradient=True)))
    yield {f"wait at {at}": count for at, count in _waits(partial(work, has_gradient=True)).items()}
    yield {"waits of a forward": float(sum(_waits(partial(work, has_gradient=False)).values()))}
    yield tried("blocks on two devices", partial(_spread, backbone, (latents, sigma, conditioning), where))


def _model(path: str, where: Where, folder: Path) -> ModelConfig:
    """Return the model's config; its folder holds the config files that we know, made small if wanted."""
    side, tokens = (32, 64) if where.is_tiny else (512, TOKENS[path])
    known = known_configs(path)
    assert known
    if where.is_tiny:
        known = shutil.copytree(known, folder / "tiny")
        file = known / "transformer" / "config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, **{key: value for key, value in TINY.items() if key in settings}}))
    return ModelConfig(
        path=str(known), dtype="bfloat16", height=side, width=side, max_sequence_length=tokens, lora=LORA
    )


def _inputs(backbone: PipelineBackbone, rows: int, where: Where) -> tuple[Tensor, Tensor, Conditioning]:
    latents = torch.randn(rows, *backbone.latent_shape, device=where.device)
    return latents, torch.full((rows,), 0.5, device=where.device), backbone.example(rows)


def _name(rows: int, *, is_checkpointed: bool) -> str:
    return f"{rows} rows{', checkpointed' if is_checkpointed else ''}"


def _gradient(backbone: PipelineBackbone, work: Callable[[], None], *, is_checkpointed: bool = True) -> Figures:
    """Measure forward and backward; the memory is what torch takes above the weights and the adapter."""
    transformer = backbone.transformer
    _checkpoint(backbone, is_checkpointed=is_checkpointed)
    transformer.zero_grad(set_to_none=True)
    held = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0
    with peak_memory() as memory:
        seconds = seconds_of(work, rounds=2)
    transformer.zero_grad(set_to_none=True)
    return {"forward and backward ms": 1e3 * seconds, "GiB held": held, "GiB above": memory["gib"] - held}


def _checkpoint(backbone: PipelineBackbone, *, is_checkpointed: bool) -> None:
    transformer: Any = backbone.transformer
    _ = transformer.enable_gradient_checkpointing() if is_checkpointed else transformer.disable_gradient_checkpointing()


def _moved(backbone: PipelineBackbone) -> Figures:
    seconds = []
    for move in (backbone.rest, backbone.wake):
        began = time.perf_counter()
        move()
        wait()
        seconds.append(time.perf_counter() - began)
    return {"there s": seconds[0], "back s": seconds[1]}


def _shared(model: ModelConfig, backbone: PipelineBackbone, where: Where) -> Figures:
    """Let another process compute with the same weights, of which it has no copy, and compare the velocities' bits."""
    inputs = _inputs(backbone, 1, where)
    with torch.no_grad():
        expected = backbone.velocity(*inputs).cpu()
    context = torch.multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    began = time.perf_counter()
    process = context.Process(
        target=_compute, args=(model, dict(backbone.transformer.state_dict()), inputs, where, answers), daemon=True
    )
    process.start()
    while answers.empty():
        if not process.is_alive() or time.perf_counter() > began + PATIENCE:
            process.kill()
            raise RuntimeError(f"no answer from the other process, which ended with {process.exitcode}")
        time.sleep(0.1)
    found, own = answers.get()
    process.join()
    return {
        "bits equal": float(torch.equal(torch.from_numpy(found), expected)),
        "GiB of its own": own,
        "s": time.perf_counter() - began,
    }


def _compute(model: ModelConfig, weights: dict[str, Tensor], inputs: Any, where: Where, answers: Any) -> None:
    on_gpu = where.device == "cuda"
    with computing(RoleConfig(gpus=float(on_gpu), threads=torch.get_num_threads())), torch.no_grad():
        backbone = hollow_backbone(model, device="meta", within=torch.device("meta"))
        backbone.transformer.load_state_dict(weights, assign=True)
        with peak_memory() as memory:
            velocity = backbone.velocity(*inputs)
        answers.put((velocity.cpu().numpy(), memory["gib"]))


def _spread(backbone: PipelineBackbone, inputs: Any, where: Where) -> Figures:
    """Let half of the blocks compute on another device, as with `cluster.rollout.gpus` 2, and compare the bits.

    Two forwards one after the other overlap, as the pieces of `model.forward_batch` do.
    """
    if where.device == "cuda" and torch.cuda.device_count() < 2:
        return {"left out": "the machine has one GPU"}
    other = torch.device(where.device, 1)

    @torch.no_grad()
    def both() -> list[Tensor]:
        return [backbone.velocity(*inputs) for _ in range(2)]

    expected, alone = both()[0], seconds_of(both, rounds=3)
    spread(backbone.transformer, [torch.device(where.device), other], backbone.family.block_lists)
    found = both()[0]
    return {
        "bits equal": float(torch.equal(found.to(expected.device), expected)),
        "two forwards ms": 1e3 * seconds_of(both, rounds=3),
        "of one device ms": 1e3 * alone,
    }


def _waits(work: Callable[[], None]) -> Counter[str]:
    """Count, by file and line, the operations that make the CPU wait for the GPU; none on a CPU."""
    work()
    wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    found = [each for each in caught if "synchronizing" in str(each.message)]
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in found)

"""The gradient of half precision against that of float32 with the same weights, at a preset's number of pairs.

The adapter of SD3.5's shape: qk-norm, and dual attention in the first blocks. All weights are numbers of bfloat16, so
they are the same in every dtype.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel

from flow.rollout import RolloutPolicy
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.messages import Adapter, Prompt, ScoredGroup, ScoredShard, Scores, ShardRequest, digest_of
from tests.support.learning.gradients import relative_difference, watch_gradients
from tests.support.learning.groups import learn
from tests.support.worlds.tiny_models import write_sd35

Config = Callable[..., RunConfig]
PROMPT = Prompt(index=0, text="a red circle")
GROUPS, MEMBERS, SHARD = 96, 48, 4
PAIRS = 4608
"""Of an optimizer step in the presets: 24 groups of 24 members with 8 steps. Here each member trains one step."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks of width 128; latents 4x32x32, so 256 tokens of the image."""
    return written(tmp_path_factory.mktemp("small"), heads=2, side=32, channels=4)


def written(folder: Path, *, heads: int, side: int, channels: int) -> Path:
    """Write a model whose weights have the variance of trained ones, rounded to bfloat16."""
    width = 64 * heads
    write_sd35(
        folder,
        has_t5=False,
        sample_size=side,
        in_channels=channels,
        out_channels=channels,
        num_layers=4,
        attention_head_dim=64,
        num_attention_heads=heads,
        caption_projection_dim=width,
        pos_embed_max_size=side,
        dual_attention_layers=(0, 1),
    )
    transformer = SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            if weight.ndim > 1:
                fan_in = weight[0].numel()
                weight.copy_(torch.randn(weight.shape, generator=generator) * fan_in**-0.5)
            elif name.endswith("bias"):
                weight.zero_()
            weight.copy_(of_bfloat16(weight))
    transformer.save_pretrained(folder / "transformer")
    return folder


def of_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """Round to numbers that bfloat16 and float16 hold exactly."""
    return torch.where(numbers.abs() < 2.0**-16, 0.0, numbers.bfloat16().float())


def configured(tiny_config: Config, folder: Path, dtype: str) -> RunConfig:
    model = {"path": str(folder), "dtype": dtype, "max_sequence_length": 2, "lora": {"rank": 32, "alpha": 64}}
    return tiny_config(
        model=model,
        sampling={"steps": 10, "window": {"rule": "fixed", "first": 0, "size": 1}},
        credit={"rule": "uniform", "step_weights": {"rule": "none"}},
        group={"size": MEMBERS, "shard": SHARD, "per_iteration": GROUPS},
        learner={"updates_per_iteration": 1, "probe_every": 0, "clip_range": 0.5},
    )


def an_adapter(learner: Learner, size: float) -> Adapter:
    """The learner's fresh adapter with B of this size."""
    numbers = torch.Generator().manual_seed(6)
    arrays = {}
    for name, array in learner.adapter().arrays.items():
        held = torch.from_numpy(array)
        drawn = size * torch.randn(held.shape, generator=numbers) if "lora_B" in name else held
        arrays[name] = of_bfloat16(drawn).numpy()
    return Adapter(version=0, arrays=arrays, digest=digest_of(arrays))


def scored_groups(config: RunConfig, adapter: Adapter) -> list[ScoredGroup]:
    """Groups of which the first teaches, by two members of its first shard; in all others every member scores 0.5."""
    policy = RolloutPolicy(config)
    policy.receive(adapter)
    first = ShardRequest(
        iteration=0,
        group=0,
        prompt=PROMPT,
        first_member=0,
        members=SHARD,
        adapter_version=adapter.version,
        adapter_digest=adapter.digest,
    )
    _, rollout, images = policy.rollout(first)
    assert len(images) == SHARD

    def shard(group: int, member: int) -> ScoredShard:
        request = replace(first, group=group, first_member=member)
        values = np.full(SHARD, 0.5, np.float32)
        if request == first:
            values[:] = 0.25, 0.375, 0.625, 0.75
        scores = Scores(values=values, valid=np.ones(SHARD, bool), reasons=("",) * SHARD)
        own = replace(rollout, request=request)
        finals = tuple(f"{group}, {member + row}" for row in range(SHARD))
        return ScoredShard(rollout=own, facts=replace(rollout.facts(), request=request, finals=finals), scores=scores)

    members = range(0, MEMBERS, SHARD)
    return [ScoredGroup(prompt=PROMPT, shards=tuple(shard(g, m) for m in members)) for g in range(GROUPS)]

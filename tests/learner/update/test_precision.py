"""Precision and memory options: each changes what it says it changes, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock

from flow.adapter.lora_file import write_lora
from flow.models.load import load_backbone
from flow.policy import build_policy
from flow.rollout import RolloutPolicy
from learner.checkpoint import read_checkpoint, write_checkpoint
from learner.update.learner import SCALER, Learner
from protocol.config.run import RunConfig
from protocol.config.sampling import CompletionConfig
from protocol.errors import ModelError, NonFiniteError, ParityError
from protocol.messages import Adapter, Prompt, ScoredGroup, ScoredShard, Scores, ShardRequest, digest_of
from tests.support.learning.gradients import relative_difference, watch_gradients
from tests.support.learning.groups import learn
from tests.support.worlds.compilers import COUNTING, compiled_graphs

Config = Callable[..., RunConfig]
PROMPT = Prompt(index=0, text="a red circle", negative="photo")


def model(tiny_config: Config, **settings: Any) -> RunConfig:
    held = tiny_config().model.model_dump()
    return tiny_config(model={**held, **settings}, group={"size": 4, "shard": 4, "per_iteration": 1})


def draw_groups(policy: RolloutPolicy, config: RunConfig, learner: Learner) -> list[ScoredGroup]:
    adapter = learner.adapter()
    policy.receive(adapter)
    request = ShardRequest(
        iteration=learner.iteration,
        group=0,
        prompt=PROMPT,
        first_member=0,
        members=config.group.shard,
        adapter_version=adapter.version,
        adapter_digest=adapter.digest,
    )
    _, rollout, images = policy.rollout(request)
    values = images[..., 0].mean((1, 2)).astype(np.float32) / 255
    scores = Scores(values=values, valid=np.ones(len(values), bool), reasons=("",) * len(values))
    return [ScoredGroup(prompt=PROMPT, shards=(ScoredShard(rollout=rollout, facts=rollout.facts(), scores=scores),))]


def pair(config: RunConfig) -> tuple[Learner, RolloutPolicy]:
    return Learner(config), RolloutPolicy(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_divergence_from_the_reference_is_exactly_zero_at_start_and_not_later(
    tiny_config: Config, dtype: str
) -> None:
    config = model(tiny_config, dtype=dtype)
    weighted = {"kl": {"weight": 0.1, "rule": "full"}, "updates_per_iteration": 1, "learning_rate": 0.01}
    config = config.model_copy(update={"learner": type(config.learner)(**weighted)})
    learner, policy = pair(config)
    divergences = [learn(config, draw_groups(policy, config, learner), learner)["train/reference_kl"] for _ in range(2)]
    assert divergences[0] == 0
    assert divergences[1] > 0


def test_half_precision_freezes_half_weights_and_trains_float32_ones(tiny_config: Config) -> None:
    policy, _ = build_policy(model(tiny_config, dtype="bfloat16"), device="cpu")
    transformer = policy.backbone.transformer
    trained = [p for p in transformer.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in transformer.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"forward_batch": 3}], ids=str)
def test_memory_options_have_the_gradient_of_the_plain_update(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Gradients before clipping: one AdamW step is the sign of the gradient and shows no wrong scale."""
    gradients = watch_gradients(monkeypatch)
    plain, frugal = (model(tiny_config, **each) for each in ({}, settings))
    learners = [Learner(config) for config in (plain, frugal)]
    groups = draw_groups(RolloutPolicy(plain), plain, learners[0])
    for config, learner in zip((plain, frugal), learners, strict=True):
        learn(config, groups, learner)
    first, second = gradients
    assert first.norm() > 0
    assert relative_difference(first, second) < 1e-4


def count_calls(monkeypatch: pytest.MonkeyPatch, block: type[torch.nn.Module], calls: list[int]) -> None:
    """Note, whenever a module of this class runs, how many rows it gets."""
    forward = block.forward

    def counted(self: torch.nn.Module, *args: Any, **how: Any) -> Any:
        calls.append(len(args[0] if args else how["hidden_states"]))
        return forward(self, *args, **how)

    monkeypatch.setattr(block, "forward", counted)


def test_checkpointed_gradients_compute_each_block_twice(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, blocks = [], 2
    calls: list[int] = []
    count_calls(monkeypatch, JointTransformerBlock, calls)
    for settings in ({}, {"gradient_checkpointing": True}):
        config = model(tiny_config, **settings)
        learner, policy = pair(config)
        groups = draw_groups(policy, config, learner)
        calls.clear()
        learn(config, groups, learner)
        counts.append(len(calls))
    probes = steps = 3
    assert counts == [blocks * (probes + steps), blocks * (probes + 2 * steps)]


def test_forwards_hold_no_more_states_than_allowed(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model(tiny_config, forward_batch=3, guidance=2.0)
    config = config.model_copy(update={"completion": CompletionConfig(tapers=False)})
    learner, policy = pair(config)
    rows: list[int] = []
    count_calls(monkeypatch, SD3Transformer2DModel, rows)
    learn(config, draw_groups(policy, config, learner), learner)
    assert set(rows) == {2, 4, 6}, "1, 4 and 9 states in even pieces, two rows each under guidance"


def set_scale(learner: Learner, scale: float) -> None:
    """Go on with another loss scale."""
    state = learner.state()
    learner.restore(replace(state, optimizer=state.optimizer | {f"{SCALER}/scale": np.array(scale, np.float32)}))


def scale_of(learner: Learner) -> float:
    return learner.state().optimizer[f"{SCALER}/scale"].item()


def test_an_overflow_in_float16_lowers_the_scale_and_leaves_the_adapter(tiny_config: Config) -> None:
    config = model(tiny_config, dtype="float16")
    learner, policy = pair(config)
    groups = draw_groups(policy, config, learner)
    before = learner.adapter().digest
    set_scale(learner, 2.0**120)
    metrics = learn(config, groups, learner)
    assert learner.adapter().digest == before
    assert scale_of(learner) == 2.0**119
    assert metrics["train/grad_norm"] == 0


def test_the_scale_of_float16_comes_back_from_a_checkpoint_s_files(tiny_config: Config, tmp_path: Path) -> None:
    config = model(tiny_config, dtype="float16")
    learner, policy = pair(config)
    set_scale(learner, 512.0)
    learn(config, draw_groups(policy, config, learner), learner)
    state = learner.state()
    assert any(name.startswith(f"{SCALER}/") for name in state.optimizer)
    again = Learner(config)
    again.restore(read_checkpoint(write_checkpoint(tmp_path, state, config.model.lora, keep=1)))
    held = again.state().optimizer
    assert scale_of(again) == scale_of(learner) == 512.0
    assert all(np.array_equal(held[name], array) for name, array in state.optimizer.items())
    assert {name: array.shape for name, array in held.items()} == {n: a.shape for n, a in state.optimizer.items()}


def test_float32_keeps_no_scale_and_refuses_an_overflow(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model(tiny_config)
    learner, policy = pair(config)
    groups = draw_groups(policy, config, learner)
    monkeypatch.setattr("learner.update.learner.clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    with pytest.raises(NonFiniteError, match="gradient norm must be finite"):
        learn(config, groups, learner)
    assert not any(name.startswith(SCALER) for name in learner.state().optimizer)


def test_the_probe_stops_a_run_whose_sides_disagree(tiny_config: Config) -> None:
    low, full = model(tiny_config, dtype="bfloat16"), model(tiny_config)
    learner, policy = Learner(low), RolloutPolicy(full)
    with pytest.raises(ParityError, match=r"learner.probe_bound 0.0001, got a ratio .* at step \d"):
        learn(low, draw_groups(policy, full, learner), learner)
    assert learner.iteration == 0


def test_the_probe_asks_when_it_is_due_and_only_of_groups_of_this_version(tiny_config: Config) -> None:
    config = model(tiny_config)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"probe_every": 2})})
    learner, policy = pair(config)
    asked = []
    for _ in range(3):
        asked.append("probe/ratio_deviation" in learn(config, draw_groups(policy, config, learner), learner))
    assert asked == [True, False, True]
    stale = draw_groups(policy, config, learner)
    shard = stale[0].shards[0]
    request = replace(shard.facts.request, iteration=4, adapter_version=1)
    old = replace(shard, rollout=replace(shard.rollout, request=request), facts=replace(shard.facts, request=request))
    learner.iteration = 4
    metrics = learn(config, [replace(stale[0], shards=(old,))], learner)
    assert "probe/ratio_deviation" not in metrics


def test_an_unknown_compiler_is_refused(tiny_config: Config) -> None:
    with pytest.raises(
        ModelError, match=r"model.compile must be one of torch's backends \[.*'inductor'.*\], got 'gcc'"
    ):
        load_backbone(model(tiny_config, compile="gcc").model)


def test_a_learner_starts_from_a_saved_adapter_and_its_reference_stays_the_base_model(
    tiny_config: Config, tmp_path: Path
) -> None:
    plain = model(tiny_config)
    learner, policy = pair(plain)
    for _ in range(2):
        learn(plain, draw_groups(policy, plain, learner), learner)
    held = learner.adapter()
    write_lora(tmp_path, held, plain.model.lora)
    config = model(tiny_config, lora={**plain.model.lora.model_dump(), "start": str(tmp_path)})
    weighted = {"kl": {"weight": 0.1, "rule": "full"}, "updates_per_iteration": 1}
    config = config.model_copy(update={"learner": type(config.learner)(**weighted)})
    started = Learner(config)
    assert started.adapter().digest == held.digest
    assert started.iteration == 0
    metrics = learn(config, draw_groups(RolloutPolicy(config), config, started), started)
    assert metrics["train/first_ratio_deviation"] == 0
    assert metrics["train/reference_kl"] > 0


def test_a_learner_starts_from_an_adapter_on_the_hub(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the hub's cache, where a download would leave it; there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--example--lora"
    for name in ("refs", f"snapshots/{'1' * 40}"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text("1" * 40)
    plain = model(tiny_config)
    held = Learner(plain).adapter()
    arrays = {name: array + np.float32(0.25) for name, array in held.arrays.items()}
    saved = Adapter(version=0, arrays=arrays, digest=digest_of(arrays))
    write_lora(repo / "snapshots" / ("1" * 40), saved, plain.model.lora)

    def started(start: str, **more: str) -> Learner:
        return Learner(model(tiny_config, lora={**plain.model.lora.model_dump(), "start": start, **more}))

    assert started("example/lora").adapter().digest == saved.digest != held.digest
    (repo / "refs" / "main").write_text("2" * 40)
    assert started("example/lora", revision="1" * 40).adapter().digest == saved.digest
    with pytest.raises(
        ModelError, match="the LoRA example/other .*set model.lora.start to a folder or file"
    ) as refused:
        started("example/other")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"guidance": 3.0, "forward_batch": 2}], ids=str)
def test_an_update_runs_the_graphs_that_the_rollout_compiled(tiny_config: Config, settings: dict[str, Any]) -> None:
    graphs = compiled_graphs()
    torch.compiler.reset()
    config = model(tiny_config, compile=COUNTING, **settings)
    learner, policy = pair(config)
    groups = draw_groups(policy, config, learner)
    compiled = len(graphs)
    metrics = learn(config, groups, learner)
    assert len(graphs) == compiled > 0
    assert metrics["probe/ratio_deviation"] == metrics["train/first_ratio_deviation"] == 0
    torch.compiler.reset()

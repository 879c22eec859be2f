"""The predicted memory of a role against what a real step holds, and what bounds it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deploy.tools.estimate import GIB, estimate
from deploy.tools.fake_memory import CostMeter
from deploy.tools.memory import fit_problems, roles_of
from flow.models.hollow import attach_hollow_adapter, hollow_backbone
from flow.models.located import adapter_config
from flow.policy import build_policy
from flow.rollout import rollout_shard
from learner.update.micro_batches import MicroBatch
from learner.update.objective import Objective
from protocol.config.run import RunConfig
from protocol.messages import Prompt, ShardRequest

Config = Callable[..., RunConfig]
ROWS = 6


def configured(tiny_config: Config, **settings: Any) -> RunConfig:
    return tiny_config(model={**tiny_config().model.model_dump(), **settings})


@contextmanager
def saved_for_backward(apart: torch.nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that autograd keeps inside the block, but those of a module's parameters."""
    own = [parameter.untyped_storage() for parameter in apart.parameters()]
    known, held = {id(storage) for storage in own}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            held[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield held


def velocity_of(backbone: Any) -> torch.Tensor:
    latents = torch.zeros(ROWS, *backbone.latent_shape)
    return backbone.velocity(latents, torch.full((ROWS,), 0.5), backbone.example(ROWS))


def bytes_of(storages: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def test_the_fake_forward_saves_exactly_what_a_real_one_saves(tiny_config: Config) -> None:
    config = tiny_config()
    real = build_policy(config, device="cpu")[0].backbone
    fake = FakeTensorMode()
    hollow = hollow_backbone(config.model, within=fake)
    attach_hollow_adapter(hollow.transformer, adapter_config(config.model), within=fake)
    with saved_for_backward(real.transformer) as kept:
        velocity = velocity_of(real)
    with fake, saved_for_backward(hollow.transformer) as guessed:
        hollow_velocity = velocity_of(hollow)
    assert bytes_of(guessed) == bytes_of(kept) > 0
    assert velocity.requires_grad and hollow_velocity.requires_grad


def test_a_hollow_model_reads_as_many_tokens_as_the_real_one(tiny_config: Config) -> None:
    """CLIP's published tokenizers pad to 77; a small world's may pad to fewer."""
    config = tiny_config()
    real: Any = build_policy(config, device="cpu")[0].backbone
    shapes = {name: each.shape for name, each in real.encode("a cat").tensors.items()}
    assert {name: each.shape for name, each in real.example(1).tensors.items()} == shapes
    assert {name: each.shape for name, each in hollow_backbone(config.model).example(1).tensors.items()} == shapes


@pytest.mark.parametrize("has_checkpointing", [False, True])
def test_the_largest_micro_batch_of_the_learner_is_predicted(tiny_config: Config, has_checkpointing: bool) -> None:
    config = configured(tiny_config, gradient_checkpointing=has_checkpointing)
    policy, lora = build_policy(config, device="cpu")
    rows, shape = config.group.shard, policy.backbone.latent_shape
    policy.conditioning("a cat", "")  # its embeddings stay
    micro_batch = MicroBatch(
        prompt=Prompt(index=0, text="a cat"),
        k=policy.steps[0],
        latents=torch.randn(rows, *shape),
        next_latents=torch.randn(rows, *shape),
        old_log_prob=torch.zeros(rows),
        advantages=torch.ones(rows),
        valid=torch.ones(rows, dtype=torch.bool),
    )
    with CostMeter(apart=policy.backbone.transformer.parameters()) as meter:
        Objective(policy, lora, config.learner)(micro_batch).loss.sum().backward()
    assert estimate(config).learner["forward and backward"] == pytest.approx(meter.peak, rel=0.1)


def test_what_the_sampler_holds_and_sends_is_predicted(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tiny_config, decode_batch=1)
    policy, _ = build_policy(config, device="cpu")
    policy.conditioning("a cat", "")
    backbone: Any = policy.backbone
    held: list[int] = []
    decode = backbone.decode
    monkeypatch.setattr(backbone, "decode", lambda *args, **kw: (held.append(meter.current), decode(*args, **kw))[1])
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text="a cat"),
        first_member=0,
        members=config.group.shard,
        adapter_version=0,
        adapter_digest="",
    )
    apart = [*backbone.transformer.parameters(), *backbone.vae.parameters(), *backbone.encode("a cat").tensors.values()]
    with CostMeter(apart=apart) as meter:
        rollout, images = rollout_shard(policy, request, config)
    found = estimate(config)
    assert (found.image, found.images) == (images[0].nbytes, len(images))
    assert found.trajectories == rollout.latents.nbytes
    one = estimate(configured(tiny_config, decode_batch=1)).rollout["largest step"]
    assert one > held[0], "the largest step contains what the sampler holds"


def test_more_images_than_a_chunk_take_no_more_memory_to_decode(tiny_config: Config) -> None:
    backbone: Any = build_policy(configured(tiny_config, decode_batch=2), device="cpu")[0].backbone

    def peak(images: int) -> int:
        latents = torch.zeros(images, *backbone.latent_shape)
        with CostMeter(apart=[latents, *backbone.vae.parameters()]) as meter:
            backbone.decode(latents)
        return meter.peak

    assert peak(12) == peak(4)


@pytest.mark.parametrize(("inner", "outer", "blocks"), [(24, 24, 4), (64, 64, 8), (24, 3, 3)])
def test_a_convolution_on_a_cpu_has_input_and_output_in_blocks_of_16_channels(
    inner: int, outer: int, blocks: int
) -> None:
    """As measured for 96 images of 32 x 32 pixels: 23.9, 48.0 and 17.7 MiB, without the input itself."""
    convolution = torch.nn.Conv2d(inner, outer, 3, padding=1).requires_grad_(requires_grad=False)
    images = torch.zeros(2, inner, 8, 8)
    with CostMeter(apart=[images, *convolution.parameters()], is_cpu=True) as meter:
        convolution(images)
    assert meter.peak == blocks * torch.zeros(2, 16, 8, 8).nbytes


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_more_samples_than_a_forward_hold_their_velocities_and_no_embeddings(
    tiny_config: Config, guidance: float
) -> None:
    config = configured(tiny_config, forward_batch=2, guidance=guidance)
    policy, _ = build_policy(config, device="cpu")
    conditioning = policy.conditioning("a cat", "")
    known = [
        *policy.backbone.transformer.parameters(),
        *(each for row in conditioning for each in row.tensors.values()),
    ]

    def peak(samples: int) -> int:
        latents, sigma = torch.zeros(samples, *policy.backbone.latent_shape), torch.full((samples,), 0.5)
        with torch.no_grad(), CostMeter(apart=[latents, sigma, *known]) as meter:
            velocity = policy.velocity(latents, sigma, conditioning)
        assert velocity.shape == latents.shape
        return meter.peak

    one = torch.zeros(policy.backbone.latent_shape).nbytes
    assert peak(12) - peak(4) == 8 * one


def test_a_role_on_a_gpu_has_two_memories_and_on_a_cpu_one(tiny_config: Config) -> None:
    plain = tiny_config()
    found = estimate(plain)
    rollout, learner, reward, driver, store = roles_of(plain, found)
    assert [each.role for each in (rollout, learner, driver, store)] == [
        "rollout actor",
        "learner worker",
        "driver",
        "object store",
    ]
    assert not rollout.gpu and not learner.gpu
    assert set(found.rollout) < set(rollout.host) and set(found.learner) < set(learner.host)
    assert reward.role.startswith("reward actor ") and reward.uncounted == "its scorer's model"
    assert store.host["sums of gradients"] == 4 * found.trained, "one worker puts one sum there"
    assert driver.host["adapters and optimizer"] == 12 * found.trained
    on_gpu = tiny_config(cluster={"rollout": {"gpus": 1}, "learner": {"gpus": 0.5}})
    found = estimate(on_gpu)
    rollout, learner, *_ = roles_of(on_gpu, found)
    assert rollout.gpu == found.rollout and learner.gpu == found.learner
    assert "context" in rollout.gpu and "process" in rollout.host
    assert rollout.largest == ("context", rollout.gpu["context"])
    assert reward.largest[0] == "images", "libraries do not count"
    of_two = roles_of(on_gpu, estimate(tiny_config(cluster={"rollout": {"gpus": 2}, "learner": {"gpus": 0.5}})))[0].gpu
    halves = {part for part, size in rollout.gpu.items() if of_two[part] == size // 2 < size}
    assert halves == {"transformer", "adapter"}
    assert all(of_two[part] == rollout.gpu[part] for part in rollout.gpu.keys() - halves)


def test_what_rests_and_what_the_workers_exchange_are_host_memory(tiny_config: Config) -> None:
    bundles = {"layout": "colocated", "rollout_actors": 4, "offload": True}
    config = tiny_config(cluster={**bundles, "learner": {"workers": 4, "gpus": 0.5}, "rollout": {"gpus": 0.5}})
    found = estimate(config)
    roles = {each.role: each for each in roles_of(config, found)}
    resting = roles["resting weights"]
    assert resting.host["transformer"] == found.rollout["transformer"] and resting.host["VAE"] == found.rollout["VAE"]
    assert [roles[name].count for name in ("rollout actor", "learner worker", "driver")] == [4, 4, 1]
    assert resting.count == 1, "one copy a node"
    assert roles["object store"].host["sums of gradients"] == 5 * 4 * found.trained, "4 sums of workers and the total"
    copies = "state before the update"
    assert roles["learner worker"].gpu[copies] == 2 * 4 * found.trained
    assert "resting weights" not in {each.role for each in roles_of(tiny_config(), found)}


def test_a_role_that_a_card_cannot_hold_is_named_with_the_keys_that_help(tiny_config: Config) -> None:
    config = tiny_config(cluster={"rollout": {"gpus": 0.5}, "learner": {"gpus": 1}})
    found = estimate(config)
    assert not list(fit_problems(config, found, card="H100"))
    parts = {"transformer": 30 * GIB, "forward and backward": 60 * GIB, "text encoders": 5 * GIB}
    (problem,) = fit_problems(config, replace(found, learner=parts), card="H100")
    helps = ("model.gradient_checkpointing=true", "model.dtype=bfloat16", "model.embedding_cache=FOLDER")
    for words in ("learner worker", "95.0 GiB", "H100 has 74.5", *helps):
        assert words in str(problem)
    assert not list(fit_problems(config, replace(found, learner=parts), card="H200"))
    for quantize, remedy in ((None, "model.quantize=int8 or nf4, "), ("int8", "model.quantize=nf4, "), ("nf4", "")):
        half = config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": "bfloat16", "quantize": quantize})}
        )
        (problem,) = fit_problems(half, replace(found, learner=parts), card="H100")
        assert f"checkpointing=true, {remedy}model.embedding_cache=FOLDER" in str(problem)
    (problem,) = fit_problems(config, replace(found, rollout={"largest step": 40 * GIB}), card="h100")
    assert str(problem).startswith("2 rollout actors on one GPU take about 80.0 GiB, but one h100 has 74.5")
    on_cpu = tiny_config()
    assert not list(fit_problems(on_cpu, replace(found, learner=parts), card="H100"))


def test_a_bundle_that_a_card_cannot_hold_is_told_to_offload(tiny_config: Config) -> None:
    bundle = {"layout": "colocated", "rollout_actors": 1, "rollout": {"gpus": 0.5}, "learner": {"gpus": 0.5}}
    config = tiny_config(cluster=bundle)
    (problem,) = fit_problems(config, replace(estimate(config), shared=90 * GIB), card="A100")
    rule = "together, but one A100 has 74.5: set cluster.offload=true or cluster.layout=separate, or set"
    assert rule in str(problem)


def test_the_bundles_that_ray_puts_on_one_gpu_must_fit_together(tiny_config: Config) -> None:
    bundle = {"layout": "colocated", "rollout_actors": 1, "rollout": {"gpus": 0.25}, "learner": {"gpus": 0.25}}
    found = replace(estimate(tiny_config(cluster=bundle)), shared=40 * GIB)
    (problem,) = fit_problems(tiny_config(cluster=bundle), found, card="A100")
    assert str(problem).startswith("2 bundles of a rollout actor and a learner worker on one GPU take about 80.0 GiB")
    alone = {**bundle, "rollout": {"gpus": 0.5}}
    assert not list(fit_problems(tiny_config(cluster=alone), found, card="A100"))

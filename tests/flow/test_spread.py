"""A transformer whose blocks lie on several devices computes the bits of one, and each device holds its part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flow.models.hollow import attach_hollow_adapter, hollow_backbone
from flow.models.hub import known_configs
from flow.models.load import FrozenModel
from flow.models.located import adapter_config
from flow.policy import FlowPolicy, build_policy
from flow.rollout import RolloutPolicy
from flow.spread import devices_of_parts, spread
from learner.update.learner import Learner
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from tests.support.learning.groups import iterate
from tests.support.worlds.architectures import ARCHITECTURES, LORA, model_of

Config = Callable[..., RunConfig]
TWO = ("cpu", "cpu:1")
"""torch copies a tensor to the second like to another GPU, and computes there as on the first."""


@pytest.fixture
def weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs cross, weights do not: a CPU rounds otherwise in a copy, since weights of a file lie at odd addresses."""
    monkeypatch.setattr(nn.Module, "to", lambda module, *_, **__: module)


def config_of(tiny_config: Config, folder: Path, name: str, **model: Any) -> RunConfig:
    return tiny_config(model=model_of(name, "float32", folder) | model)


def velocity(policy: FlowPolicy, *, seed: int = 0) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        latents = torch.randn(3, *policy.backbone.latent_shape)
    return policy.velocity(latents, torch.tensor([0.9, 0.5, 0.2]), policy.conditioning("a red circle", ""))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen_image", {"forward_batch": 2}),
        ("qwen_image", {"gradient_checkpointing": True}),
        ("flux", {"gradient_checkpointing": True, "lora": {**LORA, "qkv": "joined"}}),
        ("sd35", {"compile": "aot_eager"}),
    ],
)
@pytest.mark.usefixtures("weights_stay")
def test_velocity_and_gradients_have_the_bits_of_one_device(
    tiny_config: Config, tmp_path: Path, name: str, model: dict[str, Any]
) -> None:
    config = config_of(tiny_config, tmp_path, name, **model)
    found = []
    for devices in (TWO[:1], TWO):
        policy, lora = build_policy(config, device="cpu", frozen=FrozenModel(config.model, devices))
        for index, parameter in enumerate(lora.parameters.values()):
            torch.manual_seed(index)
            parameter.data.normal_()
        if config.model.gradient_checkpointing:
            policy.backbone.transformer.train()
        out = velocity(policy)
        out.square().sum().backward()
        with torch.no_grad():
            again = velocity(policy)
        grads = {name: each.grad for name, each in lora.parameters.items() if each.grad is not None}
        found.append({"velocity": out, "without a gradient": again, **grads})
    one, other = found
    assert len(one) > len(lora.parameters) / 2 and one.keys() == other.keys()
    assert [name for name, each in one.items() if not torch.equal(each, other[name])] == []


@pytest.mark.usefixtures("weights_stay")
def test_a_run_on_several_devices_has_the_adapter_of_one(tiny_config: Config) -> None:
    config = tiny_config()
    ends = []
    for devices in (TWO[:1], TWO):
        frozen = FrozenModel(config.model, devices)
        learner = Learner(config, frozen=frozen)
        iterate(learner, RolloutPolicy(config, frozen=frozen), config)
        ends.append(learner.adapter().digest)
    assert ends[0] == ends[1]


def moved(part: nn.Module, device: torch.device) -> nn.Module:
    """What `to` does, which refuses fake tensors."""
    for module in part.modules():
        for name, each in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(each.detach().to(device), requires_grad=each.requires_grad))
        for name, each in module.named_buffers(recurse=False):
            module.register_buffer(name, each.to(device))
    return part


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_operation_mixes_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Fake tensors refuse what mixes devices, also in a backward."""
    model, fake = ModelConfig.model_validate(model_of(name, "float32", tmp_path)), FakeTensorMode()
    backbone = hollow_backbone(model, within=fake)
    lists = backbone.family.block_lists
    attach_hollow_adapter(backbone.transformer, adapter_config(model), within=fake)
    monkeypatch.setattr(nn.Module, "to", moved)
    with fake:
        spread(backbone.transformer, [torch.device("cpu"), torch.device("meta")], lists)
        latents = torch.randn(2, *backbone.latent_shape)
        out = backbone.velocity(latents, torch.full((2,), 0.5), backbone.example(2))
        out.to("cpu").square().sum().backward()
    blocks = [block for blocks in lists for block in backbone.transformer.get_submodule(blocks).children()]
    homes = [{parameter.device.type for parameter in block.parameters()} for block in blocks]
    assert homes == ([{"cpu"}, {"meta"}] if len(blocks) > 1 else [{"cpu"}])
    assert out.device.type == homes[-1].pop(), "it stays where it is made"
    assert {each.device for each in backbone.transformer.parameters() if each.grad is not None} == {
        each.device for each in backbone.transformer.parameters() if each.requires_grad
    }


def test_each_of_two_gpus_holds_half_of_qwen_image() -> None:
    known = known_configs("Qwen/Qwen-Image")
    backbone = hollow_backbone(ModelConfig(path=str(known), dtype="bfloat16"), within=FakeTensorMode())
    devices = [torch.device("cuda", index) for index in range(2)]
    held = dict.fromkeys(devices, 0)
    for part, device in devices_of_parts(backbone.transformer, devices, backbone.family.block_lists):
        held[device] += sum(each.numel() * each.itemsize for each in part.parameters())
    assert [round(size / 2**30, 1) for size in held.values()] == [19.0, 19.0]
    assert sum(held.values()) == sum(each.numel() * 2 for each in backbone.transformer.parameters())


def test_what_several_blocks_read_crosses_once_in_a_forward() -> None:
    model, crossing = Blocks(), torch.ones(2)
    model.first[0].weight.data = torch.ones(40, 2)  # so the other blocks are on the second device
    read: list[Tensor] = []
    for block in model.second:
        block.forward = lambda hidden, shared: read.append(shared) or hidden + shared
    spread(model, [torch.device("cpu"), torch.device("cpu", 1)], ("first", "second"))
    model.forward = lambda: [block(torch.zeros(2), shared=crossing) for block in model.second]
    for _ in range(2):
        model()
    assert read[0] is read[1] and read[2] is read[3]
    assert len({id(each) for each in (crossing, read[0], read[2])}) == 3, "the next forward has copies of its own"


class Blocks(nn.Module):
    """Its names say where a part runs."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.first = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.second = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
        self.behind = nn.ModuleDict({"out": nn.Linear(2, 2)})


def test_blocks_go_to_the_devices_by_their_bytes_and_other_parts_to_the_ends() -> None:
    model = Blocks()
    found = dict(devices_of_parts(model, [torch.device("cuda", index) for index in range(2)], ("first", "second")))
    names = {part: name for name, part in model.named_modules()}
    assert {names[part]: device.index for part, device in found.items()} == {
        "first.0": 0,
        "first.1": 0,  # 6 of 29 numbers lie before it, and 12 before the next
        "second.0": 0,
        "second.1": 1,
        "before": 0,
        "behind.out": 1,
    }


def test_what_blocks_of_two_devices_read_must_not_be_trained(tiny_config: Config, tmp_path: Path) -> None:
    targets = ("attn.to_q", "time_text_embed.timestep_embedder.linear_1")
    lora = {"rank": 2, "alpha": 2, "targets": targets}
    config = config_of(tiny_config, tmp_path, "qwen_image", lora=lora)
    policy, _ = build_policy(config, device="cpu", frozen=FrozenModel(config.model, TWO))
    with pytest.raises(ModelError, match=r"model\.lora\.targets must leave out .* \(cluster\.\*\.gpus\)"):
        velocity(policy)

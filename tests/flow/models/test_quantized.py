"""`model.quantize`: 8 or 4 bits a weight of the frozen transformer, equal in every process, and a float32 adapter."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from deploy.presets import load_config
from deploy.tools.estimate import estimate
from flow.adapter.lora import Lora
from flow.models.hollow import hollow_backbone
from flow.models.load import load_backbone
from flow.policy import build_policy
from flow.quantized.transformer import quantized
from flow.rollout import rollout_shard
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from protocol.messages import Prompt, ShardRequest
from tests.support.learning.groups import log_probs_of
from tests.support.worlds.compilers import COUNTING, compiled_graphs
from tests.support.worlds.tiny_models import write_flux, write_sd35
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_qwen_image, write_qwen_image_21, write_z_image

Config = Callable[..., RunConfig]
REASON = "torchao is not installed: pip install 'flowcredit[quantize]'"
HELD = {"int8": torch.int8, "nf4": torch.uint8}
"""The dtype that holds the weights, by setting."""
OFF = {"int8": (0.0078, 0.1), "nf4": (0.0919, 0.4)}
"""The relative error of a weight whose 1,024 columns are normally distributed, and the most that a velocity of a tiny
random model may be off, as a share of its largest number."""


@pytest.fixture(params=HELD)
def setting(request: pytest.FixtureRequest) -> str:
    return request.param


def quantized_config(tiny_config: Config, setting: str | None, **model: Any) -> RunConfig:
    held = tiny_config().model.model_dump()
    return tiny_config(model={**held, "quantize": setting, **model})


def weights_of(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """The parts of the quantised weights, by name."""
    found = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            parts, _ = module.weight.__tensor_flatten__()  # type: ignore[operator]
            found |= {f"{name}/{part}": getattr(module.weight, part) for part in parts}
    return found


@pytest.fixture(params=["sd3", "flux", "flux2_klein", "qwen_image", "qwen_image_21", "z_image"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, tiny_sd3: Path) -> Path:
    writers = {"flux": write_flux, "flux2_klein": write_flux2_klein, "qwen_image": write_qwen_image}
    writers |= {"qwen_image_21": write_qwen_image_21, "z_image": write_z_image}
    return tiny_sd3 if request.param == "sd3" else writers[request.param](tmp_path / request.param)


def test_every_load_holds_the_same_bits_of_the_transformer_and_of_nothing_else(folder: Path, setting: str) -> None:
    pytest.importorskip("torchao", reason=REASON)
    config = ModelConfig(path=str(folder), quantize=setting, height=16, width=16)
    first, second, hollow = load_backbone(config), load_backbone(config), hollow_backbone(config)
    held, again = weights_of(first.transformer), weights_of(second.transformer)
    layers = [name for name, module in first.transformer.named_modules() if isinstance(module, nn.Linear)]
    assert {name for name in held if name.endswith("/qdata")} == {f"{name}/qdata" for name in layers}
    assert held.keys() == weights_of(hollow.transformer).keys(), "an estimate quantises the same layers"
    assert all(torch.equal(held[name], again[name]) for name in held)
    assert {each.dtype for name, each in held.items() if name.endswith("qdata")} == {HELD[setting]}
    assert not weights_of(first.vae)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_checkpointing", [False, True])
def test_the_learner_replays_a_rollout_with_a_ratio_of_exactly_1(
    tiny_config: Config, setting: str, dtype: str, has_checkpointing: bool
) -> None:
    pytest.importorskip("torchao", reason=REASON)
    config = quantized_config(tiny_config, setting, dtype=dtype, gradient_checkpointing=has_checkpointing)
    plain = quantized_config(tiny_config, None, dtype=dtype)
    sides = [build_policy(each, device="cpu") for each in (config, config, plain)]
    for policy, lora in sides:
        for name, parameter in lora.parameters.items():
            assert parameter.dtype == torch.float32 and parameter.requires_grad
            with torch.no_grad():
                parameter.add_(0.05 * ("lora_B" in name))
        assert not any(p.requires_grad for n, p in policy.backbone.transformer.named_parameters() if "lora_" not in n)
    prompt = Prompt(index=0, text="a red circle")
    request = ShardRequest(
        iteration=0, group=0, prompt=prompt, first_member=0, members=2, adapter_version=0, adapter_digest=""
    )
    rollout, _ = rollout_shard(sides[0][0], request, config)
    learner = sides[1][0]
    explored = rollout.steps
    assert [learner.rows_per_state(k, explored, 2) for k in explored] == [2, 1, 1], (
        "a forward of one row, and of several"
    )
    np.testing.assert_array_equal(log_probs_of(learner, rollout).numpy(), rollout.log_probs)
    here = torch.from_numpy(rollout.latents[:, explored[-1]].copy())
    velocity, of_plain = (
        policy.transition(here, explored[-1], conditioning=policy.conditioning(prompt.text, prompt.negative))[1]
        for policy, _ in sides[1:]
    )
    assert 0 < (velocity - of_plain).abs().max() < OFF[setting][1] * of_plain.abs().max()
    for each in (velocity, of_plain):
        each.square().mean().backward()
    trained = [
        {name for name, p in lora.parameters.items() if p.grad is not None and p.grad.any()} for _, lora in sides
    ]
    assert trained[1] == trained[2] == set(sides[1][1].parameters), "every tensor gets a gradient"


def test_a_quantised_model_rests_and_wakes_with_its_bits(tiny_config: Config, setting: str) -> None:
    pytest.importorskip("torchao", reason=REASON)
    policy, _ = build_policy(quantized_config(tiny_config, setting), device="cpu:1")
    backbone: Any = policy.backbone
    latents, sigma = torch.randn(2, *backbone.latent_shape), torch.tensor([0.9, 0.4])
    prompt = policy.conditioning("a red circle", "")
    expected = policy.velocity(latents, sigma, prompt)
    before = {name: (each.data_ptr(), each.clone()) for name, each in weights_of(backbone.transformer).items()}
    backbone.rest()
    for name, each in weights_of(backbone.transformer).items():
        assert each.data_ptr() != before[name][0] and torch.equal(each, before[name][1])
    backbone.wake()
    assert torch.equal(policy.velocity(latents, sigma, prompt), expected)


def test_the_estimate_counts_the_bytes_that_a_loaded_transformer_takes(tiny_config: Config, setting: str) -> None:
    pytest.importorskip("torchao", reason=REASON)
    config = quantized_config(tiny_config, setting)
    transformer = load_backbone(config.model).transformer
    parts = list(weights_of(transformer).values())
    whole = [each for each in transformer.parameters() if not hasattr(each, "qdata")]
    held = sum(each.numel() * each.element_size() for each in (*parts, *whole))
    found, plain = estimate(config), estimate(tiny_config())
    assert found.rollout["transformer"] == found.learner["transformer"] == held
    assert held < plain.rollout["transformer"]
    assert found.trained == plain.trained


def test_without_its_package_one_line_names_the_remedy(
    tiny_config: Config, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name, *rest)
    )
    rule = rf"model.quantize={setting} needs the package torchao: pip install 'flowcredit\[quantize\]'"
    config = quantized_config(tiny_config, setting)
    for work in (load_backbone, hollow_backbone):
        with pytest.raises(ModelError, match=rule):
            work(config.model)
    load_backbone(tiny_config().model)


def test_a_run_is_another_one_with_another_quantisation(tiny_config: Config) -> None:
    trees = [quantized_config(tiny_config, each).outcome_fields() for each in (None, *HELD)]
    assert {key for key in trees[0] for tree in trees if trees[0][key] != tree[key]} == {"model.quantize"}
    assert [tree["model.quantize"] for tree in trees] == [None, "int8", "nf4"]
    assert load_config("toy_geneval").model.quantize is None


def test_a_restored_weight_is_off_by_its_rounding(setting: str) -> None:
    pytest.importorskip("torchao", reason=REASON)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(1024, 64)
    layer.weight.data = weight.clone()
    restored = quantized(layer, ModelConfig(path="", quantize=setting)).weight.dequantize()  # type: ignore[operator]
    assert ((restored - weight).norm() / weight.norm()).item() == pytest.approx(OFF[setting][0], rel=0.02)


def test_compiled_blocks_give_the_same_bits_with_and_without_a_gradient(setting: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason=REASON)
    graphs = compiled_graphs()
    graphs.clear()
    path = str(write_sd35(tmp_path / "model"))
    made = []
    for backend in (COUNTING, None):
        backbone = load_backbone(ModelConfig(path=path, max_sequence_length=2, quantize=setting, compile=backend))
        lora = Lora(backbone.transformer, LoraConfig(rank=2, alpha=4, targets=("to_q", "to_k")), seed=0)
        for parameter in lora.parameters.values():
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        latents, sigma = torch.linspace(-1, 1, 256).view(1, *backbone.latent_shape), torch.tensor([0.3])
        for mode in (torch.inference_mode(), torch.enable_grad()):
            with mode:
                made.append(backbone.velocity(latents, sigma, backbone.encode("a cat")))
    assert graphs
    drawn, trained, *plain = made
    assert torch.equal(drawn, trained) and torch.equal(*plain)
    torch.testing.assert_close(drawn, plain[0])
    trained.square().sum().backward()


def test_the_16_values_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """As bitsandbytes makes them: 8 below 0 and 9 above, from the quantile 0.9677083 on, and the largest becomes 1."""
    pytest.importorskip("torchao", reason=REASON)
    from flow.quantized.nf4 import VALUES

    outermost = 0.9677083
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count, dtype=torch.float64))[:-1] for count in (9, 8)
    )
    made = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)]) / above.max()
    torch.testing.assert_close(torch.tensor(VALUES, dtype=torch.float64), made, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_keeps_the_nearest_of_16_values_times_the_largest_of_each_64_weights(dtype: torch.dtype) -> None:
    pytest.importorskip("torchao", reason=REASON)
    from flow.quantized.nf4 import VALUES, Nf4Tensor

    weight = torch.randn(30, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight.view(-1)[128:192] = 0
    held = Nf4Tensor.of(weight)
    values, restored = torch.tensor(VALUES), held.dequantize()
    for start in range(0, 990, 64):
        block = weight.view(-1)[start : start + 64].float()
        largest = block.abs().max()
        nearest = values[(block[:, None] - values * largest).abs().argmin(1)] if largest else torch.zeros(64)
        assert torch.equal(restored.view(-1)[start : start + 64], (nearest * largest).to(dtype))
    assert (held.shape, held.dtype, restored.dtype) == (weight.shape, dtype, dtype)
    assert held.qdata.nbytes + held.scale.nbytes == 16 * (32 + 4), "16 blocks of 64 weights"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_holds_and_restores_the_same_bits_as_bitsandbytes(dtype: torch.dtype) -> None:
    pytest.importorskip("torchao", reason=REASON)
    theirs = pytest.importorskip("bitsandbytes", reason="only this comparison needs bitsandbytes").functional
    from flow.quantized.nf4 import Nf4Tensor

    weight = torch.randn(3072, 3072, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = theirs.quantize_4bit(weight, quant_type="nf4")
    held = Nf4Tensor.of(weight)
    assert torch.equal(held.qdata.flatten(), packed.flatten())
    assert torch.equal(held.scale.flatten(), state.absmax)
    assert torch.equal(held.dequantize(), theirs.dequantize_4bit(packed, state))


def test_a_layer_in_nf4_computes_with_its_restored_weight_and_keeps_no_copy_of_it() -> None:
    pytest.importorskip("torchao", reason=REASON)
    from torchao.quantization import quantize_

    from flow.quantized.nf4 import Nf4Config, Nf4Tensor

    layer = nn.Linear(32, 48).requires_grad_(False)
    quantize_(layer, Nf4Config())
    assert isinstance(layer.weight, Nf4Tensor)
    whole, inputs = layer.weight.dequantize(), torch.randn(3, 5, 32).requires_grad_()
    kept: list[type] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(type(each)) or each, lambda each: each):
        made = layer(inputs)
    assert kept == [Nf4Tensor]
    expected = linear(inputs, whole, layer.bias)
    assert torch.equal(made, expected)
    assert torch.equal(linear(inputs, layer.weight, bias=layer.bias), expected), "by name too"
    given = torch.randn_like(made)
    gradients = [torch.autograd.grad(each, inputs, given)[0] for each in (made, expected)]
    torch.testing.assert_close(*gradients)


def test_a_weight_in_nf4_is_copied_and_moved_with_all_its_parts() -> None:
    pytest.importorskip("torchao", reason=REASON)
    from flow.quantized.nf4 import Nf4Tensor

    layer = nn.Linear(32, 48, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(Nf4Tensor.of(layer.weight), requires_grad=False)
    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight.dequantize(), layer.weight.dequantize())
    moved = layer.to("meta").weight
    assert {getattr(moved, part).device.type for part in Nf4Tensor.tensor_data_names} == {"meta"}
    assert (moved.shape, moved.dtype) == ((48, 32), torch.bfloat16)

"""`model.quantize`: 8 bits a weight of the frozen transformer, equal in every process, and a float32 adapter on it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deploy.presets import load_config
from deploy.tools.estimate import estimate
from flow.models.hollow import hollow_backbone
from flow.models.load import load_backbone
from flow.policy import build_policy
from flow.rollout import rollout_shard
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from protocol.messages import Prompt, ShardRequest
from tests.support.worlds.tiny_models import write_flux
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_qwen_image, write_z_image

Config = Callable[..., RunConfig]
REASON = "torchao is not installed: pip install 'flowcredit[quantize]'"


def quantized_config(tiny_config: Config, **model: Any) -> RunConfig:
    held = tiny_config().model.model_dump()
    return tiny_config(model={**held, "quantize": "int8", **model})


def weights_of(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """The parts of the quantised weights, by name."""
    found = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            parts, _ = module.weight.__tensor_flatten__()  # type: ignore[operator]
            found |= {f"{name}/{part}": getattr(module.weight, part) for part in parts}
    return found


@pytest.fixture(params=["sd3", "flux", "flux2_klein", "qwen_image", "z_image"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, tiny_sd3: Path) -> Path:
    writers = {"flux": write_flux, "flux2_klein": write_flux2_klein, "qwen_image": write_qwen_image}
    writers |= {"z_image": write_z_image}
    return tiny_sd3 if request.param == "sd3" else writers[request.param](tmp_path / request.param)


def test_every_load_holds_the_same_8_bits_of_the_transformer_and_of_nothing_else(folder: Path) -> None:
    pytest.importorskip("torchao", reason=REASON)
    config = ModelConfig(path=str(folder), quantize="int8", height=16, width=16)
    first, second, hollow = load_backbone(config), load_backbone(config), hollow_backbone(config)
    held, again = weights_of(first.transformer), weights_of(second.transformer)
    linear = [name for name, module in first.transformer.named_modules() if isinstance(module, nn.Linear)]
    assert {name for name in held if name.endswith("/qdata")} == {f"{name}/qdata" for name in linear}
    assert held.keys() == weights_of(hollow.transformer).keys(), "an estimate quantises the same layers"
    assert all(torch.equal(held[name], again[name]) for name in held)
    assert all(each.dtype == torch.int8 for name, each in held.items() if name.endswith("qdata"))
    assert not weights_of(first.vae)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_learner_replays_a_rollout_with_a_ratio_of_exactly_1(tiny_config: Config, dtype: str) -> None:
    pytest.importorskip("torchao", reason=REASON)
    config = quantized_config(tiny_config, dtype=dtype)
    plain = quantized_config(tiny_config, dtype=dtype, quantize=None)
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
    assert rollout.log_probs is not None
    learner = sides[1][0]
    conditioning = learner.conditioning(prompt.text, prompt.negative)
    for column, k in enumerate(rollout.steps):
        here, there = (torch.from_numpy(rollout.latents[:, k + i].copy()) for i in range(2))
        transition, velocity = learner.transition(here, k, conditioning=conditioning)
        log_prob = transition.log_prob(there)
        np.testing.assert_array_equal(log_prob.detach().numpy(), rollout.log_probs[:, column])
    exact, of_plain = sides[2][0].transition(here, k, conditioning=conditioning)
    assert 0 < (velocity - of_plain).abs().max() < 0.1 * of_plain.abs().max()
    for each in (log_prob, exact.log_prob(there)):
        each.mean().backward()
    trained = [
        {name for name, p in lora.parameters.items() if p.grad is not None and p.grad.any()} for _, lora in sides
    ]
    assert trained[1] == trained[2] == set(sides[1][1].parameters), "every tensor gets a gradient"


def test_the_estimate_counts_the_bytes_that_a_loaded_transformer_takes(tiny_config: Config) -> None:
    pytest.importorskip("torchao", reason=REASON)
    config = quantized_config(tiny_config)
    transformer = load_backbone(config.model).transformer
    parts = list(weights_of(transformer).values())
    whole = [each for each in transformer.parameters() if not hasattr(each, "qdata")]
    held = sum(each.numel() * each.element_size() for each in (*parts, *whole))
    found, plain = estimate(config), estimate(tiny_config())
    assert found.rollout["transformer"] == found.learner["transformer"] == held
    assert held < 0.5 * plain.rollout["transformer"]
    assert found.trained == plain.trained


def test_without_its_package_one_line_names_the_remedy(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name, *rest)
    )
    rule = r"model.quantize=int8 needs the package torchao: pip install 'flowcredit\[quantize\]'"
    config = quantized_config(tiny_config)
    for work in (load_backbone, hollow_backbone):
        with pytest.raises(ModelError, match=rule):
            work(config.model)
    load_backbone(tiny_config().model)


def test_a_run_is_another_one_with_another_quantisation(tiny_config: Config) -> None:
    plain, changed = tiny_config().outcome_fields(), quantized_config(tiny_config).outcome_fields()
    assert {key for key in plain if plain[key] != changed[key]} == {"model.quantize"}
    assert load_config("toy_geneval").model.quantize is None

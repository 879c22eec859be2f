"""`model.lora.qkv=joined`: queries, keys and values compute together what their layers compute one by one."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flow.adapter.lora import Joined, Lora
from flow.models.load import load_backbone
from flow.models.located import adapter_config
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import LoraConfig, ModelConfig
from protocol.errors import ContractError
from tests.support.worlds.architectures import ARCHITECTURES, model_of

BOUNDS = {"float32": 1e-5, "bfloat16": 0.02}
"""Largest relative difference from separate layers: of the velocity, and of the gradient of all A or all B."""


def loaded(name: str, folder: Path, dtype: str, qkv: str, **settings: Any) -> tuple[PipelineBackbone, Lora]:
    """A model with an adapter that changes what it computes."""
    section = model_of(name, dtype, folder) | settings
    model = ModelConfig.model_validate({**section, "lora": {**section["lora"], "qkv": qkv}})
    backbone = load_backbone(model)
    assert isinstance(backbone, PipelineBackbone)
    lora = Lora(backbone.transformer, adapter_config(model), seed=0)
    for parameter in lora.parameters.values():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return backbone, lora


def velocity(backbone: PipelineBackbone) -> Tensor:
    latents = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(2))
    return backbone.velocity(latents, torch.tensor([0.3, 0.8]), backbone.encode("a cat").repeat(2))


def gradients(lora: Lora, kind: str) -> Tensor:
    held = [each.grad for name, each in lora.parameters.items() if kind in name and each.grad is not None]
    return torch.cat([each.flatten() for each in held])


@pytest.mark.parametrize(("name", "dtype"), [("sd35", "bfloat16"), *zip(ARCHITECTURES, cycle(BOUNDS), strict=False)])
def test_velocity_and_gradients_are_those_of_separate_layers_and_replays_are_exact(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [], Joined.forward
    monkeypatch.setattr(Joined, "forward", staticmethod(lambda *inputs: calls.append(1) or forward(*inputs)))
    ends: list[tuple[Tensor, ...]] = []
    for qkv in ("separate", "joined"):
        assert not calls
        backbone, lora = loaded(name, tmp_path, dtype, qkv)
        with torch.inference_mode():
            drawn = velocity(backbone)
        made = velocity(backbone)
        assert torch.equal(drawn, made)
        made.square().sum().backward()
        ends.append((made.detach(), gradients(lora, "lora_A"), gradients(lora, "lora_B")))
        with lora.adapter_disabled(), torch.no_grad():
            ends[-1] += (velocity(backbone),)
    assert calls
    (*expected, base), (*found, other) = ends
    for one, two in zip(found, expected, strict=True):
        assert two.norm() > 0 and (one - two).norm() < BOUNDS[dtype] * two.norm()
    assert torch.equal(other, base)


@pytest.mark.whole
def test_compiled_and_checkpointed_blocks_have_the_same_bits(tmp_path: Path) -> None:
    ends = []
    for settings in ({}, {"compile": "aot_eager", "gradient_checkpointing": True}):
        backbone, lora = loaded("flux", tmp_path, "bfloat16", "joined", **settings)
        made = velocity(backbone)
        made.square().sum().backward()
        ends.append((made, gradients(lora, "lora")))
    for one, two in zip(*ends, strict=True):
        assert torch.equal(one, two)


def test_the_adapter_is_the_one_of_separate_layers(tmp_path: Path) -> None:
    (_, one), (_, other) = (loaded("flux", tmp_path, "bfloat16", qkv) for qkv in ("separate", "joined"))
    adapter = one.export(version=1)
    assert other.export(version=1).digest == adapter.digest == other.load(adapter)


def test_joined_layers_read_one_tensor_in_turn(tmp_path: Path) -> None:
    backbone, _ = loaded("sd35", tmp_path, "float32", "joined")
    layers = backbone.transformer.transformer_blocks[0].attn
    x = torch.randn(1, 3, layers.to_q.in_features)
    with pytest.raises(ContractError, match="joined must read one tensor"):
        layers.to_k(x)
    parts = [layer(x) for layer in (layers.to_q, layers.to_k, layers.to_v)]
    assert [part.shape for part in parts] == 3 * [x.shape]
    layers.to_q(x)
    with pytest.raises(ContractError, match="joined must read one tensor"):
        layers.to_k(x.clone())


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.qkv=joined needs .* got no target that ends with to_k"):
        LoraConfig(qkv="joined", targets=("attn.to_q", "attn.to_v"))
    with pytest.raises(ValueError, match=r"model\.lora\.qkv=joined needs whole weights, got model\.quantize=int8"):
        ModelConfig(path="somewhere", quantize="int8", lora=LoraConfig(qkv="joined"))

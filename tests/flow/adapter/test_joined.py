"""`model.lora.qkv=joined`: one product for A of queries, keys and values, with the results of the separate layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flow.adapter.lora import Lora
from flow.models.load import load_backbone
from flow.models.located import adapter_config
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig
from tests.support.worlds.architectures import ARCHITECTURES, model_of

BOUNDS = {"float32": 1e-5, "bfloat16": 0.05}


def loaded(name: str, folder: Path, dtype: str, qkv: str, **settings: Any) -> tuple[PipelineBackbone, Lora]:
    """A model with an adapter that changes what it computes."""
    section = model_of(name, dtype, folder)
    model = ModelConfig.model_validate({**section, **settings, "lora": {**section["lora"], "qkv": qkv}})
    backbone = load_backbone(model)
    assert isinstance(backbone, PipelineBackbone)
    lora = Lora(backbone.transformer, adapter_config(model), seed=0)
    for parameter in lora.parameters.values():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return backbone, lora


def velocity(backbone: PipelineBackbone) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(2, *backbone.latent_shape, generator=generator)
    conditioning = backbone.encode("a red circle").repeat(2)
    return backbone.velocity(latents, torch.tensor([0.3, 0.8]), conditioning)


def far(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_velocity_and_gradients_are_those_of_separate_layers_and_replays_are_exact(
    name: str, dtype: str, tmp_path: Path
) -> None:
    ends = []
    for qkv in ("separate", "joined"):
        backbone, lora = loaded(name, tmp_path, dtype, qkv)
        made = velocity(backbone)
        with torch.inference_mode():
            assert torch.equal(velocity(backbone), made.detach())
        made.square().sum().backward()
        again = velocity(backbone)
        again.square().sum().backward()
        assert torch.equal(made, again)
        ends.append((made.detach(), lora))
    (expected, separate), (found, joined) = ends
    print(name, dtype, "velocity", far(found, expected), "equal" if torch.equal(found, expected) else "")
    assert far(found, expected) < BOUNDS[dtype]
    for kind in ("lora_A", "lora_B"):
        both = [
            torch.cat([p.grad.flatten() for n, p in each.parameters.items() if kind in n and p.grad is not None])
            for each in (separate, joined)
        ]
        print(
            kind,
            far(both[1], both[0]),
            {
                n.split(".", 1)[1]: far(joined.parameters[n].grad, p.grad)
                for n, p in separate.parameters.items()
                if p.grad is not None and p.grad.norm() > 0 and False
            },
        )
        assert far(both[1], both[0]) < BOUNDS[dtype]

"""Compiled blocks: calls with and without a gradient run the same graphs, for every family."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flow.adapter.lora import Lora
from flow.compiled import CompiledBlocks, require_backend
from flow.models.load import load_backbone
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import LoraConfig, ModelConfig
from protocol.errors import ModelError
from tests.support.worlds.compilers import COUNTING, compiled_graphs
from tests.support.worlds.tiny_models import write_flux, write_sd3, write_sd35
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_qwen_image, write_qwen_image_21, write_z_image

SLOWER = (write_sd35, write_flux, write_flux2_klein, write_qwen_image, write_qwen_image_21, write_z_image)


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """What `COUNTING` compiled in the test, which finds no graph of another one."""
    found, limits = compiled_graphs(), torch._dynamo.config
    before = limits.recompile_limit, limits.accumulated_recompile_limit
    torch.compiler.reset()
    found.clear()
    yield found
    torch.compiler.reset()
    limits.recompile_limit, limits.accumulated_recompile_limit = before


def loaded(folder: Path, **settings: Any) -> PipelineBackbone:
    config = ModelConfig(path=str(folder), max_sequence_length=2, height=16, width=16, **settings)
    backbone = load_backbone(config)
    assert isinstance(backbone, PipelineBackbone)
    return backbone


def adapted(backbone: PipelineBackbone) -> Lora:
    """An adapter on all attention projections that changes what the transformer computes."""
    config = LoraConfig(rank=2, alpha=4, targets=["to_q", "to_k", "to_v"])
    lora = Lora(backbone.transformer, config, seed=0)
    for parameter in lora.parameters.values():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return lora


def velocity(backbone: PipelineBackbone, rows: int = 2, text: str = "a cat") -> Tensor:
    shape = (rows, *backbone.latent_shape)
    latents = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    return backbone.velocity(latents, torch.linspace(0.3, 0.8, rows), backbone.encode(text).repeat(rows))


@pytest.mark.parametrize(
    ("write", "has_checkpointing"),
    [
        (write_sd3, False),
        pytest.param(write_flux, True, marks=pytest.mark.whole),
        *(pytest.param(write, False, marks=pytest.mark.whole) for write in SLOWER),
        pytest.param(write_sd35, True, marks=pytest.mark.whole),
    ],
)
def test_a_call_without_a_gradient_runs_the_graphs_of_one_with_a_gradient(
    graphs: list[Any], tmp_path: Path, write: Callable[[Path], Path], has_checkpointing: bool
) -> None:
    folder = write(tmp_path / "model")
    backbone = loaded(folder, compile=COUNTING, gradient_checkpointing=has_checkpointing)
    lora, plain = adapted(backbone), loaded(folder)
    adapted(plain)
    with torch.inference_mode():
        drawn = velocity(backbone)
    compiled = len(graphs)
    assert compiled and not drawn.requires_grad
    with torch.no_grad():
        assert torch.equal(drawn, velocity(backbone))
    trained = velocity(backbone)
    assert len(graphs) == compiled, "the learner must find what the rollout compiled"
    assert torch.equal(drawn, trained)
    torch.testing.assert_close(drawn, velocity(plain))
    trained.square().sum().backward()
    assert all(parameter.grad is not None for parameter in lora.parameters.values())


class Block(nn.Module):
    """A block whose graph depends on a number."""

    def forward(self, rows: Tensor, number: int) -> Tensor:
        return rows * number


class Alone(nn.Module):
    """A transformer that lists no blocks."""

    _no_split_modules = None


class Pile(nn.Module):
    """A transformer of three blocks."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, rows: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            rows = block(rows, number)
        return rows


def test_blocks_of_one_kind_share_graphs_and_each_shape_has_its_own(graphs: list[Any]) -> None:
    pile = Pile()
    CompiledBlocks(pile, COUNTING, device="cpu")
    counts = []
    for size in (2, 3, 4, 2, 3, 4):
        assert torch.equal(pile(torch.ones(size), 2), torch.full((size,), 8.0))
        counts.append(len(graphs))
    assert counts == [1, 2, 3, 3, 3, 3]


def test_too_many_graphs_end_with_an_error_instead_of_uncompiled_blocks(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flow.compiled.MOST_GRAPHS", 3)
    pile = Pile()
    CompiledBlocks(pile, COUNTING, device="cpu")
    rows = torch.ones(2)
    for number in range(3):
        assert torch.equal(pile(rows, number), rows * number**3)
    assert len(graphs) == 3
    with pytest.raises(ModelError, match="^model.compile .*at most 3 graphs"):
        pile(rows, 4)


def test_a_torch_that_cannot_promise_equal_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flow.compiled.SAME_BITS", {"eager": {"no_such_option": True}})
    with pytest.raises(ModelError, match="^model.compile=eager needs torch 2.10"):
        CompiledBlocks(Pile(), "eager", device="cpu")


@pytest.mark.parametrize(("device", "variable", "program"), [("cpu", "CXX", "g++"), ("cuda", "CC", "gcc")])
def test_inductor_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, variable: str, program: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / program).write_text("")
    (tmp_path / program).chmod(0o755)
    require_backend("inductor", device)
    monkeypatch.setenv(variable, "absent")
    with pytest.raises(ModelError, match=r"got none of \['absent'\]"):
        require_backend("inductor", device)
    monkeypatch.delenv(variable)
    (tmp_path / program).unlink()
    remedy = f"needs a compiler, got none of .*: install {re.escape(program)}, or set {variable}"
    with pytest.raises(ModelError, match=remedy):
        require_backend("inductor", device)
    require_backend("eager", device)


def test_prompts_of_many_lengths_share_graphs(graphs: list[Any], tmp_path: Path) -> None:
    config = ModelConfig(path=str(write_qwen_image(tmp_path / "model")), max_sequence_length=512, height=16, width=16)
    plain, backbone = load_backbone(config), load_backbone(config.model_copy(update={"compile": COUNTING}))
    assert isinstance(plain, PipelineBackbone) and isinstance(backbone, PipelineBackbone)
    lengths, counts = [], []
    for letters in (1, 20, 40, 60, 200):
        text = "x" * letters
        lengths.append(plain.encode(text).lengths[0])
        drawn, compiled = (velocity(each, text=text).detach() for each in (plain, backbone))
        torch.testing.assert_close(drawn, compiled)
        counts.append(len(graphs))
    assert lengths == sorted({*lengths}) and 128 < lengths[0] < lengths[3] < 256 < lengths[4] < 512
    assert counts == [counts[0]] * 4 + [2 * counts[0]]


def test_a_transformer_without_blocks_is_refused(graphs: list[Any]) -> None:
    with pytest.raises(ModelError, match="^model.compile must be null for Alone: it has no blocks to compile$"):
        CompiledBlocks(Alone(), COUNTING, device="cpu")
    assert not graphs


@pytest.mark.parametrize(
    "write",
    [
        write_sd3,
        *(pytest.param(each, marks=pytest.mark.whole) for each in (write_qwen_image, write_flux2_klein)),
        pytest.param(write_qwen_image_21, marks=pytest.mark.whole),
    ],
)
def test_a_compiled_decoder_makes_the_same_images_with_one_graph(
    graphs: list[Any], tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    folder = write(tmp_path / "model")
    plain, backbone = loaded(folder), loaded(folder, vae_compile=COUNTING, decode_batch=3)
    torch.manual_seed(0)
    latents = torch.randn(7, *backbone.latent_shape)
    for count in (7, 3, 1):
        with torch.inference_mode():
            assert np.array_equal(backbone.decode(latents[:count]), plain.decode(latents[:count]))
        assert len(graphs) == 1, "a batch is filled up to three images"


def test_an_image_that_overflows_is_decoded_again_without_the_graph(graphs: list[Any], tmp_path: Path) -> None:
    folder = write_sd3(tmp_path / "model")
    backbone = loaded(folder, vae_compile=COUNTING, decode_batch=3, vae_dtype="float16")
    backbone.vae.decoder.conv_out.weight.data *= 6e4
    exact = loaded(folder, decode_batch=1)
    exact.vae.decoder.conv_out.weight.data = backbone.vae.decoder.conv_out.weight.data.float()
    torch.manual_seed(0)
    latents = torch.randn(2, *backbone.latent_shape)
    made = backbone.decode(latents)
    assert backbone.decoded_again == 2 and len(graphs) == 1
    assert (made.astype(int) - exact.decode(latents)).max() <= 1


def test_a_compiled_decoder_needs_batches_of_one_size() -> None:
    with pytest.raises(ValueError, match=r"model\.vae_compile needs a model\.decode_batch, got inductor and null"):
        ModelConfig(path="somewhere", vae_compile="inductor")

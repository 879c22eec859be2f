"""The larger kernels of half precision compute what diffusers' and peft's modules compute."""

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from torch import nn

from flow.adapter.lora import Branch, inject
from flow.fused import JointAttention, fuse, keep_as_on_gpu
from flow.models.load import load_backbone
from protocol.config.model import LoraConfig
from protocol.config.run import RunConfig

WIDTH, HEADS = 32, 4


def attention(*, has_text: bool, is_last: bool = False) -> Attention:
    """A block's attention with norms that scale, in float64."""
    torch.manual_seed(0)
    made = Attention(
        query_dim=WIDTH,
        added_kv_proj_dim=WIDTH if has_text else None,
        dim_head=WIDTH // HEADS,
        heads=HEADS,
        out_dim=WIDTH,
        context_pre_only=is_last if has_text else None,
        bias=True,
        processor=JointAttnProcessor2_0(),
        qk_norm="rms_norm",
        eps=1e-6,
    ).double()
    for norm in (part for part in made.modules() if isinstance(part, RMSNorm)):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    return made


@pytest.mark.parametrize(
    "shape", [{"has_text": True}, {"has_text": True, "is_last": True}, {"has_text": False}], ids=str
)
def test_norms_and_attention_compute_the_same(shape: dict[str, bool]) -> None:
    own = attention(**shape)
    fused = deepcopy(own)
    fuse(fused)
    assert isinstance(fused.processor, JointAttention)
    image, text = torch.randn(2, 9, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    read = {"encoder_hidden_states": text} if shape["has_text"] else {}
    expected, found = own(image, **read), fused(image, **read)
    if not shape["has_text"]:
        expected, found = (expected,), (found,)
    if shape.get("is_last"):
        expected, found = expected[:1], found[:1]  # nobody reads the text of the last block
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # diffusers' RMSNorm has its mean in float32


def test_float32_keeps_the_modules_of_diffusers(tiny_config: Callable[..., RunConfig], tiny_sd3: Path) -> None:
    for dtype, processor in (("float32", JointAttnProcessor2_0), ("bfloat16", JointAttention)):
        model = tiny_config().model.model_copy(update={"dtype": dtype})
        transformer = load_backbone(model, device="cpu").transformer
        blocks = [part for part in transformer.modules() if isinstance(part, Attention)]
        assert blocks
        assert {type(block.processor) for block in blocks} == {processor}


def test_the_triton_kernel_takes_short_rows_of_diffusers_and_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX.1 and FLUX.2 have torch's norms."""
    taken = torch.zeros(())
    kernel: Any = ModuleType("flow.triton_norm")
    kernel.TritonNorm = SimpleNamespace(apply=lambda *_: taken)
    monkeypatch.setitem(sys.modules, "flow.triton_norm", kernel)
    norms = [kind(width, eps=1e-6) for kind in (RMSNorm, nn.RMSNorm) for width in (64, 96, 1024)]
    fuse(nn.ModuleList(norms), norms="triton")
    found = [norm(torch.ones(1, width)) is taken for norm, width in zip(norms, 2 * (64, 96, 1024), strict=True)]
    assert found == 2 * [True, False, False]


def adapted(dtype: torch.dtype) -> Any:
    """A linear layer with an adapter that does something."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({"layer": nn.Linear(WIDTH, 2 * WIDTH)}).to(dtype)
    holder.requires_grad_(requires_grad=False)
    inject(LoraConfig(rank=4, alpha=12, targets=("layer",)), holder)
    for name, parameter in holder.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape)
    return holder["layer"]


def test_a_float32_layer_has_the_value_and_the_gradients_of_scaling_b_a_x() -> None:
    layer = adapted(torch.float32)
    x, slopes = torch.randn(2, 3, WIDTH, requires_grad=True), torch.randn(2, 3, 2 * WIDTH)
    base, low, high = layer.base_layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    leaves = [each.detach().double().requires_grad_() for each in (x, low, high)]
    wide, narrow, tall = leaves
    expected = wide @ base.weight.double().T + base.bias.double() + wide @ narrow.T @ tall.T * 3.0
    made = layer(x)
    (made * slopes).sum().backward()
    (expected * slopes).sum().backward()
    for found, wanted in zip(
        (made, x.grad, low.grad, high.grad), (expected, *(leaf.grad for leaf in leaves)), strict=True
    ):
        assert (found - wanted).norm() < 1e-6 * wanted.norm() and wanted.norm() > 0
    with torch.no_grad():
        assert torch.equal(layer(x), made), "with and without a gradient the bits are the same"
    layer.enable_adapters(enabled=False)
    assert torch.equal(layer(x), base(x)) and base.weight.grad is None


@pytest.mark.parametrize("is_slice", [False, True])
def test_half_precision_has_the_value_and_the_gradient_of_float32(is_slice: bool) -> None:
    full, half = adapted(torch.float32), adapted(torch.bfloat16)
    x = torch.randn(2, 6, WIDTH)
    x = x[:, :4] if is_slice else x
    with torch.no_grad():
        alone = half(x.bfloat16())
    results = []
    for layer, read in ((full, x), (half, x.bfloat16())):
        made = layer(read)
        made.float().square().mean().backward()
        results.append(
            (made.float().detach(), layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad)
        )
    assert torch.equal(results[1][0], alone.float()), "with and without a gradient the bits are the same"
    for expected, found in zip(*results, strict=True):
        assert expected.norm() > 0
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_without_a_gradient_the_layer_s_own_result_is_used_again() -> None:
    layer = adapted(torch.bfloat16)
    x = torch.randn(3, WIDTH).bfloat16()
    with torch.no_grad():
        own = layer.base_layer(x)
        assert Branch.forward(layer, "default", x, own).data_ptr() == own.data_ptr()
    own = layer.base_layer(x)
    assert Branch.forward(layer, "default", x, own).data_ptr() != own.data_ptr()


def test_an_estimate_for_a_gpu_keeps_what_a_norm_keeps_there() -> None:
    """The input in its own dtype and a number for each row; a CPU also keeps the input in float32."""
    with torch.device("meta"):
        model = nn.Sequential(RMSNorm(8, eps=1e-6)).to(torch.bfloat16).requires_grad_(requires_grad=False)
        rows = torch.zeros(3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    fuse(model)
    keep_as_on_gpu(model)
    kept: list[tuple[Any, torch.dtype]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        normed = model(rows)
    assert (normed.shape, normed.dtype) == (rows.shape, rows.dtype)
    assert kept == [((3, 4, 8), torch.bfloat16), ((3, 4), torch.float32)]
    normed.sum().backward()
    assert rows.grad is not None and rows.grad.shape == rows.shape

"""Our attention kernels on a CPU: stand-ins for the kernels of a GPU show what these are asked and how it is used."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flow import attention
from flow.attention import KERNELS, choose_attention, cudnn, flash3, require_gradients, take_attention
from flow.fused import require_kernels
from flow.models.contract import stack
from flow.models.load import load_backbone
from flow.models.pipeline import PipelineBackbone
from protocol.config.model import ModelConfig
from protocol.errors import ModelError
from tests.support.worlds.architectures import model_of

SCALE = 0.3
Asked = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def whole_process_takes_its_kernels_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of one model is also what diffusers gives to all processors of the process that name none."""
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    monkeypatch.setattr(_AttentionBackendRegistry, "_backends", dict(_AttentionBackendRegistry._backends))


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of [B, tokens, heads, D]."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)


@pytest.fixture
def flash3_asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A stand-in for the package of FlashAttention-3, and what its function was asked beside queries, keys, values."""
    asked: Asked = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **others: Any) -> Tensor:
        asked.append({"shape": tuple(q.shape), "scale": softmax_scale, **others})
        return softmax_attention(q, k, v, softmax_scale)

    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return asked


@pytest.fixture
def cudnn_asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Stand-ins for cuDNN's forward and FlashAttention's backward, by their formulas, and what they were asked."""
    asked: Asked = []

    def weights(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
        return (scale or query.shape[-1] ** -0.5) * query @ key.transpose(-2, -1)

    def forward(query: Tensor, key: Tensor, value: Tensor, bias: None, **how: Any) -> tuple[Any, ...]:
        asked.append({"bias": bias, **how})
        scores = weights(query, key, how["scale"])
        sums, seed = scores.logsumexp(-1, keepdim=True), torch.zeros(())
        return scores.softmax(-1) @ value, sums, None, None, query.shape[2], key.shape[2], seed, seed, None

    def backward(slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None) -> Any:
        attended, sums, *others = rest
        asked.append({"others": others[:6], "scale": scale})
        shares = (weights(query, key, scale) - sums[..., None]).exp()
        for_shares = slope @ value.transpose(-2, -1) - (slope * attended).sum(-1, keepdim=True)
        for_scores = (scale or query.shape[-1] ** -0.5) * shares * for_shares
        return for_scores @ key, for_scores.transpose(-2, -1) @ query, shares.transpose(-2, -1) @ slope

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", backward)
    return asked


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 5, 3, 8, dtype=torch.float64).unbind()
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("scale", [None, SCALE])
def test_cudnns_result_and_log_sums_give_flash_attentions_gradients(cudnn_asked: Asked, scale: float | None) -> None:
    inputs = query, key, value = drawn()
    slopes = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    expected, found = softmax_attention(query, key, value, scale), cudnn(query, key, value, scale)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(each, inputs, slopes) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
    assert cudnn_asked == [
        {"bias": None, "compute_log_sumexp": True, "scale": scale},
        {"others": [None, None, 5, 5, 0.0, False], "scale": scale},
    ]


def test_torchs_own_operations_take_these_arguments() -> None:
    """On the device `meta` torch checks arguments and computes shapes."""
    inputs = [torch.empty(2, 5, 3, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found = cudnn(*inputs)
    assert found.shape == inputs[0].shape
    assert [each.shape for each in torch.autograd.grad(found.sum(), inputs)] == 3 * [inputs[0].shape]


@pytest.mark.parametrize("name", KERNELS)
def test_a_model_attends_with_the_kernel_and_where_there_is_a_mask_with_torchs(
    name: str, flash3_asked: Asked, cudnn_asked: Asked, tmp_path: Path
) -> None:
    backbone = load_backbone(ModelConfig.model_validate(model_of("qwen_image", "bfloat16", tmp_path)))
    assert isinstance(backbone, PipelineBackbone)
    asked = {"flash3": flash3_asked, "cudnn": cudnn_asked}[name]
    latents, sigma, words = torch.randn(2, *backbone.latent_shape), torch.full((2,), 0.5), backbone.encode("a cat")
    for conditioning, is_masked in ((words.repeat(2), False), (stack([words, backbone.encode("")]), True)):
        choose_attention(backbone.transformer, name, device="cpu")  # where there is no GPU: torch's choice
        plain = backbone.velocity(latents, sigma, conditioning)
        assert not asked
        take_attention(backbone.transformer, name)
        found = backbone.velocity(latents, sigma, conditioning)
        assert (found - plain).norm() < 0.05 * plain.norm()
        assert bool(asked) != is_masked
        asked.clear()


def test_flash_attention_3_is_asked_for_a_backward_of_one_order(flash3_asked: Asked) -> None:
    query, key, value = drawn()
    flash3(query, key, value, SCALE)
    assert flash3_asked == [{"shape": (2, 5, 3, 8), "scale": SCALE, "deterministic": True}]


def test_a_kernel_with_other_gradients_or_that_does_not_run_is_refused(
    flash3_asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SHAPES", ((1, 3, 2, 8),))
    require_gradients("flash3", device="cpu")
    assert len(flash3_asked) == attention.REPEATS
    module: Any = sys.modules["flash_attn_interface"]
    right, factors = module.flash_attn_func, iter([1.0, 1.0, 1.01])
    for factor, told in (
        (lambda: 1.1, "a difference of 0.1:"),
        (lambda: next(factors, 1.0), "others from one call to the next:"),
    ):
        monkeypatch.setattr(
            module, "flash_attn_func", lambda *each, factor=factor, **how: right(*each, **how) * factor()
        )
        with pytest.raises(ModelError, match=f"^model.attention=flash3 .* got {told}"):
            require_gradients("flash3", device="cpu")
    monkeypatch.delattr(module, "flash_attn_func")
    with pytest.raises(ModelError, match="^model.attention=flash3 needs a kernel that runs, got cannot import"):
        require_gradients("flash3", device="cpu")


@pytest.mark.parametrize("asked", [{"attention": "flash3"}, {"attention": "cudnn"}, {"norms": "triton"}], ids=str)
def test_a_kernel_for_a_gpu_is_refused_where_it_cannot_run(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((key, value),) = asked.items()
    with pytest.raises(ValueError, match=f"model.{key}={value} is for half precision, got model.dtype=float32"):
        ModelConfig(path="somewhere", **asked)
    model = ModelConfig(path="somewhere", dtype="bfloat16", **asked)
    with pytest.raises(ModelError, match=f"^model.{key}={value} needs GPUs"):
        require_kernels(model, "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"^model.{key}={value} needs the package"):
        require_kernels(model, "cuda")
    require_kernels(ModelConfig(path="somewhere"), "cpu")


def test_torchs_efficient_kernel_is_refused_without_a_gpu() -> None:
    with pytest.raises(ModelError, match="^model.attention=_native_efficient needs GPUs"):
        require_kernels(ModelConfig(path="somewhere", attention="_native_efficient"), "cpu")

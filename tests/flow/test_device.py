"""How a role computes on a GPU."""

import os

import pytest
import torch

from flow.device import KERNELS, computing, devices_of, tf32
from protocol.config.cluster import RoleConfig
from protocol.errors import ConfigError


def kernels() -> tuple[bool, bool, str | None]:
    """Whether torch insists on deterministic kernels, whether it only warns, and cuBLAS' workspace."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_a_role_with_a_gpu_insists_on_deterministic_kernels_and_a_scorer_beside_it_need_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch's `warn_only` the backward of attention would still differ from time to time."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    before, threads = kernels(), torch.get_num_threads()
    with computing(RoleConfig(gpus=0.5, threads=threads + 1)):
        assert kernels() == (True, False, ":4096:8")
        assert torch.get_num_threads() == threads + 1
    assert kernels()[:2] == before[:2]
    assert torch.get_num_threads() == threads


def test_a_role_without_a_gpu_leaves_the_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with computing(RoleConfig()):
        assert kernels() == (False, False, None)


def test_a_role_with_several_gpus_has_as_many_devices_if_torch_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = [devices_of(RoleConfig(gpus=gpus)) for gpus in (0, 0.5, 1, 2)]
    assert found == [["cpu"], ["cuda"], ["cuda"], ["cuda", "cuda:1"]]
    with pytest.raises(ConfigError, match=r"cluster\.\*\.gpus must be at most 2.*got 3"):
        devices_of(RoleConfig(gpus=3))


def test_tf32_holds_inside_its_block_only_and_never_on_a_cpu() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with tf32("cuda:0"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32" and KERNELS.locked()
    assert torch.backends.cuda.matmul.fp32_precision == before and not KERNELS.locked()
    with tf32("cpu"):
        assert torch.backends.cuda.matmul.fp32_precision == before and not KERNELS.locked()

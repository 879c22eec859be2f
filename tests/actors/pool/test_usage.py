"""What a process uses, with a stand-in for NVML: no test of this has run on a GPU."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from actors.pool.usage import usage

GIB = 2**30


class Unanswered(Exception):
    """As NVML raises for a part of a GPU."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML of a machine with eight GPUs, of which the process has number 3: 12 GiB in use, busy for 87 %."""

    def refuse(handle: int) -> None:
        raise Unanswered

    fake = SimpleNamespace(
        NVMLError_DriverNotLoaded=Unanswered,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used={3: 12 * GIB}[handle]),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu={3: 87}[handle]),
        refuse=refuse,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "pynvml", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    for name, value in (("is_initialized", True), ("is_available", True), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return fake


def test_a_process_tells_the_memory_and_the_utilisation_of_the_gpu_that_it_sees(nvml):
    found = usage()
    assert (found.gpu_memory_bytes, found.gpu_share) == (12 * GIB, 0.87)
    assert found.memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_what_nvml_does_not_tell_is_unknown_and_the_rest_is_there(nvml):
    nvml.nvmlDeviceGetUtilizationRates = nvml.refuse
    found = usage()
    assert (found.gpu_memory_bytes, found.gpu_share) == (12 * GIB, None)


def test_without_nvml_and_without_cuda_only_the_memory_of_the_process_is_known(nvml, monkeypatch):
    for name, value in (("_HAS_PYNVML", False), ("is_initialized", lambda: False)):
        monkeypatch.setattr(torch.cuda, name, value)
        found = usage()
        assert (found.gpu_memory_bytes, found.gpu_share) == (None, None)
        assert found.memory_bytes

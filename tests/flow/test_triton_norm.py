"""The Triton kernel of RMSNorm, in Triton's interpreter on the CPU: its value, its gradient, and one row's bits."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import rms_norm

CASES = ((64, torch.float32, 1e-6), (128, torch.bfloat16, 5e-3), (64, torch.float16, 5e-4))
"""Width, dtype and largest relative error; the interpreter cuts bfloat16 off where a GPU rounds it."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch for a GPU")
def test_value_and_gradient_are_those_of_rms_norm_and_a_row_does_not_depend_on_others() -> None:
    """In a process of its own: triton reads the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check() -> None:
    from flow.triton_norm import TritonNorm

    torch.manual_seed(0)
    for width, dtype, bound in CASES:
        x, slopes = (torch.randn(3, 7, 2, width).to(dtype) for _ in range(2))
        weight, x = (torch.rand(width) + 0.5).to(dtype), x.requires_grad_()
        exact = x.detach().double().requires_grad_()
        expected = rms_norm(exact, (width,), weight.double(), 1e-6)
        expected.backward(slopes.double())
        found = TritonNorm.apply(x, weight, 1e-6)
        found.backward(slopes)
        assert x.grad is not None and exact.grad is not None
        for one, other in ((found, expected), (x.grad, exact.grad)):
            assert (one - other).norm() < bound * other.norm()
        assert torch.equal(TritonNorm.apply(x[1:2], weight, 1e-6), found[1:2])


if __name__ == "__main__":
    check()

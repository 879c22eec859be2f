"""Resting models of a node share one copy of their frozen weights, with every bit, and nothing is left of it."""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flow.models.host_copy import host_copy
from flow.policy import FlowPolicy, build_policy
from protocol.config.run import RunConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")
HOLDER = """
import sys, torch
from flow.models.host_copy import host_copy
held = host_copy([torch.full((1000,), 7.0)])
print("held", flush=True)
sys.stdin.read()
"""


def files(process: int | str = "self") -> set[int]:
    """The inodes of the copies that a process holds."""
    links = Path(f"/proc/{process}/fd").iterdir()
    return {link.stat().st_ino for link in links if link.is_symlink() and "memfd:flowcredit-" in os.readlink(link)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    assert not files()
    yield
    gc.collect()
    assert not files(), "the kernel frees a copy with the last tensor that lies in it"


def tensors() -> list[torch.Tensor]:
    """All kinds of memory: NaN, a scalar, dtypes of 1 to 8 bytes, channels last, a view of a part."""
    torch.manual_seed(0)
    whole = torch.randn(3, 8, 4, 4)
    whole[0, 0, 0, 0] = torch.nan
    kinds = (torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.float64)
    return [
        whole,
        torch.tensor(3),
        *(whole.to(kind) for kind in kinds),
        whole.contiguous(memory_format=torch.channels_last),
        whole[1:, ::2],
    ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits) and one.dtype == other.dtype and one.stride() == other.stride()


def test_a_copy_has_every_bit_and_comes_once() -> None:
    own = tensors()
    with ThreadPoolExecutor(4) as threads:
        held = list(threads.map(host_copy, [own] * 4))
    assert len(files()) == 1
    assert all(same(*pair) for copy in held for pair in zip(own, copy, strict=True))
    assert {copy[0].data_ptr() for copy in held}.isdisjoint({own[0].data_ptr()})


def test_models_of_one_shape_never_mix_and_what_one_writes_no_other_reads() -> None:
    held = [host_copy([torch.full((5,), float(number))])[0] for number in (1, 2, 1)]
    assert len(files()) == 2
    held[0][0] = 9
    assert [tensor.tolist() for tensor in held] == [[9, 1, 1, 1, 1], [2] * 5, [1] * 5]


def test_a_copy_that_is_not_whole_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = os.memfd_create, []

    def two(name: str, flags: int) -> int:
        made.append(make(name, flags))
        os.write(made[0], bytes(128))  # of a process that is still writing, or hangs
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", two)
    (held,) = host_copy([torch.zeros(32)])
    assert len(made) == 1
    monkeypatch.undo()
    (again,) = host_copy([torch.zeros(32)])
    assert len(files()) == 2, "the unfinished one, and one for both"
    assert torch.equal(held, again)
    os.close(made[0])


def test_a_copy_outlives_the_process_that_made_it_and_no_other() -> None:
    maker = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout and maker.stdout.readline() == "held\n"
    (found,) = host_copy([torch.full((1000,), 7.0)])
    assert files() == files(maker.pid)
    maker.kill()
    maker.communicate()
    assert torch.equal(found, torch.full((1000,), 7.0))
    assert torch.equal(host_copy([torch.full((1000,), 7.0)])[0], found) and len(files()) == 1


def test_where_the_system_refuses_a_copy_each_process_has_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("no memory files here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with caplog.at_level(logging.WARNING):
        held = host_copy(tensors())
    assert all(same(*pair) for pair in zip(tensors(), held, strict=True))
    assert "no memory files here" in caplog.text


def test_models_that_rest_hold_one_copy_and_wake_with_their_bits(tiny_config: Callable[..., RunConfig]) -> None:
    (one, lora), (other, _) = made = [build_policy(tiny_config(), device="cpu:1") for _ in "12"]
    torch.manual_seed(0)
    for parameter in lora.parameters.values():
        parameter.data.normal_()
    latents, sigma = torch.randn(2, *one.backbone.latent_shape), torch.tensor([0.9, 0.4])
    prompt = one.conditioning("a red circle", "")

    def computed(policy: FlowPolicy) -> tuple[torch.Tensor, np.ndarray]:
        with torch.no_grad():
            return policy.velocity(latents, sigma, prompt), policy.backbone.decode(latents)

    expected = [computed(policy) for policy in (one, other)]
    assert not torch.equal(expected[0][0], expected[1][0]), "each has an adapter of its own"
    for _ in range(2):
        for policy, _ in made:
            policy.backbone.rest()
        assert len(files()) == 1
        for policy, _ in made:
            policy.backbone.wake()
            policy.backbone.wake()
        for policy, (velocity, images) in zip((one, other), expected, strict=True):
            again = computed(policy)
            assert torch.equal(again[0], velocity) and np.array_equal(again[1], images)

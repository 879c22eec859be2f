"""The fleet in one process: what an interrupt leaves computing does not disturb the next run of the process."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from deploy.run import local
from flow.rollout import RolloutPolicy
from protocol.config.run import RunConfig
from protocol.messages import Metadata, Prompt, Scores
from tests.support.waiting import PATIENCE_S


class Nothing:
    """Scores no image."""

    name, low, high = "nothing", 0.0, 1.0

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Every prompt can be scored."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        return Scores.missing(len(images), "nothing")


async def test_the_next_run_computes_after_what_an_interrupt_has_left(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has one choice of kernels for all threads: the one that is left would put back its own."""
    begun, release, order = threading.Event(), threading.Event(), []

    class Slow(RolloutPolicy):
        def __init__(self, config: RunConfig, **given: Any) -> None:
            if not begun.is_set():
                begun.set()
                assert release.wait(PATIENCE_S)
                torch.use_deterministic_algorithms(mode=True)
            order.append(torch.are_deterministic_algorithms_enabled())
            super().__init__(config, **given)

    monkeypatch.setattr(local, "RolloutPolicy", Slow)
    monkeypatch.setattr(local, "STOP_S", 0.1)
    config = tiny_config(rewards={"a": {"scorer": f"{__name__}:Nothing"}}, evaluation={"component": "reward"})
    interrupted, following = (local.LocalFleet(config, has_learner=False) for _ in range(2))
    task = asyncio.create_task(interrupted.start())
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    task.cancel()
    interrupted.stop()
    later = asyncio.create_task(following.start())
    await asyncio.sleep(0.3)
    assert not order
    release.set()
    await later
    following.stop()
    assert order == [True, False]

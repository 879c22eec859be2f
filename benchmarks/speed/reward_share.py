"""The share of scoring in an iteration's CPU time: a part of `benchmarks.speed.rewards`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from deploy.presets import load_config
from deploy.run.local import LocalFleet
from learner.loop.groups import Groups
from protocol.messages import Prompt, Scores
from protocol.ports import RewardSource
from protocol.prompts import read_prompts


class Watched:
    """A reward source that records the CPU seconds of its scoring."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seconds, self.images = inner, 0.0, 0

    async def score_for_training(self, images: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        """Score with the inner source and record the CPU time; nothing else may run in the meantime."""
        began = time.process_time()
        scores = await self.inner.score_for_training(images, prompts)
        self.seconds += time.process_time() - began
        self.images += len(prompts)
        return scores


def share(preset: str, groups: int = 2) -> str:
    """Generate, score and learn from some groups of a preset in turn, in this process, with every point scored."""
    every_point = [
        *("sampling.window.rule=all", "completion={rule: ode, substeps: 2, spacing: even, solver: euler}"),
        *("group.size=24", "sampling.splits=[]", "credit.rule=gae", "credit.normalise=per_step"),
    ]
    overrides = [f"group.per_iteration={groups}", "learner.updates_per_iteration=1", "cluster.learner.threads=1"]
    config = load_config(preset, overrides=[*overrides, *every_point])

    async def scenario() -> tuple[Watched, float]:
        fleet = LocalFleet(config)
        await fleet.start()
        watched = Watched(fleet.ports.rewards)
        ports = replace(fleet.ports, rewards=cast(RewardSource, watched))
        source = Groups(config, read_prompts(config.data, config.data.train), ports)
        await source.begin([])
        await source.produce(0)
        watched.seconds, watched.images = 0.0, 0
        began = time.process_time()
        await fleet.update([asyncio.ensure_future(source.produce(index)) for index in range(groups)])
        seconds = time.process_time() - began
        fleet.stop()
        return watched, seconds

    watched, seconds = asyncio.run(scenario())
    return (
        f"{preset}: scoring takes {watched.seconds / seconds:.1%} of an iteration's CPU time"
        f" ({watched.images} images in {watched.seconds:.2f} of {seconds:.2f} s, {groups} groups)"
    )

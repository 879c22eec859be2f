"""Training seconds, in virtual time: what a run does between two iterations neither adds to them nor hides work."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from learner.loop import loop, stream
from learner.loop.evaluate import Evaluation
from protocol.config.run import RunConfig
from protocol.messages import (
    Adapter,
    GenerateRequest,
    LearnerState,
    Prompt,
    Receipt,
    ScoredGroup,
    Scores,
    ShardFacts,
    ShardReceipt,
    ShardRequest,
)
from protocol.ports import Ports
from tests.support.virtual_time import run_at_once

Config = Callable[..., RunConfig]
ITERATIONS, EVALUATE_S, SCORE_S, PUBLISH_S, DRAW_S, SAVE_S, PAUSE_S, STOP_S = 4, 20.0, 0.5, 0.25, 1.0, 3.0, 50.0, 0.5
PROMPTS = (Prompt(index=0, text="one"),)


@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop measures with the clock of its event loop."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    for module in (loop, stream):
        monkeypatch.setattr(module, "time", clock)


def good(count: int) -> Scores:
    return Scores(values=np.ones(count, np.float32), valid=np.ones(count, bool), reasons=("",) * count)


@dataclass
class World:
    """The four ports and the journal. One rollout actor, one learner worker; `colocated` ones take turns."""

    is_colocated: bool
    shard_s: float
    update_s: float
    pauses_at: tuple[int, ...] = ()
    stops_after: int | None = None
    version: int = 0
    records: list[Mapping[str, float]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    apart_s: float = 0.0
    """Own seconds of evaluations, checkpoints and pauses."""
    wall_s: float = 0.0
    """All seconds of the loop."""

    def __post_init__(self) -> None:
        self.stop, self.rolling = asyncio.Event(), asyncio.Lock()
        self.learning = self.rolling if self.is_colocated else asyncio.Lock()
        self.evaluating = 0

    async def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, Any, Any]:
        async with self.rolling:
            assert not self.evaluating, "an evaluation has the rollout actors to itself"
            await asyncio.sleep(self.shard_s)
        facts = ShardFacts(request=request, steps=(0,), image_index=np.zeros((2, 1), int), finals=("a", "b"))
        receipt = ShardReceipt(
            adapter_version=request.adapter_version, adapter_digest=request.adapter_digest, images=2, facts=facts
        )
        return receipt, None, None

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, Any]:
        self.evaluating += 1
        async with self.rolling:
            await self.apart(EVALUATE_S)
        self.evaluating -= 1
        return Receipt(
            adapter_version=request.adapter_version, adapter_digest=request.adapter_digest, images=len(request.prompts)
        ), None

    async def fetch(self, images: Any) -> np.ndarray:
        return np.zeros((1, 8, 8, 3), np.uint8)

    def parallel(self) -> int:
        return 1

    async def score_for_training(self, images: Any, prompts: Sequence[Prompt]) -> Scores:
        await asyncio.sleep(SCORE_S)
        return good(len(prompts))

    async def score_for_evaluation(self, images: Any, prompts: Sequence[Prompt]) -> Scores:
        return good(len(prompts))

    def failures(self) -> Mapping[str, float]:
        return {}

    async def update(self, groups: Sequence["asyncio.Future[ScoredGroup]"]) -> Mapping[str, float]:
        await asyncio.gather(*groups)
        async with self.learning:
            await asyncio.sleep(self.update_s)
        self.version += 1
        return {}

    async def adapter(self) -> Adapter:
        return Adapter(version=self.version, arrays={}, digest=str(self.version))

    async def state(self) -> LearnerState:
        return LearnerState(iteration=self.version, adapter=await self.adapter(), optimizer={})

    async def publish(self, adapter: Adapter) -> None:
        await asyncio.sleep(PUBLISH_S)

    async def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.records.append(metrics)
        if iteration == self.stops_after:
            asyncio.get_running_loop().call_later(STOP_S, self.stop.set)

    async def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation.seconds)
        await self.apart(DRAW_S)

    async def save(self, state: LearnerState) -> None:
        await self.apart(SAVE_S)

    def checkpoint(self, iteration: int) -> Path | None:
        return None

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002
        pass

    async def between(self, save: loop.Save) -> None:
        if self.version in self.pauses_at:
            await self.apart(PAUSE_S)

    async def apart(self, seconds: float) -> None:
        self.apart_s += seconds
        await asyncio.sleep(seconds)


def trained(config: RunConfig, **scene: Any) -> World:
    """Train in a world."""

    async def train() -> World:
        world = World(is_colocated=config.cluster.is_colocated, **scene)
        port = cast(Any, world)
        await loop.train(
            config,
            prompts=PROMPTS,
            heldout=PROMPTS,
            ports=Ports(rollouts=port, rewards=port, learner=port, adapters=port),
            journal=world,
            stop=world.stop,
            between=world.between,
        )
        world.wall_s = asyncio.get_running_loop().time()
        return world

    return run_at_once(train())


def config_of(tiny_config: Config, *, layout: str = "separate", max_lag: int = 0, every: int = 0) -> RunConfig:
    """Two groups of one shard; with `every`, evaluations and checkpoints in this rhythm."""
    return tiny_config(
        iterations=ITERATIONS,
        group={"size": 2, "max_lag": max_lag},
        cluster={"layout": layout, "rollout_actors": 1},
        evaluation={"every": every},
        checkpoint={"every": every or 100},
    )


def spent(world: World) -> list[float]:
    return [metrics["seconds/iteration"] for metrics in world.records]


@pytest.mark.parametrize("layout", ["separate", "colocated"])
def test_without_lag_evaluations_checkpoints_and_pauses_change_no_training_second(
    tiny_config: Config, layout: str
) -> None:
    plain = trained(config_of(tiny_config, layout=layout), shard_s=2.0, update_s=3.0)
    iteration_s = 2 * 2.0 + SCORE_S + 3.0 + PUBLISH_S
    assert spent(plain) == [iteration_s] * ITERATIONS
    busy = trained(config_of(tiny_config, layout=layout, every=1), shard_s=2.0, update_s=3.0, pauses_at=(1, 3))
    assert spent(busy) == spent(plain)
    assert len(busy.evaluations) == ITERATIONS + 1
    for world in (plain, busy):  # nothing is counted twice, nothing is hidden; before the first group stands a publish
        assert world.wall_s == PUBLISH_S + sum(spent(world)) + world.apart_s


@pytest.mark.parametrize(("shard_s", "update_s"), [(3.0, 1.0), (1.0, 5.0)], ids=["rollouts", "updates"])
def test_with_lag_groups_that_are_made_meanwhile_are_charged(
    tiny_config: Config, shard_s: float, update_s: float
) -> None:
    def total(**scene: Any) -> float:
        every = scene.pop("every", 0)
        world = trained(config_of(tiny_config, max_lag=1, every=every), shard_s=shard_s, update_s=update_s, **scene)
        assert set(world.evaluations) == {EVALUATE_S}, "groups in flight do not slow an evaluation down"
        return sum(spent(world))

    plain = total()
    for scene in ({"every": 1}, {"every": 2}, {"pauses_at": (1, 3)}):
        assert plain <= total(**scene) <= plain + ITERATIONS * (SCORE_S + PUBLISH_S), scene


def test_a_stop_does_not_wait_for_groups_before_an_evaluation(tiny_config: Config) -> None:
    config = config_of(tiny_config, max_lag=1, every=1)
    world = trained(config, shard_s=100.0, update_s=1.0, stops_after=1)
    assert (len(world.records), len(world.evaluations)) == (1, 1)
    assert world.wall_s == PUBLISH_S + EVALUATE_S + DRAW_S + spent(world)[0] + STOP_S + SAVE_S

"""Every family in half precision on the device of a run: exact replay, and one end for every way to train.

The CPU runs the same tests with one precision for each architecture; `make test` with the first two.
"""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from flow.rollout import RolloutPolicy
from learner.checkpoint import read_checkpoint, write_checkpoint
from learner.update.lanes import Seat
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from protocol.messages import Adapter, ShardRequest
from tests.support.learning.groups import draw_groups, learn
from tests.support.worlds.architectures import ARCHITECTURES, model_of

Config = Callable[..., RunConfig]
ITERATIONS = 2
"""Each with an optimizer step."""
MOST_HALVINGS = 16
"""Of float16's loss scale, 65,536 at first: an iteration whose gradients overflow takes no step."""
ON_A_CPU = [
    ("sd35", "bfloat16", None),
    ("flux", "float16", None),
    ("flux2_klein", "bfloat16", None),
    ("qwen_image", "bfloat16", None),
    ("qwen_image_21", "bfloat16", None),
    ("z_image", "float16", None),  # its first gradients overflow
]
ON_A_GPU = [
    *((name, dtype, None) for name in ARCHITECTURES for dtype in ("bfloat16", "float16")),
    ("sd35", "bfloat16", "inductor"),
    ("qwen_image", "bfloat16", "inductor"),
]
SMALL = {"sampling": {"steps": 3}, "group": {"size": 4, "shard": 2, "per_iteration": 1}}
TURNS = {"cluster": {"layout": "colocated", "offload": True, "rollout_actors": 1}}
"""Overrides of a config in which rollout and update take turns, and the side that rests is in host memory."""


pytestmark = pytest.mark.parametrize(
    ("device", "case"),
    [("cpu", case) for case in ON_A_CPU[:2]]
    + [pytest.param("cpu", case, marks=pytest.mark.whole) for case in ON_A_CPU[2:]]
    + [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in ON_A_GPU],
    indirect=True,
    scope="module",
    ids=lambda value: value if isinstance(value, str) else "-".join(filter(None, value)),
)


class Taken:
    """Rollout actors that take the shards in turn."""

    def __init__(self, *policies: RolloutPolicy) -> None:
        self._policies, self._turns = policies, cycle(policies)

    def receive(self, adapter: Adapter) -> None:
        for policy in self._policies:
            policy.receive(adapter)

    def rollout(self, request: ShardRequest) -> Any:
        return next(self._turns).rollout(request)

    def rest(self) -> None:
        for policy in self._policies:
            policy.rest()


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, str, str | None]:
    """Architecture, precision and compiler."""
    return request.param


@pytest.fixture(scope="module")
def make(case: tuple[str, str, str | None], tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A config of the case, with more sections."""
    name, dtype, compiler = case
    model = model_of(name, dtype, tmp_path_factory.getbasetemp() / "architectures") | {"compile": compiler}
    return lambda **sections: tiny_config(model=model, **SMALL, **sections)


def trained(config: RunConfig, device: str, *, actors: int = 1, workers: int = 1, files: Path | None = None) -> str:
    """Train, with an exact replay in every iteration; the digest of the adapter, and of the optimizer's state.

    With `files` each iteration begins with new learner workers and what the last ones left in a checkpoint.
    """

    def seated() -> list[Learner]:
        return [Learner(config, device=device, seat=Seat(worker, workers)) for worker in range(workers)]

    policies = Taken(*(RolloutPolicy(config, device=device) for _ in range(actors)))
    learners, steps = seated(), 0
    for iteration in range(ITERATIONS + MOST_HALVINGS):
        if files and iteration:
            checkpoint = write_checkpoint(files, learners[0].state(), config.model.lora, keep=1)
            learners = seated()
            for learner in learners:
                learner.restore(read_checkpoint(checkpoint))
        adapter = learners[0].adapter()
        policies.receive(adapter)
        groups = draw_groups(policies, config, adapter, iteration=iteration)  # pyright: ignore[reportArgumentType]
        if config.cluster.offload:
            policies.rest()
        metrics = learn(config, groups, *learners)
        assert metrics.get("probe/ratio_deviation", 0.0) == metrics["train/first_ratio_deviation"] == 0.0
        assert metrics["train/ratio_mean"] == 1.0
        steps += learners[0].adapter().digest != adapter.digest
        assert steps == iteration + 1 or config.model.dtype == "float16"
        if steps == ITERATIONS:
            break
    assert steps == ITERATIONS and metrics["train/grad_norm"] > 0
    state = learners[0].state()
    return state.adapter.digest + str({name: array.tobytes() for name, array in sorted(state.optimizer.items())})


@pytest.fixture(scope="module")
def alone(make: Config, device: str) -> str:
    """What one rollout actor and one learner worker come to."""
    return trained(make(), device)


def test_two_rollout_actors_and_two_learner_workers_come_to_the_same_bits(
    make: Config, device: str, alone: str
) -> None:
    assert trained(make(), device, actors=2, workers=2) == alone


def test_learner_workers_that_begin_anew_from_a_checkpoint_come_to_the_same_bits(
    make: Config, device: str, alone: str, tmp_path: Path
) -> None:
    assert trained(make(), device, files=tmp_path) == alone


def test_sides_that_take_turns_and_rest_in_host_memory_come_to_the_same_bits(
    make: Config, device: str, alone: str
) -> None:
    assert trained(make(**TURNS), device) == alone

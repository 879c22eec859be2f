"""The learner group in one process: the same bits for every number of workers, and the gradient of the whole batch.

Every method replays its rollouts exactly here too: the first ratios are 1.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from deploy.presets import load_config, method_names
from flow.policy import build_policy
from flow.rollout import RolloutPolicy
from learner.update.lanes import Lanes, Seat, added, slice_numbers
from learner.update.learner import SCALER, Learner
from learner.update.micro_batches import StepChoice, micro_batches, shard_tasks
from learner.update.objective import Objective
from learner.update.workers import InProcessWorker, gradient_slices, update
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError, ShardLostError
from protocol.messages import LearnerState, Rollout, ScoredGroup, digest_of
from tests.support.learning.gradients import relative_difference, watch_gradients
from tests.support.learning.groups import (
    alone,
    complete,
    draw_groups,
    far_from_fresh,
    learn,
    redness,
    require_exact_ratios,
)
from tests.support.learning.plain_credit import PLAIN
from tests.support.runs.metrics import untimed

Config = Callable[..., RunConfig]
SIZES = (1, 2)
MANY: Mapping[str, Any] = MappingProxyType({"size": 2, "shard": 1, "per_iteration": 6})
"""Twelve shards, six in an optimizer step: more than four lanes, not a multiple of eight."""
PAIRED: Mapping[str, Any] = MappingProxyType({"size": 4, "shard": 2, "per_iteration": 6})
"""The same with two images in a shard, of which `blind_to_one` leaves one."""


def seats(config: RunConfig, workers: int, fetch: Callable[..., Any] = iter) -> list[Learner]:
    return [Learner(config, seat=Seat(worker, workers), fetch=fetch) for worker in range(workers)]


def blind_to_one(rollout: Rollout, images: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(images)) == 1, np.nan, redness(rollout, images))


def require_equal(one: LearnerState, other: LearnerState) -> None:
    assert one.adapter.digest == other.adapter.digest
    assert (one.old and one.old.digest) == (other.old and other.old.digest)
    assert one.optimizer.keys() == other.optimizer.keys()
    assert all(np.array_equal(array, other.optimizer[name]) for name, array in one.optimizer.items())


def require_same_bits(
    config: RunConfig, *, iterations: int = 1, sizes: Sequence[int] = SIZES, replays: bool = False, **how: Any
) -> None:
    """Every size of the group learns the same from the same groups, and says the same about it.

    The adapter at the start changes every velocity, which a fresh one does not.
    """
    groups_of_workers = [seats(config, workers) for workers in sizes]
    start = LearnerState(iteration=0, adapter=far_from_fresh(groups_of_workers[0][0].adapter()), optimizer={})
    for learner in itertools.chain(*groups_of_workers):
        learner.restore(start)
    policy = RolloutPolicy(config)
    for iteration in range(iterations):
        adapter = groups_of_workers[0][0].adapter()
        policy.receive(adapter)
        groups = draw_groups(policy, config, adapter, iteration=iteration, **how)
        metrics = [learn(config, groups, *workers) for workers in groups_of_workers]
        if replays:
            require_exact_ratios(metrics[0], config)
        assert metrics[0]["train/grad_norm"] > 0
        assert np.isfinite(list(metrics[0].values())).all()
        for told in metrics[1:]:
            np.testing.assert_equal(told, metrics[0])
        states = [learner.state() for workers in groups_of_workers for learner in workers]
        assert states[0].adapter.digest != adapter.digest
        for state in states[1:]:
            require_equal(states[0], state)


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (1, 2, 8)), ("bfloat16", (1, 4)), ("float16", (1, 2))])
def test_any_number_of_workers_gives_the_same_bits(tiny_config: Config, dtype: str, sizes: tuple[int, ...]) -> None:
    model = tiny_config().model.model_dump() | {"dtype": dtype}
    settings = {"updates_per_iteration": 2, "learning_rate": 1e-2}
    require_same_bits(tiny_config(model=model, group=MANY, learner=settings), iterations=2, sizes=sizes)


ODE: Mapping[str, Any] = MappingProxyType(
    {
        "sampling": {"kernel": "ode", "shared_noise": False},
        "credit": {"rule": "uniform", "step_weights": {"rule": "none"}},
        "group": {"max_lag": 1},
    }
)
FORWARD: dict[str, Any] = {
    "old": {"rate": 0.5},
    "kl": {"weight": 0.1, "rule": "velocity"},
    "updates_per_iteration": 2,
    "step_fraction": 0.6,
}
CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "nft": {"learner": FORWARD | {"objective": "nft"}, **ODE},
        "elbo, PAR, and NormGuard": {
            "learner": FORWARD | {"objective": "elbo", "forward": {"loss": "par"}, "norm_guard": 0.5},
            **ODE,
        },
        "nft with step credit": {"learner": FORWARD | {"objective": "nft"}},
        "a share of the steps": {"learner": {"step_fraction": 0.6, "epochs": 2}},
        "a running mean": {"learner": {"average": {"decay": 0.9, "every": 1}}},
        "cut forwards": {"model": {"forward_batch": 1}},
        "older adapters": {"group": {**MANY, "max_lag": 1}},
        "more workers than shards": {"group": {"size": 4, "shard": 4, "per_iteration": 1}},
        "four lanes": {"learner": {"lanes": 4}, "group": MANY},
    }
)


@pytest.mark.parametrize("name", CASES)
def test_every_objective_and_option_gives_the_same_bits(tiny_config: Config, name: str) -> None:
    goes_on = "objective" in str(CASES[name])
    require_same_bits(tiny_config(**CASES[name]), iterations=2 if goes_on else 1)


@pytest.mark.parametrize("name", method_names())
def test_every_method_replays_exactly_and_gives_the_same_bits(tiny_config: Config, tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.yaml"
    sampling, group = {"steps": 6, "window": {"size": 3}}, {"size": 6, "shard": 3, "per_iteration": 1}
    path.write_text(tiny_config(sampling=sampling, group=group, learner={"kl": {"weight": 0.004}}).to_yaml())
    require_same_bits(load_config(path, overrides=[f"method={name}"]), replays=True)


def test_missing_scores_leave_the_bits_equal(tiny_config: Config) -> None:
    require_same_bits(tiny_config(group=PAIRED), judge=blind_to_one)


def test_the_group_s_gradient_is_that_of_one_backward_over_the_whole_batch(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are missing too: the loss is the mean over the pairs that count, whatever W and L are."""

    config = tiny_config(group={**PAIRED, "per_iteration": 3}, credit=PLAIN)
    policy, reference = RolloutPolicy(config), Learner(config)
    policy.receive(reference.adapter())
    groups = draw_groups(policy, config, reference.adapter(), iteration=0, judge=blind_to_one)
    learn(config, groups, reference)
    expected = whole_gradient(config, groups, reference)
    seen = watch_gradients(monkeypatch)
    for workers, lanes in ((1, 8), (2, 8), (8, 8), (1, 1), (2, 2), (4, 16)):
        other = tiny_config(group={**PAIRED, "per_iteration": 3}, credit=PLAIN, learner={"lanes": lanes})
        learn(other, groups, *seats(other, workers))
        assert all(relative_difference(expected, gradient) < 1e-5 for gradient in seen[-workers:]), (workers, lanes)


def whole_gradient(config: RunConfig, groups: Sequence[ScoredGroup], done: Learner) -> torch.Tensor:
    """Of the mean loss over all pairs of the iteration that count, in one backward."""
    policy, lora = build_policy(config, device="cpu")
    objective = Objective(policy, lora, config.learner)
    earned = [done.credit(group) for group in range(len(groups))]
    tasks = shard_tasks(groups, earned, choice=StepChoice())
    device = torch.device("cpu")
    losses = [
        objective(micro_batch).loss
        for task in tasks
        for micro_batch in micro_batches(task, task.shard.rollout, rows_per_state=alone, device=device)
    ]
    (torch.cat(losses).sum() / sum(task.pairs for task in tasks)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in lora.parameters.values() if parameter.grad is not None])


def test_an_overflow_on_one_worker_skips_the_step_of_all(tiny_config: Config) -> None:
    config = tiny_config(model=tiny_config().model.model_dump() | {"dtype": "float16"}, group=MANY)
    workers, policy = seats(config, 4), RolloutPolicy(config)
    before = workers[0].adapter()
    policy.receive(before)
    groups = draw_groups(policy, config, before, iteration=0)
    for learner in workers:
        state = learner.state()
        learner.restore(replace(state, optimizer=state.optimizer | {f"{SCALER}/scale": np.array(2.0**120, np.float32)}))
    metrics = learn(config, groups, *workers)
    assert {learner.adapter().digest for learner in workers} == {before.digest}
    assert {learner.state().optimizer[f"{SCALER}/scale"].item() for learner in workers} == {2.0**119}
    assert metrics["train/grad_norm"] == 0


def test_each_shard_s_trajectories_are_fetched_by_one_worker_only(tiny_config: Config) -> None:
    config = tiny_config(group=MANY, learner={"probe_every": 0})
    fetched: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    def fetching(worker: int) -> Callable[[Sequence[Rollout]], Any]:
        def fetch(handles: Sequence[Rollout]) -> Any:
            for rollout in handles:
                fetched[worker].append((rollout.request.group, rollout.request.first_member))
                yield rollout

        return fetch

    workers = [Learner(config, seat=Seat(worker, 2), fetch=fetching(worker)) for worker in range(2)]
    policy = RolloutPolicy(config)
    policy.receive(workers[0].adapter())
    learn(config, draw_groups(policy, config, workers[0].adapter(), iteration=0), *workers)
    assert fetched[0] == [(group, 0) for group in range(6)], "the even lanes"
    assert fetched[1] == [(group, 1) for group in range(6)], "the odd lanes"


def test_an_update_that_lost_a_shard_after_its_first_step_is_undone_and_repeated(tiny_config: Config) -> None:
    config = tiny_config(group=MANY, learner={"updates_per_iteration": 3})
    lost = {(4, 1)}

    def fetch(handles: Sequence[Rollout]) -> Any:
        for rollout in handles:
            if (rollout.request.group, rollout.request.first_member) in lost:
                raise ShardLostError("a node took it down")
            yield rollout

    workers, whole = seats(config, 2, fetch), Learner(config)
    policy = RolloutPolicy(config)
    before = whole.state()
    policy.receive(before.adapter)
    groups = draw_groups(policy, config, before.adapter, iteration=0)
    with pytest.raises(ShardLostError):
        learn(config, groups, *workers)
    for learner in workers:
        require_equal(learner.state(), before)
    lost.clear()
    assert learn(config, groups, *workers) == learn(config, groups, whole)
    require_equal(workers[1].state(), whole.state())


def test_workers_whose_adapters_differ_are_refused(tiny_config: Config) -> None:
    config = tiny_config()
    workers, policy = seats(config, 2), RolloutPolicy(config)
    adapter = workers[0].adapter()
    policy.receive(adapter)
    groups = draw_groups(policy, config, adapter, iteration=0)
    name, array = next(iter(adapter.arrays.items()))
    state = workers[1].state()
    arrays = {**adapter.arrays, name: array + 1e-6}
    workers[1].restore(replace(state, adapter=replace(adapter, arrays=arrays, digest=digest_of(arrays))))
    with pytest.raises(ContractError, match="all learner workers must hold the same adapter after an update"):
        learn(config, groups, *workers)


def test_a_worker_that_raises_ends_the_update_while_another_one_works(tiny_config: Config) -> None:
    config = tiny_config()
    broken, slow = seats(config, 2)
    policy = RolloutPolicy(config)
    policy.receive(broken.adapter())
    groups = draw_groups(policy, config, broken.adapter(), iteration=0)
    groups[0].shards[0].rollout.log_probs[0, 0] = -np.inf

    class Slow(InProcessWorker):
        async def call(self, work, *args, **named):
            if work is Learner.train:
                await asyncio.Event().wait()
            return await super().call(work, *args, **named)

    async def scenario() -> None:
        await asyncio.wait_for(update(config, [InProcessWorker(broken), Slow(slow)], complete(groups)), 120)

    with pytest.raises(NonFiniteError, match="must be finite"):
        asyncio.run(scenario())
    require_equal(broken.state(), slow.state())


EARLY: Mapping[str, Any] = MappingProxyType({**PLAIN, "values": "raw", "scale": "prompt"})
"""Credit of a group by its own scores alone."""


@pytest.mark.parametrize("workers", [1, 2])
def test_groups_train_while_later_ones_are_made_and_give_the_same_bits(tiny_config: Config, workers: int) -> None:
    settings = {"updates_per_iteration": 3, "epochs": 2}
    config = tiny_config(group=PAIRED, learner=settings, credit=EARLY)
    late = tiny_config(
        group=PAIRED, learner=settings, credit=EARLY, cluster={"layout": "colocated", "rollout_actors": 1}
    )
    assert config.trains_early and not late.trains_early
    group, whole, policy = seats(config, workers), Learner(config), RolloutPolicy(config)
    policy.receive(whole.adapter())
    groups = draw_groups(policy, config, whole.adapter(), iteration=0, judge=blind_to_one)
    steps: list[int] = []

    class Watched(InProcessWorker):
        async def call(self, work, *args, **named):
            if work is Learner.step:
                steps.append(named["first"])
            return await super().call(work, *args, **named)

    async def scenario() -> dict[str, float]:
        coming = [asyncio.get_running_loop().create_future() for _ in groups]
        learning = asyncio.ensure_future(update(config, [Watched(learner) for learner in group], coming))
        for index, each in enumerate(reversed(groups[:5])):
            coming[4 - index].set_result(each)  # complete in another order than they are trained in
        while steps.count(2) < workers:
            assert not learning.done()
            await asyncio.sleep(0.01)
        assert 4 not in steps, "the last step waits for its last group"
        coming[5].set_result(groups[5])
        return untimed(await learning)

    told = asyncio.run(asyncio.wait_for(scenario(), 120))
    require_equal(group[0].state(), group[-1].state())
    assert told == learn(late, groups, whole)
    require_equal(group[0].state(), whole.state())


def test_an_early_update_that_is_given_up_leaves_the_state_before(tiny_config: Config) -> None:
    config = tiny_config(group=MANY, learner={"updates_per_iteration": 3}, credit=EARLY)
    learner, policy = Learner(config), RolloutPolicy(config)
    before = learner.state()
    policy.receive(before.adapter)
    groups = draw_groups(policy, config, before.adapter, iteration=0)

    class Watched(InProcessWorker):
        """Ends the update after its second step."""

        updating: "asyncio.Future[Any]"

        async def call(self, work, *args, **named):
            result = await super().call(work, *args, **named)
            if work is Learner.step and named["first"] == 2:
                self.updating.cancel()
            return result

    async def scenario() -> None:
        coming = complete(groups[:4]) + [asyncio.get_running_loop().create_future() for _ in groups[4:]]
        worker = Watched(learner)
        worker.updating = asyncio.ensure_future(update(config, [worker], coming))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(worker.updating, 120)

    asyncio.run(scenario())
    require_equal(learner.state(), before)
    whole = Learner(config)
    assert learn(config, groups, learner) == learn(config, groups, whole)
    require_equal(learner.state(), whole.state())


async def test_all_workers_get_one_handle_of_the_groups(tiny_config: Config) -> None:
    """On Ray a handle for each worker would be a copy of all groups for each."""
    config = tiny_config()
    workers, policy = seats(config, 2), RolloutPolicy(config)
    policy.receive(workers[0].adapter())
    groups = draw_groups(policy, config, workers[0].adapter(), iteration=0)
    shared: list[Sequence[ScoredGroup]] = []

    def share(complete: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        shared.append(complete)
        return complete

    await update(config, [InProcessWorker(learner) for learner in workers], complete(groups), share=share)
    assert shared == [groups]


def test_trajectories_of_another_shard_are_refused(tiny_config: Config) -> None:
    config = tiny_config()
    learner, policy = Learner(config), RolloutPolicy(config)
    policy.receive(learner.adapter())
    groups = draw_groups(policy, config, learner.adapter(), iteration=0)
    first, second = groups[0].shards
    swapped = replace(groups[0], shards=(replace(first, rollout=second.rollout), second))
    with pytest.raises(ContractError, match="must come with its own trajectories"):
        learn(config, [swapped, *groups[1:]], learner)


def join(one: str, other: str) -> str:
    return f"({one}+{other})"


@pytest.mark.parametrize(("workers", "near"), [(1, 1), (2, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 8)])
def test_the_tree_of_any_workers_on_any_nodes_is_the_tree_of_all_lanes(workers: int, near: int) -> None:
    """The slices are tensors a to p; the lanes 0 to 7 have none of p."""
    names = "abcdefghijklmnop"
    numbers = slice_numbers(dict.fromkeys(names, 10), workers)

    class Lettered:
        """A worker whose numbers are words that say what was added to what."""

        def __init__(self, seat: int) -> None:
            self._lanes = [dict.fromkeys(names[:-1], f"{lane}") for lane in range(seat, 8, workers)]
            self.added: set[str] = set()

        async def keep_each(self, count: int, work: Any, *args: Any, cut: Any = None) -> list[Any]:
            is_first = work is Learner.lane_sum
            total = added(self._lanes if is_first else args, join)
            self.added |= set() if is_first else total.keys()
            parts = (args[0] if is_first else cut).cut(total, numbers)
            assert len(parts) == count
            return parts

    group: list[Any] = [Lettered(seat) for seat in range(workers)]
    slices = asyncio.run(gradient_slices(group, near))
    assert len(slices) == workers
    whole = "(((0+4)+(2+6))+((1+5)+(3+7)))"
    assert {name: array for each in slices for name, array in each.items()} == dict.fromkeys(names[:-1], whole)
    assert all(len(each.added) <= 16 / (near if near > 1 else workers) for each in group)


def test_slices_are_about_equal_and_their_number_may_exceed_that_of_the_tensors() -> None:
    assert slice_numbers({"a": 5, "b": 1, "c": 2, "d": 2}, 2) == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert slice_numbers({"a": 5, "b": 5}, 8) == {"a": 0, "b": 4}


def test_a_lane_without_a_shard_adds_nothing() -> None:
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
    lanes = Lanes(parameters)
    assert lanes.take(range(8)) == {}
    with lanes.adding_to(5):
        (parameters["a"] * -0.0).sum().backward()
    (gradient,) = lanes.take(range(8)).values()
    assert np.signbit(gradient).all(), "zeros of empty lanes would turn -0 into 0"
    one, other = {"a": np.float32([1.0])}, {"a": np.float32([2.0]), "b": np.float32([-0.0])}
    both = added([one, other], np.add)
    assert both["a"] == 3.0
    assert np.signbit(both["b"]).all()
    assert added([{}, {}], np.add) == {}

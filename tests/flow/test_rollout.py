"""Shards: how images are laid out, that trajectories chain, and that nothing depends on who else is drawn."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flow.adapter.lora import Lora
from flow.maths.completion import complete, stack_grids, substep_grid
from flow.maths.noise import INITIAL, SHARED, normal, trajectory_noise
from flow.maths.transition import clean_estimate
from flow.meter import Meter
from flow.models.contract import Backbone
from flow.models.load import load_backbone
from flow.policy import FlowPolicy, policy_of
from flow.rollout import RolloutPolicy, excerpt_of, generate, rollout_shard
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError, StaleAdapterError
from protocol.messages import (
    COMMON_IMAGE,
    NO_IMAGE,
    Adapter,
    GenerateRequest,
    Prompt,
    Rollout,
    ShardRequest,
    digest_of,
)

PROMPT = Prompt(index=0, text="a red circle")
Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def backbone(tiny_sd3: Path) -> Backbone:
    return load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=2))


def request(**changes: Any) -> ShardRequest:
    fields = {
        "iteration": 1,
        "group": 2,
        "prompt": PROMPT,
        "first_member": 0,
        "members": 3,
        "adapter_version": 0,
        "adapter_digest": "",
    }
    return ShardRequest(**fields | changes)


def sample(backbone: Backbone, config: RunConfig, **changes: Any) -> tuple[Rollout, np.ndarray]:
    policy = policy_of(backbone, config)
    return rollout_shard(policy, request(**changes), config)


def test_with_shared_noise_the_first_point_is_one_image_and_the_last_point_the_finished_one(
    backbone: Backbone, tiny_config: Config
) -> None:
    rollout, images = sample(backbone, tiny_config(sampling={"shared_noise": True}))
    assert rollout.steps == (0, 1, 2)
    assert rollout.image_index.tolist() == [[0, 1, 4, 7], [0, 2, 5, 8], [0, 3, 6, 9]]
    assert images.shape == (10, 16, 16, 3)
    assert np.array_equal(rollout.latents[0, 0], rollout.latents[2, 0])
    assert not np.array_equal(rollout.latents[0, 1], rollout.latents[2, 1])


def test_without_shared_noise_every_member_has_its_own_first_point(backbone: Backbone, tiny_config: Config) -> None:
    rollout, images = sample(backbone, tiny_config(sampling={"shared_noise": False}))
    assert rollout.image_index.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert len(images) == 12
    assert not np.array_equal(rollout.latents[0, 0], rollout.latents[1, 0])


def test_uniform_credit_makes_only_finished_images(backbone: Backbone, tiny_config: Config) -> None:
    uniform, finished = sample(backbone, tiny_config(credit={"rule": "uniform"}))
    gains, images = sample(backbone, tiny_config(credit={"rule": "gains"}))
    assert uniform.image_index.tolist() == [[0], [1], [2]]
    assert np.array_equal(finished, images[-3:])
    assert np.array_equal(uniform.latents, gains.latents)
    assert np.array_equal(uniform.log_probs, gains.log_probs)


@pytest.mark.parametrize("rule", ["tweedie", "ode", "schedule"])
def test_images_are_the_completions_of_their_points(backbone: Backbone, tiny_config: Config, rule: str) -> None:
    config = tiny_config(completion={"rule": rule, "substeps": 3})
    rollout, images = sample(backbone, config)
    policy = FlowPolicy(backbone, config.sampling, guidance=1.0)
    conditioning = policy.conditioning(PROMPT.text, "")
    with torch.no_grad():
        for index, k in enumerate(rollout.steps):
            latents, sigma = torch.from_numpy(rollout.latents[:, k].copy()), policy.sigmas[k].repeat(3)
            velocity = policy.velocity(latents, sigma, conditioning)
            clean = clean_estimate(latents=latents, velocity=velocity, sigma=sigma)
            if rule != "tweedie":
                clean = complete(
                    latents=latents,
                    first_velocity=velocity,
                    grid=stack_grids([substep_grid(config.completion, sigmas=policy.sigmas, k=k)], [3]),
                    velocity=lambda x, t: policy.velocity(x, t, conditioning),
                    solver=config.completion.solver,
                )
            expected = backbone.decode(clean).astype(int)
            assert np.abs(images[rollout.image_index[:, index]] - expected).max() <= 1
    final = backbone.decode(torch.from_numpy(rollout.latents[:, -1].copy())).astype(int)
    assert np.abs(images[rollout.image_index[:, -1]] - final).max() <= 1


def test_points_after_the_last_stochastic_step_are_not_completed(backbone: Backbone, tiny_config: Config) -> None:
    config = tiny_config(sampling={"steps": 6, "kernel": "ddim_sde", "first_step": "exclude", "std_min": 0.02})
    rollout, images = sample(backbone, config)
    assert rollout.steps == (1, 2, 3)
    assert np.array_equal(rollout.latents[0, 1], rollout.latents[2, 1]), "the excluded step is the same for all"
    assert len(images) == 1 + 3 + 3 + 3
    assert rollout.latents.shape == (3, 7, 4, 8, 8)
    assert rollout.image_index.shape == (3, 4)


def test_trajectories_chain_through_keyed_noise(backbone: Backbone, tiny_config: Config) -> None:
    config = tiny_config()
    rollout, _ = sample(backbone, config, first_member=1)
    policy = FlowPolicy(backbone, config.sampling, guidance=1.0)
    conditioning = policy.conditioning(PROMPT.text, "")
    key = {"seed": 7, "iteration": 1, "group": 2, "shape": (4, 8, 8)}
    assert np.array_equal(rollout.latents[0, 0], trajectory_noise(**key, members=[SHARED], step=INITIAL)[0].numpy())
    for k in range(4):
        latents = torch.from_numpy(rollout.latents[:, k].copy())
        with torch.no_grad():
            rows_per_state = 1 if k else 3
            transition, _ = policy.transition(latents, k, conditioning=conditioning, rows_per_state=rows_per_state)
        expected = transition.mean
        if k < 3:
            expected = transition.sample(trajectory_noise(**key, members=(1, 2, 3), step=k))
            log_prob = transition.log_prob(torch.from_numpy(rollout.latents[:, k + 1].copy()))
            assert np.array_equal(rollout.log_probs[:, k], log_prob.numpy())
        assert np.array_equal(rollout.latents[:, k + 1], expected.numpy())


def test_a_merged_step_leads_past_the_points_that_it_crosses(backbone: Backbone, tiny_config: Config) -> None:
    config = tiny_config(
        sampling={
            "steps": 6,
            "schedule": "linear",
            "merge_std": 0.5,
            "window": {"rule": "branch", "within": [0.0, 0.5]},
        },
        group={"size": 4, "shard": 2},
    )
    for first_member, k in ((0, 1), (2, 2)):
        rollout, _ = sample(backbone, config, first_member=first_member, members=2)
        policy = policy_of(backbone, config)
        conditioning = policy.conditioning(PROMPT.text, "")
        assert (rollout.steps, policy.span(k)) == ((k,), k)
        states = torch.from_numpy(rollout.latents.copy())
        assert torch.equal(states[0, k], states[1, k]), "one trunk"
        with torch.no_grad():
            transition, _ = policy.transition(states[:, k], k, conditioning=conditioning, rows_per_state=2)
            assert np.array_equal(rollout.log_probs[:, 0], transition.log_prob(states[:, k + 1]).numpy())
            for crossed in range(k + 1, k + policy.span(k) + 1):
                assert torch.equal(states[:, crossed], states[:, k + 1])
            after, _ = policy.transition(states[:, k + k], 2 * k, conditioning=conditioning, as_ode=True)
        assert torch.equal(after.mean, states[:, 2 * k + 1])


def test_a_trajectory_ends_once_at_each_granularity(backbone: Backbone, tiny_config: Config) -> None:
    """Behind step 1 of 8: the schedule's own steps, and 2 to 3, 3 to 5, 5 to 8; 2 to 3, 3 to 8 for granularity 4."""
    config = tiny_config(
        sampling={
            "steps": 8,
            "schedule": "linear",
            "window": {"rule": "branch", "within": [0.0, 0.5]},
            "granularities": [1, 2, 4],
        },
        group={"size": 4, "shard": 2},
        credit={"rule": "uniform"},
    )
    rollout, images = sample(backbone, config, members=2, iteration=1)
    assert rollout.steps == (1,)
    assert rollout.further_index is not None
    assert (rollout.image_index.tolist(), rollout.further_index.tolist(), len(images)) == (
        [[0], [1]],
        [[2, 4], [3, 5]],
        6,
    )
    assert rollout.facts().further_index is rollout.further_index
    policy = policy_of(backbone, config)
    conditioning = policy.conditioning(PROMPT.text, "")
    for points, shown in (((2, 3, 4, 5, 6, 7, 8), images[:2]), ((2, 3, 5, 8), images[2:4]), ((2, 3, 8), images[4:])):
        latents = torch.from_numpy(rollout.latents[:, 2].copy())
        for here, there in pairwise(points):
            with torch.no_grad():
                velocity = policy.velocity(latents, policy.sigmas[here].expand(2), conditioning)
            latents = latents - (policy.sigmas[here] - policy.sigmas[there]) * velocity
        assert np.abs(backbone.decode(latents).astype(int) - shown.astype(int)).max() <= 1
    assert len({image.tobytes() for image in images}) == 6


@pytest.mark.parametrize(
    ("tail", "forwards"),
    [
        ({"rule": "ode", "substeps": 2, "spacing": "schedule", "solver": "adams"}, 2),
        ({"rule": "ode", "substeps": 3, "spacing": "even", "solver": "euler"}, 3),
        ({"rule": "ode", "substeps": 2, "spacing": "even", "solver": "heun"}, 3),
        ({"rule": "schedule", "solver": "adams"}, 5),
        ({"rule": "tweedie"}, 1),
    ],
)
def test_a_tail_ends_a_trajectory_as_a_completion_of_its_last_noisy_point(
    backbone: Backbone, tiny_config: Config, tail: dict[str, Any], forwards: int
) -> None:
    """Steps 1 and 2 of 8 are stochastic. They are drawn as without a tail; what comes behind point 3 is the tail's."""
    window = {"rule": "fixed", "first": 1, "size": 2}
    plain = tiny_config(sampling={"steps": 8, "window": window})
    config = tiny_config(sampling={"steps": 8, "window": window, "tail": tail})
    (rollout, images), (longer, _) = (sample(backbone, each, members=2) for each in (config, plain))
    assert rollout.steps == longer.steps == (1, 2)
    assert np.array_equal(rollout.latents[:, :4], longer.latents[:, :4])
    assert rollout.log_probs is not None
    assert longer.log_probs is not None
    assert np.array_equal(rollout.log_probs, longer.log_probs)
    assert all(np.array_equal(rollout.latents[:, point], rollout.latents[:, 8]) for point in range(4, 8))

    policy = policy_of(backbone, config)
    conditioning = policy.conditioning(PROMPT.text, "")
    start = torch.from_numpy(rollout.latents[:, 3].copy())
    grid = substep_grid(config.sampling.tail, sigmas=policy.sigmas, k=3).expand(2, -1)
    asked = []

    def velocity(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        asked.append(len(latents))
        return policy.velocity(latents, sigma, conditioning)

    with torch.no_grad():
        first = velocity(start, grid[:, 0])
        clean = complete(
            latents=start, first_velocity=first, grid=grid, velocity=velocity, solver=config.sampling.tail.solver
        )
    assert asked == [2] * forwards
    assert torch.equal(torch.from_numpy(rollout.latents[:, 8].copy()), clean)
    assert np.array_equal(images[rollout.image_index[:, -1]], backbone.decode(clean))


def test_members_of_a_branch_share_states_and_noise_until_it_splits(backbone: Backbone, tiny_config: Config) -> None:
    """Splits at steps 0 and 2 of 6: six members go in three pairs from step 0 on, and alone from step 2 on."""
    config = tiny_config(
        sampling={"steps": 6, "splits": [0.0, 0.3]},
        group={"size": 6, "shard": 6},
        credit={"rule": "tree", "normalise": "per_step"},
        learner={"objective": "masked"},
    )
    rollout, images = sample(backbone, config, members=6)
    policy = policy_of(backbone, config)
    assert policy.strides(rollout.steps) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
    assert (rollout.image_index.tolist(), len(images)) == ([[row] for row in range(6)], 6)
    different = [len({state.tobytes() for state in rollout.latents[:, point]}) for point in range(7)]
    assert different == [1, 3, 3, 6, 6, 6, 6]
    assert rollout.means is not None
    assert [len({row.tobytes() for row in rollout.log_probs[:, column]}) for column in (1, 2)] == [3, 6]
    key = {"seed": 7, "iteration": 1, "group": 2, "shape": (4, 8, 8)}
    conditioning = policy.conditioning(PROMPT.text, "")
    for k, leaders, rows_per_state in ((0, [0, 2, 4], 3), (1, [0, 2, 4], 1), (2, [0, 1, 2, 3, 4, 5], 2)):
        assert policy.rows_per_state(k, rollout.steps, len(leaders)) == rows_per_state
        with torch.no_grad():
            transition, _ = policy.transition(
                torch.from_numpy(rollout.latents[leaders, k].copy()),
                k,
                conditioning=conditioning,
                rows_per_state=rows_per_state,
            )
        expected = transition.sample(trajectory_noise(**key, members=leaders, step=k))
        assert np.array_equal(rollout.latents[leaders, k + 1], expected.numpy())
        assert np.array_equal(rollout.means[leaders, k], transition.mean.numpy())


def test_the_same_request_gives_the_same_bits_whatever_was_drawn_before(
    backbone: Backbone, tiny_config: Config
) -> None:
    config = tiny_config(model={"guidance": 2.0})
    rollout, images = sample(backbone, config)
    sample(backbone, config, first_member=3, group=5)
    again, same_images = sample(backbone, config)
    assert np.array_equal(rollout.latents, again.latents)
    assert np.array_equal(rollout.log_probs, again.log_probs)
    assert np.array_equal(images, same_images)


def test_a_member_is_the_same_in_another_shard_up_to_rounding(backbone: Backbone, tiny_config: Config) -> None:
    whole, _ = sample(backbone, tiny_config(), members=4)
    part, _ = sample(backbone, tiny_config(), first_member=2, members=2)
    np.testing.assert_allclose(part.latents, whole.latents[2:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("changes", [{"iteration": 9}, {"group": 9}, {"first_member": 9}])
def test_other_positions_in_the_run_draw_other_trajectories(
    backbone: Backbone, tiny_config: Config, changes: dict[str, int]
) -> None:
    config = tiny_config(sampling={"shared_noise": False})
    assert not np.array_equal(
        sample(backbone, config)[0].latents[:, 0], sample(backbone, config, **changes)[0].latents[:, 0]
    )


def test_nan_from_the_model_stops_the_shard_and_the_drawing(tiny_sd3: Path, tiny_config: Config) -> None:
    broken = load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=2))
    with torch.no_grad():
        next(iter(broken.transformer.parameters())).fill_(float("nan"))
    config = tiny_config()
    with pytest.raises(NonFiniteError, match="group 2 in iteration 1"):
        sample(broken, config)
    policy = FlowPolicy(broken, config.sampling, guidance=1.0)
    with pytest.raises(NonFiniteError, match="adapter version 5"):
        generate(
            policy,
            GenerateRequest(prompts=(PROMPT,), numbers=(0,), seed=0, steps=2, adapter_version=5, adapter_digest=""),
        )


def adapter(config: RunConfig, *, seed: int, version: int) -> Adapter:
    backbone = load_backbone(config.model)
    return Lora(backbone.transformer, config.model.lora, seed=seed).export(version=version)


def test_a_rollout_policy_draws_only_with_the_weights_that_a_request_names(tiny_config: Config) -> None:
    config = tiny_config(group={"max_lag": 1})
    versions = [adapter(config, seed=seed, version=seed) for seed in range(3)]
    policy = RolloutPolicy(config)
    for weights in versions:
        assert policy.receive(weights) == (weights.version, weights.digest)
    newest = policy.rollout(request(adapter_version=2, adapter_digest=versions[2].digest))[1]
    held = policy.rollout(request(adapter_version=1, adapter_digest=versions[1].digest))[1]
    assert (newest.request.adapter_version, held.request.adapter_version) == (2, 1)
    with pytest.raises(StaleAdapterError, match="version 0"):
        policy.rollout(request(adapter_version=0, adapter_digest=versions[0].digest))
    with pytest.raises(StaleAdapterError, match="version 2"):
        policy.rollout(request(adapter_version=2, adapter_digest=versions[1].digest))


def changed(lora: Lora) -> Adapter:
    """An adapter that changes every velocity."""
    arrays = {name: 0.3 * normal(name, shape=tuple(p.shape)).numpy() for name, p in lora.parameters.items()}
    return Adapter(version=4, arrays=arrays, digest=digest_of(arrays))


class Watched(FlowPolicy):
    """A policy that keeps what it was asked for and what it answered."""

    def velocity(self, latents: Any, sigma: Any, conditioning: Any) -> Any:
        answer = super().velocity(latents, sigma, conditioning)
        self.asked = [*getattr(self, "asked", []), (latents, sigma, conditioning, answer)]
        return answer


@pytest.mark.parametrize(("guidance", "first"), [(1.0, 1), (4.5, 3)])
def test_the_adapter_takes_the_first_steps_and_the_base_model_the_others(
    backbone: Backbone, tiny_config: Config, guidance: float, first: int
) -> None:
    config = tiny_config()
    adapted = load_backbone(config.model)
    lora = Lora(adapted.transformer, config.model.lora, seed=1)
    lora.load(changed(lora))
    base, trained = (FlowPolicy(each, config.sampling, guidance=guidance) for each in (backbone, adapted))
    mixed = Watched(adapted, config.sampling, guidance=guidance)
    request = GenerateRequest(
        prompts=(PROMPT,) * 2,
        numbers=(0, 1),
        seed=3,
        steps=5,
        adapter_version=4,
        adapter_digest="",
        adapter_steps=first,
    )
    images = generate(mixed, request, lora)
    assert len(mixed.asked) == 5
    with torch.inference_mode():
        for k, (latents, sigma, conditioning, velocity) in enumerate(mixed.asked):
            by_base, by_adapter = (each.velocity(latents, sigma, conditioning) for each in (base, trained))
            assert not torch.equal(by_base, by_adapter)
            assert torch.equal(velocity, by_adapter if k < first else by_base)
    everywhere, nowhere = (generate(each, replace(request, adapter_steps=None)) for each in (trained, base))
    assert not np.array_equal(images, everywhere)
    assert not np.array_equal(images, nowhere)
    assert np.array_equal(generate(trained, replace(request, adapter_steps=5), lora), everywhere)


def test_an_actor_s_next_request_has_its_adapter_again(tiny_config: Config) -> None:
    config = tiny_config()
    policy = RolloutPolicy(config)
    weights = changed(Lora(load_backbone(config.model).transformer, config.model.lora, seed=1))
    policy.receive(weights)
    whole = GenerateRequest(
        prompts=(PROMPT,), numbers=(0,), seed=3, steps=4, adapter_version=4, adapter_digest=weights.digest
    )
    _, before = policy.generate(whole)
    _, mixed = policy.generate(replace(whole, adapter_steps=2))
    assert not np.array_equal(mixed, before)
    assert np.array_equal(policy.generate(whole)[1], before)


def test_steps_of_the_base_model_need_the_adapter_that_is_switched_off(backbone: Backbone, tiny_config: Config) -> None:
    request = GenerateRequest(
        prompts=(PROMPT,), numbers=(0,), seed=3, steps=4, adapter_version=0, adapter_digest="", adapter_steps=2
    )
    with pytest.raises(ContractError, match="`lora`, got none"):
        generate(policy_of(backbone, tiny_config()), request)


@pytest.mark.parametrize(
    "window", [{"rule": "fixed", "first": 1, "size": 2}, {"rule": "random", "size": 1, "within": [0, 0.75]}]
)
def test_outside_the_window_a_trajectory_is_the_ode_s(
    backbone: Backbone, tiny_config: Config, window: dict[str, Any]
) -> None:
    config = tiny_config(sampling={"steps": 5, "window": window})
    rollout, images = sample(backbone, config)
    policy = FlowPolicy(backbone, config.sampling, guidance=1.0)
    assert rollout.steps == policy.steps_of(seed=7, iteration=1, group=0, shard=0)
    assert rollout.log_probs.shape == (3, len(rollout.steps))
    conditioning = policy.conditioning(PROMPT.text, "")
    for k in range(5):
        rows = 1 if k < rollout.steps[0] else 3
        latents = torch.from_numpy(rollout.latents[:rows, k].copy())
        with torch.no_grad():
            velocity = policy.velocity(latents, policy.sigmas[k].expand(rows), conditioning)
        euler = latents - (policy.sigmas[k] - policy.sigmas[k + 1]) * velocity
        assert np.array_equal(rollout.latents[:rows, k + 1], euler.numpy()) == (k not in rollout.steps)
    first = rollout.steps[0]
    way = rollout.latents[:, first]
    assert np.array_equal(way[0], way[2]), "the way to the window is one row's"
    assert not np.array_equal(rollout.latents[0, first + 1], rollout.latents[2, first + 1])
    assert len(images) == 1 + 3 * len(rollout.steps)


def test_only_the_first_shard_of_a_group_shows_the_point_that_all_share(
    backbone: Backbone, tiny_config: Config
) -> None:
    config = tiny_config()
    first, images = sample(backbone, config, members=2)
    second, others = sample(backbone, config, first_member=2, members=2)
    assert first.image_index.tolist() == [[0, 1, 3, 5], [0, 2, 4, 6]]
    assert second.image_index.tolist() == [[-1, 0, 2, 4], [-1, 1, 3, 5]]
    assert (len(images), len(others)) == (7, 6)


def test_every_second_point_is_completed(backbone: Backbone, tiny_config: Config) -> None:
    """Skipped points have no image; trajectories and the other images are what they are without a skipped point."""
    all_points, images = sample(backbone, tiny_config())
    some, fewer = sample(backbone, tiny_config(completion={"every": 2}))
    assert some.image_index.tolist() == [[0, NO_IMAGE, 1, 4], [0, NO_IMAGE, 2, 5], [0, NO_IMAGE, 3, 6]]
    assert np.array_equal(some.latents, all_points.latents)
    for column in (0, 2, 3):
        both = (taken[held.image_index[:, column]].astype(int) for taken, held in ((images, all_points), (fewer, some)))
        assert np.abs(np.subtract(*both)).max() <= 1
    second, _ = sample(backbone, tiny_config(completion={"every": 2}), first_member=3)
    assert second.image_index.tolist() == [[COMMON_IMAGE, NO_IMAGE, k, k + 3] for k in range(3)]
    own, _ = sample(backbone, tiny_config(completion={"every": 9}, sampling={"shared_noise": False}))
    assert own.image_index.tolist() == [[k, NO_IMAGE, NO_IMAGE, k + 3] for k in range(3)]


@pytest.mark.parametrize(
    ("changes", "scored"),
    [
        ({"completion": {"every": 2}}, [0, 2]),
        ({"credit": {"rule": "uniform"}}, []),
        ({"credit": {"rule": "tree"}, "sampling": {"splits": [0.5]}}, []),
    ],
    ids=["every second point", "finished images", "pairs"],
)
def test_an_excerpt_shows_tweedies_estimate_where_a_point_is_not_scored(
    backbone: Backbone, tiny_config: Config, changes: dict[str, Any], scored: list[int]
) -> None:
    config = tiny_config(**changes)
    rollout, images = sample(backbone, config, iteration=0, group=0, members=4)
    excerpt = excerpt_of(rollout, images, members=2)
    assert excerpt.images.shape == (2, 4, 16, 16, 3)
    assert excerpt.skipped == tuple(k for column, k in enumerate(rollout.steps) if column not in scored)
    assert np.array_equal(excerpt.images[:, -1], images[rollout.image_index[:2, -1]])
    policy = policy_of(backbone, config)
    conditioning = policy.conditioning("a red circle", "")
    for column, k in enumerate(rollout.steps):
        if column in scored:
            expected = images[rollout.image_index[:2, column]]
        else:
            latents, sigma = torch.from_numpy(rollout.latents[:2, k].copy()), policy.sigmas[k]
            velocity = policy.velocity(latents, sigma.expand(2), conditioning)
            expected = backbone.decode(latents - sigma * velocity)
        assert np.abs(np.subtract(excerpt.images[:, column], expected, dtype=np.int64)).max() <= 1
    estimates = excerpt.images[:, [column for column in range(3) if column not in scored]]
    assert len(np.unique(estimates)) > 10, "the images are not blank"


def test_previews_are_made_for_recorded_shards_only_and_change_nothing_else(
    backbone: Backbone, tiny_config: Config
) -> None:
    on, off = (tiny_config(status={"trajectories": count, "trajectories_every": 3}) for count in (2, 0))
    first = {"iteration": 0, "group": 0}
    recorded, images = sample(backbone, on, **first)
    plain, others = sample(backbone, off, **first)
    assert recorded.previews is not None and recorded.previews.shape == (2, 3, 16, 16, 3)
    assert plain.previews is None
    assert np.array_equal(images, others) and np.array_equal(recorded.latents, plain.latents)
    assert recorded.facts().finals == plain.facts().finals
    elsewhere = ({"iteration": 2}, {"iteration": 1}, {"group": 1}, {"first_member": 3})
    made = [sample(backbone, on, **first | changes)[0].previews is not None for changes in elsewhere]
    assert made == [True, False, False, False]
    with pytest.raises(ContractError, match="must have previews, got none"):
        excerpt_of(plain, others, members=2)


def test_a_preview_that_overflows_the_vae_costs_the_record_and_not_the_shard(
    backbone: Backbone, tiny_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    class Overflows:
        """A backbone that decodes finished images and no other estimates."""

        def __getattr__(self, name: str) -> Any:
            return getattr(backbone, name)

        def decode(self, latents: torch.Tensor, *, points: int = 0) -> np.ndarray:
            if points == len(latents):
                raise NonFiniteError("the VAE overflows")
            return backbone.decode(latents, points=points)

    shard, images = sample(Overflows(), tiny_config(credit={"rule": "uniform"}), iteration=0, group=0)
    assert (shard.previews, len(images)) == (None, 3)
    assert "cannot be decoded: the VAE overflows" in caplog.text


def test_images_that_were_decoded_again_are_part_of_the_shard_s_work(backbone: Backbone, tiny_config: Config) -> None:
    class Repeats:
        """A backbone that decodes two images of each call again."""

        decoded_again = 5

        def __getattr__(self, name: str) -> Any:
            return getattr(backbone, name)

        def decode(self, latents: torch.Tensor, *, points: int = 0) -> np.ndarray:
            self.decoded_again += 2
            return backbone.decode(latents, points=points)

    def work(model: Any) -> dict[str, float]:
        config, meter = tiny_config(credit={"rule": "uniform"}), Meter()
        rollout_shard(policy_of(model, config), request(iteration=1), config, meter)
        return meter.read()

    assert work(Repeats())["work/images_decoded_again"] == 2
    assert "work/images_decoded_again" not in work(backbone)


def test_a_shard_of_one_step_that_shares_its_point_shows_the_finished_images_only(
    backbone: Backbone, tiny_config: Config
) -> None:
    config = tiny_config(sampling={"window": {"rule": "fixed", "first": 1, "size": 1}})
    rollout, images = sample(backbone, config, first_member=2, members=2)
    assert rollout.image_index.tolist() == [[-1, 0], [-1, 1]]
    assert len(images) == 2


def test_branches_share_their_trunk_and_complete_their_own_point(backbone: Backbone, tiny_config: Config) -> None:
    config = tiny_config(sampling={"window": {"rule": "branch"}})
    shards = [sample(backbone, config, first_member=first, members=2, iteration=0)[0] for first in (0, 2, 4)]
    assert [shard.steps for shard in shards] == [(0,), (1,), (2,)]
    assert np.array_equal(shards[1].latents[0, 1], shards[2].latents[1, 1])
    larger, _ = sample(backbone, config, first_member=4, members=4, iteration=0)
    assert larger.steps == (1,)
    assert np.array_equal(larger.latents[3, 1], shards[1].latents[0, 1]), "whatever the shard's size"
    assert all(shard.image_index.tolist() == [[0, 1], [0, 2]] for shard in shards)


def test_a_bound_on_the_batch_gives_the_same_images(backbone: Backbone, tiny_config: Config) -> None:
    whole = sample(backbone, tiny_config(completion={"rule": "schedule"}))[1].astype(int)
    config = tiny_config(completion={"rule": "schedule"}, model={"forward_batch": 4, "decode_batch": 3})
    parts = sample(load_backbone(config.model), config)[1].astype(int)
    assert np.abs(whole - parts).max() <= 1


@pytest.mark.parametrize(("guidance", "shared_noise"), [(1.0, False), (3.0, True)])
def test_without_noise_every_completed_point_is_the_finished_image(
    backbone: Backbone, tiny_config: Config, guidance: float, shared_noise: bool
) -> None:
    """Completing from the trajectory's own latents, not from another draw: the gains of a quiet trajectory are 0."""
    config = tiny_config(
        model={"guidance": guidance},
        sampling={"kernel": "dance_sde", "noise_level": 1e-6, "std_min": 0.0, "shared_noise": shared_noise},
        completion={"rule": "schedule", "solver": "euler"},
    )
    rollout, images = sample(backbone, config)
    shown = images.astype(int)[rollout.image_index]
    assert np.abs(shown - shown[:, -1:]).max() <= 1
    between = np.abs(shown[0, -1] - shown[1, -1]).max()
    assert between <= 1 if shared_noise else between > 1


def test_means_come_along_for_the_objectives_that_need_them(backbone: Backbone, tiny_config: Config) -> None:
    plain, _ = sample(backbone, tiny_config())
    assert plain.means is None
    guarded, _ = sample(backbone, tiny_config(learner={"objective": "guarded"}))
    assert guarded.means is not None
    noise = trajectory_noise(seed=7, iteration=1, group=2, members=(0, 1, 2), step=1, shape=(4, 8, 8)).numpy()
    policy = FlowPolicy(backbone, tiny_config().sampling, guidance=1.0)
    np.testing.assert_allclose(guarded.means[:, 1] + policy.std(1) * noise, guarded.latents[:, 2], rtol=0, atol=1e-5)

"""What `train --dry-run` says a run needs and takes, with worked numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.tools.estimate import GIB, Estimate, estimate, recounted
from deploy.tools.memory import RoleMemory
from deploy.tools.planning.plan import (
    REST,
    aligned,
    difference_lines,
    disk_lines,
    method_lines,
    node_needs,
    plan_lines,
    plan_of,
    size_text,
    time_text,
)
from protocol.config.run import RunConfig
from tests.support.runs.balance import COUNTS, config_of

Config = Callable[..., RunConfig]
FOUND = Estimate(
    evaluations=COUNTS, rollout={"transformer": GIB}, learner={"transformer": GIB}, trained=10**6, evaluation_flops=2e13
)
"""1,200 forwards of 2 TFLOP in rollout, 2,400 in the update, 12 groups of one shard."""


def seconds(config: RunConfig, found: Estimate = FOUND, *, heldout: int = 0) -> tuple[dict[str, float], float]:
    plan = plan_of(config, found, heldout=heldout, tflops=200)
    return dict(plan.parts), plan.iteration


def test_an_iteration_is_its_parts_and_a_rest(tiny_config: Config) -> None:
    parts, iteration = seconds(config_of(tiny_config, actors=5, workers=1))
    assert parts == pytest.approx(
        {"rollout": 3.0, "decoding": 0.0, "scoring": 0.0, "update": 24.0, "rest": 27 * REST / (1 - REST)}
    ), "3 of 12 shards on one actor, each of 100 forwards of 0.01 s"
    assert iteration == pytest.approx(27 / (1 - REST))


def test_sides_at_the_same_time_take_as_long_as_the_slower_one(tiny_config: Config) -> None:
    found = replace(FOUND, evaluations=replace(COUNTS, decoding_flops=4e15))
    parts, iteration = seconds(config_of(tiny_config, actors=5, workers=1, lag=1), found)
    assert (parts["rollout"], parts["decoding"]) == pytest.approx((3.0, 4.0)), "20 s of one GPU, shared by five"
    assert iteration == pytest.approx(24 / (1 - REST))


def test_scoring_beside_the_images_adds_only_what_is_longer(tiny_config: Config) -> None:
    plain = config_of(tiny_config, actors=12, workers=1)
    ocr = {"ocr": {"scorer": "ocr", "actors": 1}}
    config = plain.model_copy(
        update={"rewards": type(plain).model_validate({**plain.model_dump(), "rewards": ocr}).rewards}
    )
    found = replace(FOUND, evaluations=replace(COUNTS, images=100), image=512 * 512 * 3)
    parts, _ = seconds(config, found)
    assert parts["scoring"] == pytest.approx(11.0 - 1.0), "100 images of 0.11 s, while images are made for one second"


def test_evaluations_at_the_start_on_the_way_and_at_the_end_count(tiny_config: Config) -> None:
    config = config_of(tiny_config, actors=5, workers=1)
    asked = config.evaluation.model_copy(update={"every": 4, "images_per_prompt": 2})
    config = config.model_copy(update={"evaluation": asked, "iterations": 10})
    plan = plan_of(config, FOUND, heldout=25, tflops=200)
    assert plan.evaluations == 4, "at 0, 4, 8 and 10"
    assert plan.evaluation == pytest.approx(50 * 0.1 / 5 / (1 - REST)), "50 images of 20 TFLOP on five actors"
    assert plan.wall == pytest.approx(10 * plan.iteration + 4 * plan.evaluation)


def test_a_node_holds_its_part_of_every_role(tiny_config: Config) -> None:
    roles = [
        RoleMemory(role="rollout actor", gpu={}, host={"process": 3}, count=16),
        RoleMemory(role="driver", gpu={}, host={"process": 5}),
        RoleMemory(role="object store", gpu={}, host={"images": 100}),
    ]
    bundles: dict[str, Any] = {"layout": "colocated", "rollout_actors": 16, "rollout": {"gpus": 0.5}}
    config = tiny_config(cluster={**bundles, "learner": {"workers": 16, "gpus": 0.5}}, learner={"lanes": 16})
    assert node_needs(config, roles) == (2, 8 * 3 + 5 + 50)
    assert node_needs(tiny_config(), roles) == (1, 16 * 3 + 5 + 100)


def test_the_cache_holds_only_prompts_that_the_run_draws(tiny_config: Config) -> None:
    config = tiny_config(model={"embedding_cache": "somewhere"}, iterations=3, group={"per_iteration": 4, "size": 2})
    (checkpoints, cache) = disk_lines(config, replace(FOUND, embedding=GIB), prompts=1000, heldout=8)
    assert checkpoints == "disk, run folder: 4 checkpoints of 11 MiB take 46 MiB", (
        "adapter and two moments; 3 and the best"
    )
    assert cache.endswith("20 prompts of at most 1.0 GiB take at most 20.0 GiB")


def test_the_lines_are_for_people(tiny_config: Config) -> None:
    config = config_of(tiny_config, actors=5, workers=1)
    without = list(plan_lines(config, FOUND, prompts=3, heldout=2))
    assert not any("TFLOP" in line or "the run:" in line for line in without)
    lines = list(plan_lines(config, FOUND, prompts=3, heldout=2, tflops=200))
    assert lines[: len(without)] == without
    assert lines[-1].startswith("the run: 2 iterations, 192 images to learn from, ")
    assert not any("e+" in line for line in lines)
    assert [time_text(each) for each in (0, 0.004, 8.04, 100, 1620, 11000, 200000)] == [
        "0.0 s", "0.004 s", "8.0 s", "100.0 s", "27.0 min", "3.1 h", "2.3 days",
    ]  # fmt: skip
    assert [size_text(each) for each in (2**21, 50 * 2**20, 3 * 2**29, 2000 * GIB)] == [
        "2 MiB", "50 MiB", "1.5 GiB", "2,000 GiB",
    ]  # fmt: skip
    assert list(aligned([("a", "1", "x"), ("bb", "22", "yy")], words=(0, 2))) == ["a    1  x", "bb  22  yy"]


def test_methods_are_compared_at_the_same_scale_and_every_key_that_differs_is_listed(tiny_config: Config) -> None:
    half = {"dtype": "bfloat16"}  # in float32 each forward also merges weights, however many rows it has
    config = tiny_config(model=half, cluster={"rollout": {"gpus": 1}, "learner": {"gpus": 1}})
    found = estimate(config)
    plain = {"credit": {"rule": "uniform", "step_weights": {"rule": "none"}}}
    other = tiny_config(model=half, cluster={"rollout": {"gpus": 1}, "learner": {"gpus": 1}}, **plain)
    assert recounted(other, found).evaluations == estimate(other).evaluations
    head, mine, theirs = method_lines(config, found, {"plain": other}, heldout=2, tflops=1)
    assert head.split() == ["the", "run", "by", "other", "methods", "images", "scored", "an", "iteration", "GPU-hours"]
    assert mine.split()[:3] == ["as", "configured", str(found.evaluations.images)]
    assert theirs.split()[:2] == ["plain", str(found.evaluations.trajectories)], "no point is scored"
    keys = [line.split()[0] for line in difference_lines(config, "plain", other)]
    flat, plain_flat = config.flat_fields(), other.flat_fields()
    assert keys[1:] == sorted(key for key in flat if flat[key] != plain_flat[key])
    assert not list(difference_lines(config, "same", config))[1:]

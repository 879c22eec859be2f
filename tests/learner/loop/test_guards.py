"""Each guard stops a run by its rule, with its name, and says nothing while the rule is kept."""

from typing import Any

import numpy as np
import pytest

from learner.loop.guards import Guards, adapter_metrics, guards_of
from protocol.errors import GuardError
from protocol.messages import Adapter
from tests.support.runs.sinks import Said

GOOD = {
    "group/zero_variance": 0.2,
    "group/duplicates": 0.0,
    "train/first_ratio_deviation": 0.0,
    "train/approx_kl": 1e-5,
    "train/ratio_mean": 1.0001,
}


def an_adapter(b: float = 0.1) -> Adapter:
    arrays = {"q.lora_A.weight": np.ones((2, 3), np.float32), "q.lora_B.weight": np.full((3, 2), b, np.float32)}
    return Adapter(version=1, arrays=arrays, digest="d")


def run(config: Any, *iterations: tuple[dict[str, float], Adapter]) -> Said:
    said = Said()
    guards = Guards(config, said)
    for number, (metrics, adapter) in enumerate(iterations, 1):
        guards.check(number, GOOD | metrics, adapter)
    return said


def test_a_healthy_run_is_left_alone(tiny_config):
    assert run(tiny_config(), *[({}, an_adapter())] * 30).conditions == []


@pytest.mark.parametrize(
    ("metrics", "adapter", "name"),
    [
        ({"group/duplicates": 1.0}, an_adapter(), "distinct_members"),
        ({"train/first_ratio_deviation": 2e-4}, an_adapter(), "exact_replay"),
        ({"train/first_ratio_deviation": float("nan")}, an_adapter(), "exact_replay"),
        ({"train/approx_kl": 0.2}, an_adapter(), "approx_kl"),
        ({"train/approx_kl": float("nan")}, an_adapter(), "approx_kl"),
        ({"train/ratio_mean": 1.6}, an_adapter(), "ratio"),
        ({"train/ratio_mean": 0.4}, an_adapter(), "ratio"),
        ({}, an_adapter(float("nan")), "finite_adapter"),
        ({}, an_adapter(float("inf")), "finite_adapter"),
    ],
)
def test_a_broken_rule_stops_the_run_with_the_guard_s_name(tiny_config, metrics, adapter, name):
    said = Said()
    guards = Guards(tiny_config(), said)
    guards.check(1, GOOD, an_adapter())
    with pytest.raises(GuardError, match=f"guard {name}: .* at iteration 2.*; "):
        guards.check(2, GOOD | metrics, adapter)
    ((kind, holds, _, _),) = said.conditions
    assert (kind, holds) == (f"Guard/{name}", False)


def test_an_adapter_whose_b_stays_zero_stops_the_run_after_its_patience(tiny_config):
    config = tiny_config(guards={"idle_iterations": 3})
    idle = ({}, an_adapter(0.0))
    with pytest.raises(GuardError, match=r"guard adapter_learns: .*at iteration 3 \(in 3 of 3 iterations in a row\)"):
        run(config, idle, idle, idle)
    nothing_to_learn = ({"group/zero_variance": 1.0}, an_adapter(0.0))
    assert run(config, *[nothing_to_learn] * 5).conditions[0].type == "Guard/contrast"


def test_iterations_without_contrast_stop_the_run_only_in_a_row(tiny_config):
    config = tiny_config(guards={"zero_variance_iterations": 3})
    flat, good = ({"group/zero_variance": 1.0}, an_adapter()), ({}, an_adapter())
    said = run(config, flat, flat, good, flat, flat, good)
    assert [each.holds for each in said.conditions] == [False, False, True, False, False, True]
    with pytest.raises(GuardError, match="guard contrast"):
        run(config, flat, good, flat, flat, flat)


def test_with_lag_the_first_ratio_may_differ_from_one(tiny_config):
    assert "exact_replay" in [guard.name for guard in guards_of(tiny_config())]
    lagging = tiny_config(group={"max_lag": 1})
    assert "exact_replay" not in [guard.name for guard in guards_of(lagging)]


def test_rules_that_only_warn_leave_the_run_going(tiny_config):
    """Zeros in the gradient obey their rule again; that an image was decoded twice stays said, once a run."""
    zeros, again = {"train/zero_gradients": 0.2}, {"work/images_decoded_again": 3.0}
    half = tiny_config(model=tiny_config().model.model_dump() | {"dtype": "float16"})
    said = run(half, (zeros, an_adapter()), (again | {"train/zero_gradients": 0.03}, an_adapter()), ({}, an_adapter()))
    assert [(each.type, each.holds) for each in said.conditions] == [
        ("Guard/whole_gradient", False),
        ("Guard/whole_gradient", True),
        ("Guard/vae_range", False),
    ]
    assert "got 0.2 at iteration 1; train with model.dtype=bfloat16" in said.conditions[0].message
    assert "got 3 at iteration 2" in said.conditions[2].message
    assert run(tiny_config(), (zeros, an_adapter())).conditions == []


def test_numbers_of_the_adapter():
    adapter = an_adapter(0.0)
    assert adapter_metrics(adapter, had_contrast=True) == {"adapter/not_finite": 0.0, "adapter/idle": 1.0}
    assert adapter_metrics(adapter, had_contrast=False) == {"adapter/not_finite": 0.0}
    assert adapter_metrics(an_adapter(float("nan")), had_contrast=True)["adapter/not_finite"] == 6.0


def test_velocities_longer_than_the_reference_s_warn_and_do_not_stop(tiny_config):
    (guard,) = (guard for guard in guards_of(tiny_config()) if guard.name == "velocity_norm")
    assert (guard.metric, guard.patience) == ("train/velocity_norm_ratio_mean", None)
    assert [guard.is_broken(value) for value in (0.9, 1.05, 1.06)] == [False, False, True]


def test_the_remedy_for_equal_members_names_noise_only_where_there_is_some(tiny_config):
    ode = {"sampling": {"kernel": "ode", "shared_noise": False}, "learner": {"objective": "nft"}}
    ode["credit"] = {"rule": "uniform", "step_weights": {"rule": "none"}}
    told = {
        name: next(guard.remedy for guard in guards_of(tiny_config(**sections)) if guard.name == "distinct_members")
        for name, sections in (("sde", {}), ("ode", ode))
    }
    assert "raise sampling.noise_level" in told["sde"]
    assert "noise_level" not in told["ode"]

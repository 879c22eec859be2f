"""Learner and rollout agree bit for bit: as long as the adapter is the same, every ratio is exactly 1.

The first test compares the log-probs of every kernel with every window, guidance and precision. The second one sends
whole groups through the learner, in every layout and with every memory option; every method is in `test_workers.py`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel

from flow.models.contract import Backbone
from flow.policy import build_policy, policy_of
from flow.rollout import RolloutPolicy, rollout_shard
from learner.update.learner import Learner
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.config.sampling import SamplingConfig, WindowConfig
from protocol.messages import LearnerState, Prompt, ShardRequest
from tests.support.learning.groups import far_from_fresh, iterate, log_probs_of, require_exact_ratios
from tests.support.pairwise import pairwise

Config = Callable[..., RunConfig]
PROMPT = Prompt(index=1, text="two blue squares", negative="photo")


def choices(section: type[BaseModel], key: str) -> tuple[str, ...]:
    """What the config offers for a key."""
    return get_args(section.model_fields[key].annotation)


KERNELS = [
    *({"kernel": kernel} for kernel in choices(SamplingConfig, "kernel") if kernel != "ode"),
    {"kernel": "cps", "log_prob": "squared"},
    {"kernel": "ddim_sde", "first_step": "exclude"},
    {"kernel": "dance_sde", "noise_levels": [0.9, 0.5, 0.2]},
]


@pytest.fixture(scope="module")
def backbones(request: pytest.FixtureRequest, tiny_config: Config, device: str) -> tuple[str, Backbone, Backbone]:
    """A precision, and in it the learner's backbone and a rollout actor's, with one adapter that is far from fresh."""
    config = tiny_config(model={"dtype": request.param})
    (ours, our_lora), (theirs, their_lora) = (build_policy(config, device=device) for _ in range(2))
    adapter = far_from_fresh(our_lora.export(version=0))
    for lora in (our_lora, their_lora):
        lora.load(adapter)
    return request.param, ours.backbone, theirs.backbone


@pytest.mark.parametrize(
    ("backbones", "kernel", "window", "guidance"),
    pairwise(
        dtype=choices(ModelConfig, "dtype"), kernel=KERNELS, window=choices(WindowConfig, "rule"), guidance=(1.0, 3.0)
    ),
    indirect=["backbones"],
)
def test_log_probs_are_replayed_bit_for_bit(
    backbones: tuple[str, Backbone, Backbone],
    tiny_config: Config,
    kernel: dict[str, Any],
    window: str,
    guidance: float,
) -> None:
    dtype, ours, theirs = backbones
    size = 1 if window == "spread" and "exclude" in kernel.values() else 2
    config = tiny_config(
        model={"dtype": dtype, "guidance": guidance},
        sampling=kernel | {"window": {"rule": window, "size": size, "within": [0.0, 0.75]}},
        credit={"rule": "uniform"},
    )
    request = ShardRequest(
        iteration=1, group=1, prompt=PROMPT, first_member=2, members=2, adapter_version=0, adapter_digest=""
    )
    rollout, _ = rollout_shard(policy_of(theirs, config), request, config)
    assert rollout.log_probs is not None
    assert np.array_equal(log_probs_of(policy_of(ours, config), rollout).numpy(), rollout.log_probs)


UPDATES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "uniform credit, own noise": {"credit": {"rule": "uniform"}, "sampling": {"shared_noise": False}},
        "shards of one": {"group": {"shard": 1, "size": 3}},
        "one shard": {"group": {"shard": 4}},
        "bfloat16, guided, checkpointed": {
            "model": {"dtype": "bfloat16", "guidance": 3.0, "gradient_checkpointing": True}
        },
        "cut forwards, guided, bfloat16": {"model": {"forward_batch": 2, "guidance": 3.0, "dtype": "bfloat16"}},
        "shifted once": {"sampling": {"schedule": "shifted"}},
        "a window with a short tail": {
            "sampling": {
                "steps": 6,
                "window": {"rule": "random", "size": 2, "within": [0.0, 0.5]},
                "tail": {"rule": "ode", "substeps": 2},
            },
        },
        "merged steps": {
            "sampling": {
                "steps": 6,
                "schedule": "linear",
                "merge_std": 0.5,
                "window": {"rule": "branch", "within": [0.0, 0.5]},
            },
            "credit": {"rule": "uniform", "normalise": "per_step"},
            "learner": {"kl": {"weight": 0.1, "rule": "no_dt"}},
        },
        "trees, the last one smaller": {
            "sampling": {"steps": 6, "splits": [0.0, 0.3]},
            "group": {"size": 6, "shard": 6},
            "credit": {"rule": "tree", "normalise": "per_step"},
            "learner": {"objective": "guarded"},
        },
        "trees, cut forwards": {
            "model": {"forward_batch": 2},
            "sampling": {"steps": 6, "splits": [0.3, 0.5]},
            "group": {"size": 7, "shard": 7},
            "credit": {"rule": "tree", "normalise": "per_step"},
        },
        "pairs that part in a window": {
            "sampling": {
                "steps": 6,
                "splits": [0.6],
                "window": {"rule": "random", "size": 3, "within": [0.0, 0.8]},
            },
            "group": {"size": 6, "shard": 6},
            "credit": {"rule": "tree", "normalise": "per_step"},
        },
        "guided turning points": {
            "model": {"guidance": 3.0},
            "credit": {"rule": "turning_point", "normalise": "per_step"},
            "completion": {"rule": "schedule"},
        },
        "one step, the state of all": {
            "sampling": {"window": {"rule": "random", "size": 1, "within": [0.0, 0.75]}},
            "group": {"shard": 4},
            "learner": {"probe_every": 0},
        },
        "several updates and epochs": {"learner": {"updates_per_iteration": 2, "epochs": 3, "learning_rate": 1e-2}},
        "cut forwards, schedule": {"model": {"forward_batch": 1}, "completion": {"rule": "schedule"}},
    }
)


@pytest.mark.parametrize("name", UPDATES)
def test_the_learner_s_first_ratios_are_exactly_one(tiny_config: Config, device: str, name: str) -> None:
    require_exact_replay(tiny_config(**UPDATES[name]), device)


@pytest.mark.parametrize("dtype", choices(ModelConfig, "dtype"))
def test_first_ratios_are_exactly_one_at_every_version(tiny_config: Config, device: str, dtype: str) -> None:
    require_exact_replay(tiny_config(model={"dtype": dtype}), device, iterations=3)


def require_exact_replay(config: RunConfig, device: str, iterations: int = 1) -> None:
    """Every iteration begins with ratios of exactly 1 and changes the adapter."""
    learner, policy = Learner(config, device=device), RolloutPolicy(config, device=device)
    learner.restore(LearnerState(iteration=0, adapter=far_from_fresh(learner.adapter()), optimizer={}))
    for version in range(1, iterations + 1):
        before = learner.adapter().digest
        metrics = iterate(learner, policy, config)
        require_exact_ratios(metrics, config)
        assert metrics["train/grad_norm"] > 0
        assert np.isfinite(list(metrics.values())).all()
        assert metrics["adapter/version"] == version
        assert learner.adapter().digest != before
    assert all(array.dtype == np.float32 for array in learner.adapter().arrays.values())

"""A process for both sides of a bundle: it has one model, and a role begins where it has not been."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from actors.joint import JointActor, JointProcesses
from flow.models.load import FrozenModel
from protocol.config.run import RunConfig

Config = Callable[..., RunConfig]
JOINT = {"layout": "joint", "rollout_actors": 1}


def test_a_process_reads_its_model_once_for_both_sides(monkeypatch: pytest.MonkeyPatch, tiny_config: Config) -> None:
    """`tests/flow/models/test_frozen.py` shows what the two share."""
    read: list[FrozenModel] = []
    monkeypatch.setattr("actors.joint.FrozenModel", lambda *facts: read.append(FrozenModel(*facts)) or read[-1])
    actor_class: Any = JointActor
    actor = actor_class.__ray_metadata__.modified_class(tiny_config(cluster=JOINT))
    assert actor.prepare() == actor.prepare_learner()
    assert len(read) == 1


def test_a_role_begins_in_the_newest_process_that_has_not_taken_it(
    monkeypatch: pytest.MonkeyPatch, tiny_config: Config
) -> None:
    class Numbered:
        made = count(1)

        def options(self, **options: Any) -> "Numbered":
            assert options == {"num_cpus": 2.0, "num_gpus": 0.0, "resources": {}, "bundle": 0}
            return self

        def remote(self, _: RunConfig) -> int:
            return next(self.made)

    class Bundle:
        def options(self, slot: int) -> dict[str, Any]:
            return {"bundle": slot}

    monkeypatch.setattr("actors.joint.JointActor", Numbered())
    bundles: Any = Bundle()
    processes, config = JointProcesses(bundles), tiny_config(cluster=JOINT)
    assert [processes.of(0, role, config) for role in ("learner", "rollout", "rollout", "rollout")] == [1, 1, 2, 3]
    assert processes.of(0, "learner", config) == 3, "the one that replaced what it had"
    processes.forget()
    assert [processes.of(0, role, config) for role in ("learner", "rollout")] == [4, 4]

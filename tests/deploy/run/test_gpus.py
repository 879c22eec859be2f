"""A run on a machine with fewer GPUs than its actors reserve ends with one line, before Ray starts."""

from collections.abc import Callable

import pytest
import ray

from deploy.run.cluster import ray_cluster
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.support.runs.sinks import Silent


@pytest.mark.parametrize(("workers", "is_refused"), [(1, False), (2, True)])
def test_more_learner_workers_than_gpus_are_refused(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, workers: int, *, is_refused: bool
) -> None:
    started: list[bool] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: started.append(True))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # an earlier test's connection is not asked for
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = tiny_config(
        cluster={"rollout_actors": 1, "rollout": {"gpus": 1}, "learner": {"gpus": 1, "workers": workers}}
    )
    if is_refused:
        rule = r"the actors reserve 3 GPUs, this machine has 2: .* lower cluster\.rollout_actors"
        with pytest.raises(ConfigError, match=rule), ray_cluster(config, Silent()):
            pytest.fail("the run began")
    else:
        with ray_cluster(config, Silent()):
            pass
    assert bool(started) != is_refused

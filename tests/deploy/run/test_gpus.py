"""A run on a machine with fewer GPUs than its actors reserve ends with one line, before any actor waits for one."""

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
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    ended: list[bool] = []
    config = tiny_config(
        cluster={"rollout_actors": 1, "rollout": {"gpus": 1}, "learner": {"gpus": 1, "workers": workers}}
    )
    if is_refused:
        rule = (
            r"cluster\.\*\.gpus must not ask for more GPUs than there are, 2, got 3: .* lower cluster\.rollout_actors"
            r" or cluster\.learner\.workers"
        )
        with pytest.raises(ConfigError, match=rule), ray_cluster(config, Silent()):
            pytest.fail("the run began")
    else:
        with ray_cluster(config, Silent()):
            assert not ended
    assert ended, "the cluster that it started is gone"

"""Wrong labels, which choose nodes of a given cluster, and wrong environments are one line before Ray starts."""

from collections.abc import Callable

import pytest

from deploy.run.cluster import ray_cluster
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from tests.support.runs.sinks import Silent


@pytest.mark.parametrize(
    ("cluster", "rule"),
    [
        ({}, r"cluster\.rollout\.labels select nodes of a given cluster, got \{'pool': 'a'\} without one"),
        ({"address": "127.0.0.1:1", "value": "in(a"}, "must be Ray's label selectors"),
    ],
)
def test_labels_that_cannot_be_met_are_refused(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, cluster: dict[str, str], rule: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    labels = {"pool": cluster.pop("value", "a")}
    config = tiny_config(cluster={**cluster, "rollout": {"labels": labels}})
    with pytest.raises(ConfigError, match=rule), ray_cluster(config, Silent()):
        pass


def test_an_environment_that_ray_does_not_take_is_refused(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = tiny_config(rewards={"dark": {"scorer": "tests.support.rewards.dark:Dark", "runtime_env": {"pip": 3}}})
    with (
        pytest.raises(
            ConfigError, match=r"^rewards\.dark\.runtime_env must be a Ray runtime environment: .* correct it$"
        ),
        ray_cluster(config, Silent()),
    ):
        pass

"""Whole runs whose actors share one GPU: one process, actors on Ray, bundles, and a driver that was killed."""

from pathlib import Path

import pytest

from learner.checkpoint import newest_checkpoint
from tests.support.runs.scene import Driver, preset, story
from tests.support.worlds.architectures import model_of

ITERATIONS = 6
WAYS = {
    "one actor": ("cluster.rollout_actors=1",),
    "two actors and two workers": ("cluster.rollout_actors=2", "cluster.learner.workers=2"),
    "in turns": ("cluster.rollout_actors=1", "cluster.layout=colocated"),
    "in turns, resting in host memory": (
        "cluster.rollout_actors=1",
        "cluster.layout=colocated",
        "cluster.offload=true",
    ),
}


@pytest.mark.ray
@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(("name", "dtype"), [("sd35", "bfloat16"), ("flux", "float16")])
def test_every_layout_and_a_killed_run_end_in_the_same_bits(gpus: float, tmp_path: Path, name: str, dtype: str) -> None:
    path = preset(
        tmp_path,
        tmp_path,
        iterations=ITERATIONS,
        model=model_of(name, dtype, tmp_path),
        group={"max_lag": 0},
        checkpoint={"every": 1},
        cluster={"rollout": {"gpus": gpus}, "learner": {"gpus": gpus}},
    )
    Driver(path, tmp_path / "alone", "--local").finish()
    alone = story(tmp_path / "alone")
    for number, (way, words) in enumerate(WAYS.items()):
        Driver(path, tmp_path / str(number), *words).finish()
        assert story(tmp_path / str(number)) == alone, way
    killed = tmp_path / "killed"
    driver = Driver(path, killed, "cluster.rollout_actors=2")
    driver.wait_for_iteration(2)
    driver.kill()
    found = newest_checkpoint(killed / "checkpoints")
    assert found and found[0].iteration < ITERATIONS
    assert "continuing from" in Driver(path, killed, "cluster.rollout_actors=2").finish()
    assert story(killed) == alone

"""Whole runs whose actors share one GPU: one process, actors on Ray, bundles, and a driver that was killed."""

from pathlib import Path

import pytest

from learner.checkpoint import newest_checkpoint
from tests.support.runs.scene import Driver, Story, preset, story
from tests.support.worlds.architectures import model_of

ITERATIONS = 6
WAYS = {
    "one actor": ("cluster.rollout_actors=1",),
    "two actors and two workers": ("cluster.rollout_actors=2", "cluster.learner.workers=2"),
    "in turns": ("cluster.rollout_actors=1", "cluster.layout=colocated"),
    "in turns in one process": ("cluster.rollout_actors=1", "cluster.layout=joint"),
    "in turns, resting in host memory": (
        "cluster.rollout_actors=1",
        "cluster.layout=colocated",
        "cluster.offload=true",
    ),
}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.whole,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True, scope="module"),
    pytest.mark.parametrize(
        "run", [("sd35", "bfloat16"), ("flux", "float16")], indirect=True, scope="module", ids=":".join
    ),
]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, gpus: float, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset of an architecture in a precision."""
    name, dtype = request.param
    folder = tmp_path_factory.mktemp(name)
    return preset(
        folder,
        folder,
        iterations=ITERATIONS,
        model=model_of(name, dtype, folder),
        group={"max_lag": 0},
        checkpoint={"every": 1},
        cluster={"rollout": {"gpus": gpus}, "learner": {"gpus": gpus}},
    )


@pytest.fixture(scope="module")
def alone(run: Path) -> Story:
    """What a run in one process comes to."""
    folder = run.parent / "alone"
    Driver(run, folder, "--local").finish()
    return story(folder)


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_ends_in_the_bits_of_one_process(run: Path, alone: Story, tmp_path: Path, way: str) -> None:
    Driver(run, tmp_path / "run", *WAYS[way]).finish()
    assert story(tmp_path / "run") == alone


def test_a_killed_run_goes_on_to_the_same_bits(run: Path, alone: Story, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    driver = Driver(run, killed, "cluster.rollout_actors=2")
    driver.wait_for_iteration(2)
    driver.kill()
    found = newest_checkpoint(killed / "checkpoints")
    assert found and found[0].iteration < ITERATIONS
    assert "continuing from" in Driver(run, killed, "cluster.rollout_actors=2").finish()
    assert story(killed) == alone

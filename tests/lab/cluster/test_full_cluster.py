"""A full cluster that loses a node with a learner worker goes on within a minute, with the same bits."""

import pytest

from tests.lab.faults.cluster import Cluster
from tests.lab.faults.full_cluster import FAULTS, GOAL_S, LAYOUTS, lose
from tests.support.runs.scene import Story
from tests.support.scenes import long_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        pytest.param(fault, layout, marks=[long_scene] if fault == "cable" else [])
        for fault, layout in zip(FAULTS, LAYOUTS, strict=True)
    ],
)
def test_a_full_cluster_goes_on_without_a_node(cluster: Cluster, undisturbed: Story, fault: str, layout: str):
    loss = lose(cluster, fault, layout, undisturbed)
    assert loss.lost_s < GOAL_S, loss.row()

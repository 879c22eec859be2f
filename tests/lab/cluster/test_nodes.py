"""Nodes that would compute other bits are refused by name, and the run ends with one line; a useless one is avoided."""

import shutil
from importlib.metadata import version

import pytest

from tests.lab.faults.cluster import RAY, Cluster
from tests.lab.faults.lab import HOME
from tests.support.runs.scene import Story
from tests.support.scenes import long_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_node_with_another_torch_is_refused_by_name(cluster: Cluster):
    with cluster.odd_node() as folder:
        facts = folder / "torch-0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version('torch')}.other\n")
        said = cluster.submit("torch", "cluster.rollout.resources.odd=1").finish(code=2)
    assert f"got one on node m3 with torch {version('torch')}.other instead of {version('torch')}" in said


@long_scene
def test_a_node_with_other_code_is_refused_by_name(cluster: Cluster):
    cluster.install(cluster.head, "installed")
    words = f"cluster.address={cluster.head.address}:{RAY} rewards.redness.scorer=mine:Slow".split()
    words += [f"cluster.{role}.resources.odd=1" for role in ("rollout", "reward", "learner")]
    command = f"cd installed/project && python -m flowcredit train mine.yaml --run code {' '.join(words)}"
    with cluster.odd_node() as folder:
        installed = cluster.head.home / "installed"
        shutil.copytree(installed / "flowcredit", folder, dirs_exist_ok=True)
        shutil.copy(installed / "project" / "mine.py", folder)
        with (folder / "flow" / "device.py").open("a") as file:
            file.write("# another version\n")
        variables = {"PYTHONPATH": f"{HOME}/installed/flowcredit"}
        said = cluster.head.run(["bash", "-c", command], variables=variables, beside="raylet", code=2, timeout_s=300)
    assert "got one on node m3 with flowcredit's code" in said


@long_scene
def test_a_node_that_lacks_torch_is_named_and_avoided(cluster: Cluster, undisturbed: Story):
    words = ("cluster.rollout_actors=3", "cluster.rollout.cpus=0.5", "cluster.rollout.placement=spread")
    with cluster.odd_node() as folder:
        (folder / "torch.py").write_text('raise ImportError("no torch here")')
        cluster.submit("lacking", *words).finish()
    address = cluster.nodes[1].address
    events = (cluster.run_folder("lacking") / "events.jsonl").read_text()
    assert f"could not start on {address}: ImportError: no torch here" in events
    cluster.require_undisturbed("lacking", undisturbed)

"""Faults on several machines, in the middle of a run: each run ends with the bits of an undisturbed one."""

import pytest

from tests.lab.faults.cluster import Cluster
from tests.lab.faults.lab import STORE, unplug, until
from tests.support.runs.scene import Story
from tests.support.scenes import long_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ROOM_EVERYWHERE = ("cluster.rollout.cpus=0.5", "cluster.learner.cpus=0.5", "rewards.redness.cpus=0.5")
"""Learner and scorer may start on one node; a rollout actor has room beside them."""


def test_a_run_is_scaled_through_the_api_from_another_machine_while_a_store_is_full(
    cluster: Cluster, undisturbed: Story
):
    cluster.serve()
    cluster.api("GET", "/runs", token="not-the-token-of-anyone", code=401)
    with cluster.full_store(cluster.nodes[0]):
        words = ("cluster.rollout_actors=1", "cluster.rollout.placement=spread", *ROOM_EVERYWHERE)
        job = cluster.submit("scaled", *words, held_after=1)
        for count, iteration, later in ((3, 1, 4), (2, 4, 0)):
            job.wait_for_iteration(iteration)
            cluster.pause("scaled")
            cluster.api("PUT", "/runs/scaled/actors/rollout", {"count": count}, code=202)
            until(lambda: cluster.ready("scaled") == count, f"{count} rollout actors are ready", seconds=300)  # noqa: B023
            if count == 3:
                until(lambda: set(cluster.homes("scaled")) == {"m1", "m2", "m3"}, "an actor is on every node")
                for node in cluster.nodes:
                    node.require_clock("raylet|agent|ray::")
                    node.require_clock("ray::RolloutActor")
            cluster.resume("scaled", held_after=later)
        job.finish()
    cluster.require_undisturbed("scaled", undisturbed)


def test_a_node_without_its_network_for_20_seconds_costs_no_bit(cluster: Cluster, undisturbed: Story):
    job = cluster.submit("cut", "cluster.rollout.placement=spread", held_after=1)
    job.wait_for_iteration(1)
    node = cluster.rollout_node("cut")
    cluster.release()
    unplug(node, seconds=20)
    job.finish()
    assert cluster.failures("cut")
    cluster.require_undisturbed("cut", undisturbed)
    cluster.wait_for_nodes(3)


@long_scene
def test_a_run_waits_for_its_only_rollout_node_which_has_no_network_for_100_seconds(
    cluster: Cluster, undisturbed: Story
):
    job = cluster.submit("cut-long", "cluster.rollout.resources.odd=1", held_after=1)
    job.wait_for_iteration(1)
    until(lambda: set(cluster.homes("cut-long")) == {"m3"}, "the status shows all rollout actors on m3")
    before = cluster.iteration("cut-long")
    cluster.release()
    unplug(cluster.nodes[1], seconds=100)
    assert cluster.iteration("cut-long") <= before + 2, "the node was not needed"
    job.finish(timeout_s=600)
    cluster.require_undisturbed("cut-long", undisturbed)
    cluster.wait_for_nodes(3)


@long_scene
def test_a_node_that_loses_its_power_costs_no_bit(cluster: Cluster, undisturbed: Story):
    job = cluster.submit("killed", "cluster.rollout.placement=spread", held_after=1)
    job.wait_for_iteration(1)
    node = cluster.rollout_node("killed")
    node.power_off()
    cluster.release()
    job.finish()
    assert cluster.failures("killed")
    cluster.require_undisturbed("killed", undisturbed)
    cluster.start_node(node)
    cluster.wait_for_nodes(3)


@long_scene
def test_a_head_that_loses_its_power_goes_on_with_the_same_command(cluster: Cluster, undisturbed: Story):
    job = cluster.submit("head", held_after=3)
    job.wait_for_iteration(3)
    cluster.restart_head()
    cluster.release()
    job.leave()
    said = cluster.submit("head").finish()
    assert "continuing from" in said
    cluster.require_undisturbed("head", undisturbed)


@long_scene
def test_a_new_head_without_the_old_disk_goes_on_from_a_shared_one(cluster: Cluster, undisturbed: Story):
    run = f"{STORE}/shared"
    job = cluster.submit(run, held_after=3)
    job.wait_for_iteration(3)
    cluster.restart_head(is_new=True)
    cluster.release()
    job.leave()
    said = cluster.submit(run).finish()
    assert "continuing from" in said
    cluster.require_undisturbed(run, undisturbed)


@long_scene
def test_a_new_head_without_the_old_disk_goes_on_from_the_store(cluster: Cluster, undisturbed: Story):
    words = (f"checkpoint.url=file://{STORE}/lost",)
    job = cluster.submit("lost", *words, held_after=2)
    job.wait_for_iteration(2)
    until(lambda: list(cluster.lab.store.glob("lost/checkpoints/*/manifest.json")), "a copy is in the store")
    cluster.restart_head(is_new=True)
    cluster.release()
    job.leave()
    assert not cluster.run_folder("lost").exists()
    said = cluster.submit("lost", *words).finish()
    assert "continuing from" in said
    cluster.require_undisturbed("lost", undisturbed)

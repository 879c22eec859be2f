"""A node that keeps killing actors is avoided while there is another."""

import pytest
import ray

from actors.pool.nodes import FAILURES, NODE_LABEL, NodeFailures
from protocol.config.cluster import RoleConfig


def lose(nodes: NodeFailures, node: str, times: int = FAILURES) -> None:
    for number in range(times):
        actor = f"{node}-{number}"
        nodes.joined(actor, node)
        nodes.failed(actor)


def alive(monkeypatch, *names: str) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": name, "Alive": True} for name in names])


def test_a_node_is_avoided_after_its_third_loss_and_again_allowed_after_the_window(monkeypatch):
    now = [0.0]
    alive(monkeypatch, "a", "b")
    nodes = NodeFailures(within_s=60, clock=lambda: now[0])
    lose(nodes, "a", FAILURES - 1)
    assert nodes.options(RoleConfig()) == {}
    lose(nodes, "a", 1)
    assert nodes.options(RoleConfig()) == {"label_selector": {NODE_LABEL: "!in(a)"}}
    now[0] = 61
    assert nodes.options(RoleConfig()) == {}


def test_the_last_node_is_never_avoided(monkeypatch):
    nodes = NodeFailures(within_s=60)
    lose(nodes, "a")
    lose(nodes, "b")
    alive(monkeypatch, "a", "b")
    assert nodes.options(RoleConfig()) == {}
    alive(monkeypatch, "a", "c")
    assert nodes.options(RoleConfig()) == {"label_selector": {NODE_LABEL: "!in(a)"}}


@pytest.mark.parametrize(("node", "options"), [("", {}), ("a", {"label_selector": {NODE_LABEL: "!in(a)"}})])
def test_an_actor_that_never_said_where_it_lives_counts_for_the_node_on_which_it_was_started(
    monkeypatch, node, options
):
    alive(monkeypatch, "a", "b")
    nodes = NodeFailures(within_s=60, find=lambda _: node)
    for number in range(5):
        nodes.failed(number)
    assert nodes.options(RoleConfig()) == options


def test_a_role_s_labels_and_placement_are_ray_s_options(monkeypatch):
    nodes = NodeFailures(within_s=60)
    assert nodes.options(RoleConfig(labels={"pool": "rollout"})) == {"label_selector": {"pool": "rollout"}}
    assert nodes.options(RoleConfig(placement="spread")) == {"scheduling_strategy": "SPREAD"}
    lose(nodes, "a")
    alive(monkeypatch, "a", "b")
    assert nodes.options(RoleConfig(placement="spread")) == {
        "label_selector": {NODE_LABEL: "!in(a)"},
        "scheduling_strategy": "SPREAD",
    }
    assert nodes.options(RoleConfig(labels={"pool": "rollout"})) == {"label_selector": {"pool": "rollout"}}

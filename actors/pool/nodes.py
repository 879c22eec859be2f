"""Avoids cluster nodes on which actors keep failing."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private import state as ray_state  # Ray has no public function for these two questions

from protocol.config.cluster import RoleConfig
from protocol.sink import StatusSink

FAILURES = 3
"""Failed actors within the window after which a node is avoided."""
NODE_LABEL = "ray.io/node-id"


def node_of(actor: Any) -> str:
    """Return the id of the node on which Ray started an actor, dead or alive; empty if it never started."""
    row: Any = ray_state.actors(actor._actor_id.hex())
    return row.get("Address", {}).get("NodeID", "")


class NodeFailures:
    """Counts failed actors by node and decides where the next actor may start. A run has one."""

    def __init__(
        self, *, within_s: float, clock: Callable[[], float] = time.monotonic, find: Callable[[Any], str] = node_of
    ) -> None:
        """
        Args:
            within_s: seconds for which a failed actor counts.
            find: returns the id of the node of an actor that failed before it reported it.
        """
        self._within_s = within_s
        self._clock = clock
        self._find = find
        self._homes: dict[Any, str] = {}
        self._failures: deque[tuple[float, str]] = deque()

    def joined(self, actor: Any, node: str) -> None:
        """Note that an actor runs on this node."""
        self._homes[actor] = node

    def failed(self, actor: Any) -> None:
        """Count an actor that died or hung."""
        if node := self._homes.pop(actor, None) or self._find(actor):
            self._failures.append((self._clock(), node))

    def avoided(self) -> frozenset[str]:
        """Return the nodes with at least `FAILURES` failed actors within the window."""
        now = self._clock()
        while self._failures and now - self._failures[0][0] > self._within_s:
            self._failures.popleft()
        counts = Counter(node for _, node in self._failures)
        return frozenset(node for node, count in counts.items() if count >= FAILURES)

    def options(self, role: RoleConfig) -> Mapping[str, Any]:
        """Return Ray options that decide on which node an actor of this role may start.

        They keep it off the avoided nodes, unless there is no other node or the role's labels choose the nodes.
        """
        labels = role.labels or self._other_nodes()
        if role.placement == "pack":
            first, *others = [*({NODE_LABEL: node, **role.labels} for node in self._fullest_first()), labels]
            return {"label_selector": first, "fallback_strategy": [{"label_selector": each} for each in others]}
        options: dict[str, Any] = {"label_selector": labels} if labels else {}
        return options | ({"scheduling_strategy": "SPREAD"} if role.placement == "spread" else {})

    def _fullest_first(self) -> list[str]:
        """Sort the usable nodes by the free share of their CPUs and GPUs."""
        avoided = self.avoided()
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        usable = [node for node in nodes if node not in avoided] or list(nodes)
        free = free_resources()
        return sorted(usable, key=lambda node: (_share(free.get(node, {}), nodes[node]), node))

    def _other_nodes(self) -> dict[str, str]:
        """Return Ray's label selector for all nodes that are not avoided; empty if none are avoided."""
        avoided = self.avoided()
        alive = node_table()[0] if avoided else set()
        if not avoided & alive or not alive - avoided:
            return {}
        return {NODE_LABEL: f"!in({', '.join(sorted(avoided & alive))})"}


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by node id and resource."""
    return ray_state.available_resources_per_node()


def node_table() -> tuple[set[str], set[str]]:
    """Return the ids of the live and of the dead nodes."""
    nodes = ray.nodes()
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return alive, {node["NodeID"] for node in nodes} - alive


def _share(free: Mapping[str, float], total: Mapping[str, float]) -> float:
    """Return the mean free share of the node's CPUs and GPUs."""
    shares = [free.get(name, 0.0) / total[name] for name in ("CPU", "GPU") if total.get(name)]
    return sum(shares) / len(shares) if shares else 1.0


def ray_options(reserved: Mapping[str, float]) -> dict[str, Any]:
    """Return the Ray options of an actor that reserves these resources, named as Ray names them."""
    custom = {name: amount for name, amount in reserved.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": reserved["CPU"], "num_gpus": reserved["GPU"], "resources": custom}


def failure_reporter(pool: str, nodes: NodeFailures, sink: StatusSink) -> Callable[[Any, str], None]:
    """Make the callback that a pool calls when an actor fails.

    Returns:
        A function of the actor's handle and the reason.
    """

    def report(actor: Any, reason: str) -> None:
        nodes.failed(actor)
        sink.event(f"a {pool} actor failed: {reason}", "actor_failed")

    return report

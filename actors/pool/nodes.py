"""Which cluster nodes keep killing actors, so that replacements are started elsewhere."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import ray

from protocol.sink import StatusSink

FAILURES = 3
"""Actors that a node may lose within the window before it is avoided."""
NODE_LABEL = "ray.io/node-id"


class NodeFailures:
    """Told where each actor lives and which were lost; says where the next one may start. Made once a run."""

    def __init__(self, *, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within_s = within_s
        self._clock = clock
        self._homes: dict[Any, str] = {}
        self._failures: deque[tuple[float, str]] = deque()

    def joined(self, actor: Any, node: str) -> None:
        """An actor answered from this node."""
        self._homes[actor] = node

    def failed(self, actor: Any) -> None:
        """An actor died or hung."""
        if node := self._homes.pop(actor, None):
            self._failures.append((self._clock(), node))

    def avoided(self) -> frozenset[str]:
        """Nodes that lost at least `FAILURES` actors within the window."""
        now = self._clock()
        while self._failures and now - self._failures[0][0] > self._within_s:
            self._failures.popleft()
        counts = Counter(node for _, node in self._failures)
        return frozenset(node for node, count in counts.items() if count >= FAILURES)

    def options(self) -> Mapping[str, Any]:
        """Ray options of the next actor: keep off the avoided nodes, unless there is no other."""
        avoided = self.avoided()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if avoided else set()
        if not avoided & alive or not alive - avoided:
            return {}
        return {"label_selector": {NODE_LABEL: f"!in({', '.join(sorted(avoided & alive))})"}}


def failure_reporter(pool: str, nodes: NodeFailures, sink: StatusSink) -> Callable[[Any, str], None]:
    """What a pool calls when it loses an actor."""

    def report(actor: Any, reason: str) -> None:
        nodes.failed(actor)
        sink.event(f"a {pool} actor was lost: {reason}", "actor_failed")

    return report

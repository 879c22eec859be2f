"""The sign of life that every actor gives while it works: a method on a thread of its own."""

from typing import Any

import ray

GROUP = "heartbeat"
HEARTBEAT: dict[str, Any] = {"concurrency_groups": {GROUP: 1}}
"""Options of an actor class that derives from `Alive`; all other calls still come one at a time."""


class Alive:
    """Answers while another call is at work; a process that was stopped, or that keeps the GIL, does not."""

    @ray.method(concurrency_group=GROUP)
    def ping(self) -> str:
        """The id of the cluster node that this actor lives on."""
        return ray.get_runtime_context().get_node_id()

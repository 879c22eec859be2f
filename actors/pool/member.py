"""What is known about one actor: where it runs, what it holds, how much it has done."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Adapter
from protocol.status import ActorState, ActorStatus

ActorHandle = Any
"""A Ray actor; its methods are not typed here."""


@dataclass(eq=False)
class Member:
    """One place of a pool and the actor that holds it; made and changed by the pool."""

    place: int
    restarts: int = 0
    """Actors that were lost at this place."""
    handle: ActorHandle = None
    state: ActorState = "waiting"
    node: str = ""
    node_id: str = ""
    pid: int | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None
    calls: int = 0
    seen: float | None = None
    _began: float = 0.0
    _answers: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def live_at(self, place: tuple[str, str, int]) -> None:
        """It runs: host name, cluster node and process, as `actors.pool.calls.whereabouts` tells them."""
        self.node, self.node_id, self.pid = place

    def begin(self) -> None:
        """It takes a call."""
        self.state, self._began = "busy", time.monotonic()

    def end(self) -> float:
        """It answered; the seconds that it took."""
        now = time.monotonic()
        self.state, self.seen = "idle", time.time()
        self.calls += 1
        self._answers.append(now)
        return now - self._began

    def hold(self, adapter: Adapter) -> None:
        """Note that the actor confirmed this adapter."""
        self.adapter_version, self.adapter_digest, self.seen = adapter.version, adapter.digest, time.time()

    def status(self, kind: str) -> ActorStatus:
        """For the board."""
        return ActorStatus(
            name=f"{kind}-{self.place}",
            kind=kind,
            state=self.state,
            node=self.node,
            node_id=self.node_id,
            pid=self.pid,
            adapter_version=self.adapter_version,
            adapter_digest=self.adapter_digest[:12] if self.adapter_digest else None,
            last_seen=self.seen,
            calls=self.calls,
            calls_per_minute=self._per_minute(),
            restarts=self.restarts,
        )

    def _per_minute(self) -> float:
        if len(self._answers) < 2:
            return 0.0
        span = time.monotonic() - self._answers[0]
        return round(60 * (len(self._answers) - 1) / span, 1) if span > 0 else 0.0

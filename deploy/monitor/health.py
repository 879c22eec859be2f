"""What readers of a status add to it: whether the run is silent, how it goes, and whether it takes commands."""

import time
from collections.abc import Callable
from typing import Any

from deploy.monitor.summary import change_words
from protocol.status import ENDED, RunStatus

TREND_ERRORS = 2
"""Standard errors that a trend must exceed to count in a sentence."""
TREND_LEAST = 10
"""Iterations that a trend needs."""


def refusal_of(status: RunStatus) -> str:
    """Say why a run takes no commands; empty if it takes them. Silence counts as `Pulse` has marked it."""
    if status.phase in ENDED:
        return f"has {status.phase}: it takes no commands"
    return "has fallen silent: it takes no commands" if status.stale_since is not None else ""


class Pulse:
    """Tells which runs are silent. It never compares the clocks of two hosts: it takes the silence that the source
    measured, or looks whether a status has changed since it was last looked at.

    pulse = Pulse()
    pulse.marked(status).stale_since
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure with `clock`, in seconds."""
        self._clock = clock
        self._seen: dict[str, tuple[Any, float]] = {}
        self._silent: dict[str, tuple[Any, float]] = {}

    def marked(self, status: RunStatus) -> RunStatus:
        """Return the status with its `health`, and with `stale_since`, by this host's clock, if the run is silent.

        A run that has not ended is silent after 5 heartbeats and at least 5 seconds.
        """
        now, written = self._clock(), (status.session, status.updated)
        if self._seen.get(status.run, (None,))[0] != written:
            self._seen[status.run] = written, now
        silent_s = now - self._seen[status.run][1] if status.silent_s is None else status.silent_s
        since = status.stale_since
        if since is None and status.phase not in ENDED and silent_s > max(5.0, 5 * status.heartbeat_s):
            if self._silent.get(status.run, (None,))[0] != written:
                self._silent[status.run] = written, time.time() - silent_s
            since = self._silent[status.run][1]
        marked = status.model_copy(update={"stale_since": since, "silent_s": None})
        return marked.model_copy(update={"health": sentence_of(marked)})


def sentence_of(status: RunStatus) -> str:
    """Say whether a run learns, and which side is slow."""
    if status.stale_since is not None:
        return "No heartbeat: the driver or its board is gone. Run the same command again to resume."
    if status.phase == "failed":
        reason = next((error.message for error in reversed(status.errors) if error.kind == "error"), "see the events")
        return f"Failed: {reason.removeprefix('the run failed: ').rstrip('.')}."
    if status.phase in ("finished", "stopped"):
        return f"{status.phase.capitalize()} after {_count(status.iteration, 'iteration')}{_change(status)}."
    if status.phase == "starting":
        return "Starting: actors load their models; the first iteration begins when each pool has one."
    if status.phase == "paused":
        return f"Paused after iteration {status.iteration}: the actors are held until it is resumed."
    if status.phase == "stopping":
        return "Stopping: the run ends after the update in progress, with a checkpoint."
    parts = (_blocked(status),) if _blocked(status) else (_learning(status), _slow_side(status), _attention(status))
    return "; ".join(part for part in parts if part) + "."


def _blocked(status: RunStatus) -> str:
    """Say which role has no actor because no node has room for one, and what helps; empty if none."""
    pool = next((pool for pool in status.pools if pool.waiting and not pool.ready), None)
    if pool is None:
        return ""
    settled = f"PoolSettled/{pool.name}"
    told = (each.message for each in status.conditions if each.type == settled and each.status == "False")
    message = next(told, f"{pool.name} has 0 of {pool.desired} actors")
    giving = ", ".join(other.name for other in status.pools if other.ready > 1)
    helps = f"{giving} makes room within seconds if it can" if giving else "a further node helps"
    return f"Blocked: {message}; {helps}"


def _learning(status: RunStatus) -> str:
    rewards = status.rewards
    if rewards.trend is None:
        return f"Too early to tell: a trend needs {TREND_LEAST} iterations, {status.iteration} are done"
    change = f"reward {_signed(rewards.trend)} in 10 iterations"
    if abs(rewards.trend) <= TREND_ERRORS * (rewards.trend_error or 0.0):
        return f"Flat: {change}, no more than chance"
    return f"Learning: {change}" if rewards.trend > 0 else f"Falling: {change}"


def _slow_side(status: RunStatus) -> str:
    slow = status.bottleneck
    if slow is None:
        return ""
    pool = next((pool for pool in status.pools if pool.name == slow.side), None)
    name = slow.side if "/" in slow.side else f"the {slow.side}"
    growing = f" ({pool.ready} of {pool.desired} are ready)" if pool and pool.ready < pool.desired else ""
    return f"{name} is the bottleneck{growing}"


def _attention(status: RunStatus) -> str:
    count = sum(condition.status == "False" for condition in status.conditions)
    return f"{_count(count, 'condition')} {'needs' if count == 1 else 'need'} attention" if count else ""


def _change(status: RunStatus) -> str:
    first, newest, interval = status.rewards.heldout_first, status.rewards.heldout, status.rewards.heldout_change
    if first is None or newest is None:
        return ""
    words = f"; {change_words(*interval)}" if interval else ""
    return f": held-out score {first:.3f} → {newest:.3f} ({_signed(newest - first)}{words})"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.3f}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"

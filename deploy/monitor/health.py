"""What readers of a status add to it: whether the run is silent, how it goes, and whether it takes commands."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.monitor.summary import change_words
from protocol.status import ENDED, Rewards, RunStatus

TREND_ERRORS = 2
"""Standard errors that a trend must exceed to count in a sentence."""
TREND_LEAST = 10
"""Iterations that a trend needs."""
SAME_S = 1.0
"""Two measurements of one moment differ by less."""
BOARD_AWAY = "Not known: the board does not answer; the run itself may still go on."


def refusal_of(status: RunStatus) -> str:
    """Say why a run takes no commands; empty if it takes them. Silence counts as `DatedStatus.at` has marked it."""
    if status.phase in ENDED:
        return f"has {status.phase}: it takes no commands"
    return "has fallen silent: it takes no commands" if status.stale_since is not None else ""


@dataclass(frozen=True)
class DatedStatus:
    """A status as a source gave it, with the time when its run was last heard.

    No clocks of two hosts are compared: that time follows from the silence that the source measured, or else it is when
    a changed status was first read.
    """

    status: RunStatus
    read: float
    """When it was read, in seconds of the reader's clock."""
    heard: float
    """When the run was last heard, by the same clock."""
    heard_at: float
    """The same as this host's time."""

    @classmethod
    def of(cls, status: RunStatus, now: float, earlier: "DatedStatus | None" = None) -> "DatedStatus":
        """Date a status that was read just now.

        Args:
            now: the reader's clock.
            earlier: the run's previous reading.
        """
        same = earlier if earlier and _written(earlier.status) == _written(status) else None
        heard = same.heard if same else now
        if status.silent_s is not None:
            heard = now - status.silent_s
        heard_at = time.time() - (now - heard)
        if same and abs(heard - same.heard) < SAME_S:
            heard_at = same.heard_at  # so that two readings of one silence are equal
        return cls(status, read=now, heard=heard, heard_at=heard_at)

    def at(self, now: float, *, is_board_away: bool = False) -> RunStatus:
        """Return the status with its `health`, and with `stale_since`, by this host's clock, if the run is silent.

        A run that has not ended is silent after 5 heartbeats and at least 5 seconds.
        """
        since = self.status.stale_since
        longest_s = max(5.0, 5 * self.status.heartbeat_s)
        if since is None and self.status.phase not in ENDED and now - self.heard > longest_s:
            since = self.heard_at
        shown = self.status.model_copy(update={"stale_since": since, "silent_s": None})
        health = BOARD_AWAY if is_board_away and since is not None else sentence_of(shown)
        return shown.model_copy(update={"health": health})


def _written(status: RunStatus) -> tuple[str, float]:
    return status.session, status.updated


class Pulse:
    """The readings of one reader that looks again and again.

    pulse = Pulse()
    pulse.marked(status).stale_since
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure with `clock`, in seconds."""
        self._clock = clock
        self._readings: dict[str, DatedStatus] = {}

    def marked(self, status: RunStatus) -> RunStatus:
        """Return a status that was read just now, as `DatedStatus.at` does."""
        now = self._clock()
        reading = self._readings[status.run] = DatedStatus.of(status, now, self._readings.get(status.run))
        return reading.at(now)


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
        return f"Paused after iteration {status.iteration}: actors stay reserved until it is resumed."
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
    if is_chance(rewards):
        return f"Flat: {change}, within chance"
    return f"Learning: {change}" if rewards.trend > 0 else f"Falling: {change}"


def is_chance(rewards: Rewards) -> bool:
    """Return whether the trend may be chance."""
    return rewards.trend is not None and abs(rewards.trend) <= TREND_ERRORS * (rewards.trend_error or 0.0)


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

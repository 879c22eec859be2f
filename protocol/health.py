"""How a run goes, in one sentence: for people who see it for the first time, on the page and on the terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.status import PoolStatus, RunStatus

ERRORS = 2
"""Standard errors that a trend must exceed to count."""
LEAST = 10
"""Iterations that a trend needs."""


def sentence_of(status: "RunStatus") -> str:
    """Say whether a run learns, which side is slow, and what to do about it."""
    if status.stale_since is not None:
        return "Silent: the run's process or its board is gone; start the same command again to go on."
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
    return "; ".join(part for part in (_learning(status), _slow_side(status), _attention(status)) if part) + "."


def _learning(status: "RunStatus") -> str:
    rewards = status.rewards
    if rewards.trend is None:
        return f"Too early to tell: a trend needs {LEAST} iterations, {status.iteration} are done"
    change = f"reward {_signed(rewards.trend)} in 10 iterations"
    if abs(rewards.trend) <= ERRORS * (rewards.trend_error or 0.0):
        return f"Flat: {change}, no more than chance"
    return f"Learning: {change}" if rewards.trend > 0 else f"Falling: {change}"


def _slow_side(status: "RunStatus") -> str:
    slow = status.bottleneck
    if slow is None:
        return ""
    pool = next((pool for pool in status.pools if pool.name == slow.side), None)
    name = slow.side if "/" in slow.side else f"the {slow.side}"
    return f"{name} is the slow side{_remedy(pool) if pool else ''}"


def _remedy(pool: "PoolStatus") -> str:
    if not pool.is_resizable:
        return ""
    if pool.ready < pool.desired:
        return f" ({pool.ready} of {pool.desired} are ready)"
    if pool.name == "learner":
        return ", add a learner worker"
    return ", add a reward actor" if pool.name.startswith("reward/") else f", add a {pool.name} actor"


def _attention(status: "RunStatus") -> str:
    count = sum(condition.status == "False" for condition in status.conditions)
    return f"{_count(count, 'condition')} {'needs' if count == 1 else 'need'} attention" if count else ""


def _change(status: "RunStatus") -> str:
    first, newest = status.rewards.heldout_first, status.rewards.heldout
    if first is None or newest is None:
        return ""
    return f": held-out score {first:.3f} → {newest:.3f} ({_signed(newest - first)})"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.3f}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"

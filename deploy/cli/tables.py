"""Tables about runs on a terminal."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from deploy.monitor.health import is_chance
from deploy.monitor.summary import change_words, duration, number, stages_of, step_rewards_of
from protocol.status import ENDED, RunStatus

if TYPE_CHECKING:
    from deploy.report.compare import Comparison


def show_runs(statuses: Sequence[RunStatus]) -> RenderableType:
    """Return a table of all runs, one per line."""
    if not statuses:
        return Text("no runs here")
    table = Table("run", "phase", "iteration", "reward", "held-out", "last heard", box=None)
    for status in statuses:
        table.add_row(
            status.run,
            _phase(status),
            f"{status.iteration}/{status.iterations}",
            number(status.rewards.now),
            number(status.rewards.heldout),
            _heard(status),
        )
    return table


def show_run(status: RunStatus) -> RenderableType:
    rewards, metrics = status.rewards, status.metrics
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", f"{status.run}  {_phase(status)}")
    if status.job:
        facts.add_row("job", status.job)
    if status.method:
        facts.add_row("method", status.method)
    facts.add_row("health", status.health)
    left = f", {duration(status.eta_s)} left" if status.eta_s else ""
    facts.add_row("iteration", f"{status.iteration}/{status.iterations}{left}")
    chance = ", within chance" if is_chance(rewards) else ""
    trend = "" if rewards.trend is None else f"  ({number(rewards.trend, '+.3f')} in 10 iterations{chance})"
    if rewards.now is not None:
        facts.add_row("reward", f"{number(rewards.now)}{trend}")
    for name, value in rewards.components.items():
        facts.add_row("", f"{name} {number(value)}")
    if rewards.heldout is not None:
        change = f"  ({change_words(*rewards.heldout_change)})" if rewards.heldout_change else ""
        first = "" if rewards.heldout_first is None else f"{number(rewards.heldout_first)} -> "
        facts.add_row("held-out score", f"{first}{number(rewards.heldout)}{change}")
    if sizes := step_rewards_of(metrics):
        facts.add_row("|step reward|", "  ".join(f"{step}: {number(value)}" for step, value in sizes.items()))
    if status.credit and sizes:
        example = f" Example: {status.credit.example}" if status.credit.example else ""
        facts.add_row("credit", Text(f"{status.credit.rule}{example}", "dim"))
    if metrics.get("train/ratio_mean") is not None:
        facts.add_row(
            "update",
            f"ratio {number(metrics['train/ratio_mean'], '.4f')}  clipped {number(metrics.get('train/clip_fraction'))}"
            f"  approximate KL {number(metrics.get('train/approx_kl'), '.2g')}"
            f"  gradient {number(metrics.get('train/grad_norm'), '.2g')}",
        )
    if stages := stages_of(metrics):
        facts.add_row("seconds", "  ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()))
    if status.queues:
        facts.add_row("waiting", "  ".join(f"{queue} {count}" for queue, count in status.queues.items()))
    if status.bottleneck:
        facts.add_row("bottleneck", f"{status.bottleneck.side}: {status.bottleneck.message}")
    for condition in status.conditions:
        if condition.status != "True":
            facts.add_row(Text("attention", "yellow"), f"{condition.type}: {condition.message}")
    for error in status.errors[-3:]:
        facts.add_row(Text(error.kind, "red" if error.kind == "error" else "yellow"), error.message)
    return Group(facts, Text(), _actors(status))


def show_comparison(comparison: "Comparison") -> RenderableType:
    """Return two runs side by side."""
    facts = Table("", *_right(comparison.first, comparison.second), box=None)
    for fact in comparison.facts:
        facts.add_row(fact.name, _plain(fact.first), _plain(fact.second))
    parts: list[RenderableType] = [Text(comparison.verdict), Text(), facts]
    if comparison.heldout:
        newest = Table("held-out score", *_right(comparison.first, comparison.second, "difference"), box=None)
        changes = Table("since its start", *_right(comparison.first, comparison.second), box=None)
        for row in comparison.heldout:
            newest.add_row(row.kind, number(row.first), number(row.second), str(row.difference or "none"))
            changes.add_row(row.kind, *(str(change or "none") for change in (row.first_change, row.second_change)))
        resampled = (
            f"{comparison.level:.0%} of {comparison.resamples:,} paired resamples of the held-out prompts (seed 0)"
        )
        has_seeds = any(row.difference and row.difference.has_seeds for row in comparison.heldout)
        told = (
            f"[low, high]: {comparison.level:.0%}; of a difference by Student's t over seeds and prompts, of a change"
            f" by {comparison.resamples:,} paired resamples of the prompts"
            if has_seeds
            else f"[low, high]: {resampled}; other training seeds are not in them"
        )
        parts += [Text(), newest, Text(), changes, Text(told, "dim")]
    if comparison.differences:
        keys = Table("config key", comparison.first, comparison.second, box=None)
        for key, (first, second) in comparison.differences.items():
            keys.add_row(key, *("none" if value is None else str(value) for value in (first, second)))
        parts += [Text(), keys]
    return Group(*parts, *(Text(f"note: {note}") for note in comparison.notes))


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _plain(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.0f}" if value == int(value) else f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _actors(status: RunStatus) -> Table:
    names = Column("actor", no_wrap=True, min_width=max((len(actor.name) for actor in status.actors), default=0))
    heads = ("state", "node", "version", "digest", "calls/min", "busy", "last seen", "restarts")
    table = Table(names, *heads, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for actor in status.actors:
        seen = "never" if actor.last_seen is None else f"{duration(status.updated - actor.last_seen)} ago"
        version = "" if actor.adapter_version is None else str(actor.adapter_version)
        cells = (actor.name, actor.state, actor.node, version, (actor.adapter_digest or "")[:7])
        busy = "" if actor.busy_share is None else f"{actor.busy_share:.0%}"
        table.add_row(*cells, f"{actor.calls_per_minute:.1f}", busy, seen, str(actor.restarts))
    return table


def _heard(status: RunStatus) -> str:
    if status.phase not in ENDED and status.stale_since is None:
        return "now"
    return f"{duration(time.time() - (status.stale_since or status.updated))} ago"


def _phase(status: RunStatus) -> Text:
    if status.stale_since is not None:
        return Text(f"{status.phase}, silent for {duration(time.time() - status.stale_since)}", "red")
    return Text(status.phase, {"failed": "red", "paused": "yellow", "running": "green"}.get(status.phase, ""))

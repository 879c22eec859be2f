"""All runs as Prometheus metrics; each metric of a run is `flowcredit_metric{name=…}`."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from protocol.status import RunStatus

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FACTS: dict[str, tuple[str, Callable[[RunStatus], float | None]]] = {
    "iteration": ("Iterations done.", lambda s: s.iteration),
    "iterations": ("Iterations of the whole run.", lambda s: s.iterations),
    "eta_seconds": ("Seconds to the end at the current pace.", lambda s: s.eta_s),
    "adapter_version": ("Version of the learner's adapter.", lambda s: s.adapter_version),
    "updated_timestamp_seconds": ("When the run last wrote its status.", lambda s: s.updated),
    "stale": ("1 while a run that has not ended is silent.", lambda s: s.stale_since is not None),
}
"""Metrics with one value for each run, with their descriptions."""
STATES = ("desired", "ready", "busy", "waiting")
USAGE = {
    "memory_bytes": "Memory of an actor's process.",
    "gpu_memory_bytes": "Memory in use on an actor's GPU, by all processes.",
    "gpu_share": "Share of the last second in which an actor's GPU computed.",
}
"""Metrics with one value for each actor, see `protocol.status.Usage`."""
HOLDS = {"True": 1, "False": 0, "Unknown": -1}


def exposition(statuses: Sequence[RunStatus]) -> bytes:
    """Return the text that Prometheus scrapes."""
    return generate_latest(_Runs(statuses))


class _Runs(Collector):
    def __init__(self, statuses: Sequence[RunStatus]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        runs = self._statuses
        for name, (text, value_of) in FACTS.items():
            yield _gauge(name, text, [], [([s.run], value_of(s)) for s in runs])
        phases = [([s.run, s.phase], 1) for s in runs]
        yield _gauge("phase", "1 for the run's phase.", ["phase"], phases)
        conditions = [([s.run, held.type, held.reason], HOLDS[held.status]) for s in runs for held in s.conditions]
        yield _gauge("condition", "1 holds (good), 0 does not, -1 unknown.", ["type", "reason"], conditions)
        queues = [([s.run, queue], count) for s in runs for queue, count in s.queues.items()]
        yield _gauge("queue", "Waiting items by queue; see docs/metrics.md.", ["queue"], queues)
        pools = [(s.run, pool) for s in runs for pool in s.pools]
        actors = [([run, pool.name, state], getattr(pool, state)) for run, pool in pools for state in STATES]
        yield _gauge("pool_actors", "Actors by state.", ["pool", "state"], actors)
        calls = [([run, pool.name], pool.queue) for run, pool in pools]
        yield _gauge("pool_queue", "Calls that wait for an idle actor.", ["pool"], calls)
        restarts = CounterMetricFamily("flowcredit_pool_restarts", "Actors that failed.", labels=["run", "pool"])
        for run, pool in pools:
            restarts.add_metric([run, pool.name], pool.restarts)
        yield restarts
        for name, text in USAGE.items():
            used = [([s.run, actor.name], getattr(actor.usage, name)) for s in runs for actor in s.actors]
            yield _gauge(f"actor_{name}", text, ["actor"], used)
        metrics = [([s.run, name], value) for s in runs for name, value in s.metrics.items()]
        yield _gauge("metric", "Newest value of a metric; see docs/metrics.md.", ["name"], metrics)


def _gauge(
    name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], float | None]]
) -> GaugeMetricFamily:
    """Make a gauge with the label `run` and further ones; a missing value gives no sample."""
    gauge = GaugeMetricFamily(f"flowcredit_{name}", text, labels=["run", *labels])
    for values, value in samples:
        if value is not None:
            gauge.add_metric(values, value)
    return gauge

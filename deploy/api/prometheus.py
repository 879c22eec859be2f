"""All runs as Prometheus metrics; each metric of a run is `flowcredit_metric{name=…}`."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from protocol.status import RunStatus

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def exposition(statuses: Sequence[RunStatus], newest: Mapping[str, Mapping[str, float | None]]) -> bytes:
    """Return the text that Prometheus scrapes.

    Args:
        statuses: of all runs.
        newest: each run's newest metrics by name.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Runs(statuses, newest))
    return generate_latest(registry)


class _Runs(Collector):
    def __init__(self, statuses: Sequence[RunStatus], newest: Mapping[str, Mapping[str, float | None]]) -> None:
        self._statuses = statuses
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        yield from self._of_runs()
        yield from self._of_pools()
        metric = GaugeMetricFamily(
            "flowcredit_metric", "Newest value of a metric of docs/metrics.md.", labels=["run", "name"]
        )
        for run, values in self._newest.items():
            for name, value in values.items():
                if value is not None:
                    metric.add_metric([run, name], value)
        yield metric

    def _of_runs(self) -> Iterator[Metric]:
        facts = {
            "iteration": ("Iterations done.", lambda s: s.iteration),
            "iterations": ("Iterations of the whole run.", lambda s: s.iterations),
            "eta_seconds": ("Seconds to the end at the present pace.", lambda s: s.eta_s),
            "adapter_version": ("Version of the learner's adapter.", lambda s: s.adapter_version),
            "updated_timestamp_seconds": ("When the run last wrote its status.", lambda s: s.updated),
            "stale": ("1 while a run that has not ended is silent.", lambda s: s.stale_since is not None),
        }
        for name, (text, value_of) in facts.items():
            gauge = GaugeMetricFamily(f"flowcredit_{name}", text, labels=["run"])
            for status in self._statuses:
                value = value_of(status)
                if value is not None:
                    gauge.add_metric([status.run], float(value))
            yield gauge
        phase = GaugeMetricFamily("flowcredit_phase", "1 for the run's phase.", labels=["run", "phase"])
        condition = GaugeMetricFamily(
            "flowcredit_condition", "1 holds (good), 0 does not, -1 unknown.", labels=["run", "type", "reason"]
        )
        for status in self._statuses:
            phase.add_metric([status.run, status.phase], 1)
            for held in status.conditions:
                value = {"True": 1, "False": 0}.get(held.status, -1)
                condition.add_metric([status.run, held.type, held.reason], value)
        depth = GaugeMetricFamily(
            "flowcredit_queue", "Items that wait, by queue of docs/metrics.md.", labels=["run", "queue"]
        )
        for status in self._statuses:
            for queue, count in status.queues.items():
                depth.add_metric([status.run, queue], count)
        yield from (phase, condition, depth)

    def _of_pools(self) -> Iterator[Metric]:
        labels = ["run", "pool"]
        actors = GaugeMetricFamily("flowcredit_pool_actors", "Actors by state.", labels=[*labels, "state"])
        queue = GaugeMetricFamily("flowcredit_pool_queue", "Calls that wait for an idle actor.", labels=labels)
        restarts = CounterMetricFamily("flowcredit_pool_restarts", "Actors that failed.", labels=labels)
        for status in self._statuses:
            for pool in status.pools:
                for state in ("desired", "ready", "busy", "waiting"):
                    actors.add_metric([status.run, pool.name, state], getattr(pool, state))
                queue.add_metric([status.run, pool.name], pool.queue)
                restarts.add_metric([status.run, pool.name], pool.restarts)
        yield from (actors, queue, restarts)

"""Prometheus metrics of one portal process.

Two kinds: what happens is counted as it happens (`Metrics.observe_*`, thread-safe); what *is* (streams,
instances, etcd) is read when somebody scrapes, so that the series of a stream or an instance vanish
together with it. Values of labels are bounded: names of streams and instances that exist now, and
short fixed lists.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from streams.http import Endpoint, Request, Response
from streams.status import StreamState, StreamStatus

STREAM = ("instance_name", "dp_rank")
ROLES = ("DEFAULT", "PREFILL", "DECODE", "MIX")
HEALTH_STATES = ("ACTIVE", "LEASE_LOST", "SUSPECT")
EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
OTHER = "other"
MAX_VALUES = 40
"""Values of one label of one stream's counter; what is beyond is summed up as `other`."""

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SNAPSHOT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
REQUEST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
TOKEN_BUCKETS = (-65536, -16384, -4096, -1024, -256, -64, 0, 64, 256, 1024, 4096, 16384, 65536)


class InstanceLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def state(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read at each scrape. Called on the thread that scrapes; must not block."""

    statuses: Callable[[], Sequence[StreamStatus]] = tuple
    instances: Callable[[], Iterable[InstanceLike]] = tuple
    etcd_connected: Callable[[], bool | None] = lambda: None
    """None where instances do not come from etcd."""
    decisions_dropped: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.time
    """Wall clock, seconds since the epoch."""


class Metrics:
    """All metrics of a process, in a registry of their own."""

    def __init__(self, *, policy: str = "RR") -> None:
        self.registry = CollectorRegistry()
        self._sources = Sources()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_StateCollector(lambda: self._sources))
        self._lag = self._histogram(
            "kvportal_event_lag_seconds", "From a batch's timestamp to its being visible.", LAG_BUCKETS
        )
        self._skewed = self._counter(
            "kvportal_event_lag_negative_total", "Batches from the future: clocks disagree. Lag counted as 0."
        )
        self._snapshot = self._histogram(
            "kvportal_snapshot_seconds", "From a snapshot's request to its being served.", SNAPSHOT_BUCKETS
        )
        self._query = self._histogram(
            "kvportal_query_seconds", "Answering a query, without reading its body.", REQUEST_BUCKETS
        )
        select = self._histogram(
            "kvportal_select_seconds",
            "Answering a select, without reading its body.",
            REQUEST_BUCKETS,
            "policy",
        )
        self._responses = self._counter(
            "kvportal_http_responses_total", "Answers of the internal API.", "endpoint", "status"
        )
        self._decisions = self._counter("kvportal_decisions_total", "Routing decisions.", "policy", "outcome")
        self._prediction_error = self._histogram(
            "kvportal_prediction_error_tokens",
            "Tokens predicted to be cached minus tokens that the engine found cached.",
            TOKEN_BUCKETS,
            "instance_name",
        )
        self._latency = {"query": self._query, "select": select.labels(policy)}
        self._predicted_for: set[str] = set()
        self._lock = threading.Lock()

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def watch(self, sources: Sources) -> None:
        """From now on scrapes read these sources."""
        self._sources = sources

    def observe_lag(self, seconds: float) -> None:
        """Batch timestamp to visible. Negative when clocks disagree: a sum must not go down."""
        if seconds < 0:
            self._skewed.inc()
        self._lag.observe(max(seconds, 0.0))

    def observe_snapshot(self, seconds: float) -> None:
        self._snapshot.observe(seconds)

    def observe_answer(self, endpoint: str, seconds: float) -> None:
        latency = self._latency.get(endpoint)
        if latency is not None:
            latency.observe(seconds)

    def observe_response(self, endpoint: str, status: int) -> None:
        self._responses.labels(endpoint, status).inc()

    def observe_decision(self, policy: str, outcome: str) -> None:
        """`outcome`: `routed`, or the code of the refusal."""
        self._decisions.labels(policy, outcome).inc()

    def observe_prediction_error(self, instance_name: str, tokens: int) -> None:
        """Predicted minus found; positive: the directory promised too much."""
        with self._lock:
            self._predicted_for.add(instance_name)
            self._prediction_error.labels(instance_name).observe(tokens)

    def render(self) -> bytes:
        """Everything, in the text format."""
        self._forget_gone_instances()
        return generate_latest(self.registry)

    def _forget_gone_instances(self) -> None:
        here = {instance.name for instance in self._sources.instances()}
        with self._lock:
            for name in self._predicted_for - here:
                self._predicted_for.discard(name)
                self._prediction_error.remove(name)

    def endpoint(self, request: Request) -> Response:
        return Response(200, self.render(), CONTENT_TYPE_PLAIN_0_0_4)

    @property
    def opened(self) -> dict[str, Endpoint]:
        return {"metrics": self.endpoint}


class _StateCollector(Collector):
    """Streams, instances and etcd, read at scrape time."""

    def __init__(self, sources: Callable[[], Sources]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        sources = self._sources()
        yield from _stream_metrics(sources.statuses(), sources.clock())
        yield _instances(sources.instances())
        connected = sources.etcd_connected()
        yield GaugeMetricFamily(
            "kvportal_etcd_connected",
            "Whether etcd is reachable; absent where instances do not come from it.",
            value=None if connected is None else float(connected),
        )
        yield CounterMetricFamily(
            "kvportal_decision_log_dropped",
            "Decisions that were not written to the database.",
            value=sources.decisions_dropped(),
        )


def _stream_metrics(statuses: Sequence[StreamStatus], now: float) -> Iterator[Metric]:
    labels = [(status, (status.spec.instance_name, str(status.spec.dp_rank))) for status in statuses]

    def gauge(name: str, text: str, value: Callable[[StreamStatus], float | None]) -> Metric:
        family = GaugeMetricFamily(f"kvportal_stream_{name}", text, labels=STREAM)
        for status, key in labels:
            number = value(status)
            if number is not None:
                family.add_metric(key, number)
        return family

    def total(name: str, text: str, value: Callable[[StreamStatus], float]) -> Metric:
        family = CounterMetricFamily(f"kvportal_stream_{name}", text, labels=STREAM)
        for status, key in labels:
            family.add_metric(key, value(status))
        return family

    def totals(
        name: str, label: str, text: str, value: Callable[[StreamStatus], Mapping[str, int]]
    ) -> Metric:
        family = CounterMetricFamily(f"kvportal_stream_{name}", text, labels=(*STREAM, label))
        for status, key in labels:
            for kind, number in value(status).items():
                family.add_metric((*key, kind), number)
        return family

    yield gauge(
        "synchronized",
        "1 while the stream serves a snapshot with an unbroken run of events after it.",
        lambda status: float(status.state is StreamState.SYNCHRONIZED),
    )
    blocks = GaugeMetricFamily(
        "kvportal_stream_blocks", "Blocks that are resident, by tier.", labels=(*STREAM, "tier")
    )
    for status, key in labels:
        blocks.add_metric((*key, "device"), status.device_blocks)
        blocks.add_metric((*key, "host"), status.host_blocks)
    yield blocks
    yield gauge("mapped_blocks", "Entries of the block-hash map.", lambda status: status.mapped_blocks)
    yield gauge("sequence", "Last message in the serving view.", lambda status: status.sequence)
    yield gauge(
        "last_event_age_seconds",
        "Time since the last live message; absent before the first.",
        lambda status: None if status.last_event_at is None else max(0.0, now - status.last_event_at),
    )
    yield totals("events", "type", "Events by type.", lambda status: _events(status.counters))
    yield totals("resyncs", "reason", "Recoveries and snapshots asked for, by reason.", _kinds_of("resyncs"))
    yield total("gaps", "Holes in the sequence of messages.", lambda status: status.counters.get("gaps", 0))
    yield totals("warnings", "kind", "Oddities that do not stop a stream.", _kinds_of("warnings"))
    yield totals("drift_blocks", "kind", "Blocks that a calibration found wrong.", _kinds_of("drift"))
    yield total(
        "throttled_seconds",
        "Time for which a stream that takes too much of the process was held back.",
        lambda status: status.counters.get("throttled_ms", 0) / 1000,
    )
    yield total("messages", "Live messages received.", lambda status: status.counters.get("messages", 0))
    yield total("bytes", "Bytes of live messages received.", lambda status: status.counters.get("bytes", 0))


def _kinds_of(prefix: str) -> Callable[[StreamStatus], Mapping[str, int]]:
    return lambda status: _kinds(status.counters, prefix)


def _kinds(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counters `prefix:<kind>` by kind, at most MAX_VALUES of them by name."""
    start = f"{prefix}:"
    kinds = {key[len(start) :]: number for key, number in sorted(counters.items()) if key.startswith(start)}
    return _bounded(kinds, list(kinds)[:MAX_VALUES])


def _events(counters: Mapping[str, int]) -> dict[str, int]:
    return _bounded(_kinds(counters, "events"), EVENT_TYPES)


def _bounded(numbers: Mapping[str, int], known: Sequence[str]) -> dict[str, int]:
    kept = {key: number for key, number in numbers.items() if key in known}
    rest = sum(number for key, number in numbers.items() if key not in known)
    return {**kept, OTHER: kept.get(OTHER, 0) + rest} if rest else kept


def _instances(instances: Iterable[InstanceLike]) -> Metric:
    family = GaugeMetricFamily(
        "kvportal_instances", "Registered instances by role and health state.", labels=("role", "state")
    )
    counts = dict.fromkeys(((role, state) for role in ROLES for state in HEALTH_STATES), 0)
    for instance in instances:
        key = (str(instance.role), str(instance.state))
        counts[key] = counts.get(key, 0) + 1
    for key, count in counts.items():
        family.add_metric(key, count)
    return family

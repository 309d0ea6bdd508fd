"""What a scrape sees."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvportal.metrics import Metrics, Sources
from streams.status import StreamState
from tests.http.shells import JSON, spec, status

NAMES = [
    "stream_synchronized",
    "stream_blocks",
    "stream_sequence",
    "stream_last_event_age_seconds",
    "stream_events",
    "stream_resyncs",
    "stream_gaps",
    "stream_warnings",
    "event_lag_seconds",
    "snapshot_seconds",
    "query_seconds",
    "select_seconds",
    "decisions",
    "prediction_error_tokens",
    "instances",
    "etcd_connected",
    "decision_log_dropped",
    "stream_drift_blocks",
    "stream_throttled_seconds",
]


@dataclass(frozen=True)
class Instance:
    name: str
    role: str = "DEFAULT"
    state: str = "ACTIVE"


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return scrape(metrics).get((f"kvportal_{name}", frozenset(labels.items())))


def watching(*statuses, **sources) -> Metrics:
    metrics = Metrics(policy="CAR")
    metrics.watch(Sources(statuses=lambda: statuses, clock=lambda: 1_760_000_010.0, **sources))
    return metrics


def test_every_metric_has_its_name_and_a_help_text():
    families = {
        family.name: family for family in text_string_to_metric_families(watching().render().decode())
    }
    for name in NAMES:
        assert families[f"kvportal_{name}"].documentation


def test_a_streams_metrics_say_what_its_status_says():
    counters = {
        "messages": 9,
        "bytes": 1000,
        "events:BlockStored": 7,
        "events:AllBlocksCleared": 1,
        "events:Strange": 2,
        "events:Stranger": 3,
        "resyncs:sequence_gap": 4,
        "gaps": 5,
        "warnings:unknown_medium": 6,
        "drift:absent": 8,
        "drift:unclaimed": 10,
        "throttled_ms": 1500,
    }
    metrics = watching(status(spec(rank=3), counters=counters))
    stream = {"instance_name": "10.0.0.7:8000", "dp_rank": "3"}
    seen = scrape(metrics)

    def read(name: str, **labels: str) -> float | None:
        return seen.get((f"kvportal_stream_{name}", frozenset((stream | labels).items())))

    assert read("synchronized") == 1
    assert read("blocks", tier="device") == 3
    assert read("blocks", tier="host") == 2
    assert read("mapped_blocks") == 6
    assert read("sequence") == 17
    assert read("last_event_age_seconds") == 8.5
    assert read("events_total", type="BlockStored") == 7
    assert read("events_total", type="AllBlocksCleared") == 1
    assert read("events_total", type="other") == 5
    assert read("resyncs_total", reason="sequence_gap") == 4
    assert read("gaps_total") == 5
    assert read("warnings_total", kind="unknown_medium") == 6
    assert read("drift_blocks_total", kind="absent") == 8
    assert read("drift_blocks_total", kind="unclaimed") == 10
    assert read("throttled_seconds_total") == 1.5
    assert read("messages_total") == 9
    assert read("bytes_total") == 1000


def test_what_is_not_known_has_no_series():
    metrics = watching(status(spec(), StreamState.UNSYNCHRONIZED, last_event_at=None))
    stream = {"instance_name": "10.0.0.7:8000", "dp_rank": "0"}
    assert value(metrics, "stream_synchronized", **stream) == 0
    assert value(metrics, "stream_sequence", **stream) is None
    assert value(metrics, "stream_last_event_age_seconds", **stream) is None
    assert value(metrics, "etcd_connected") is None


def test_series_of_streams_and_instances_that_are_gone_vanish():
    statuses = [status(spec("a:1")), status(spec("b:1"))]
    instances = [Instance("a:1"), Instance("b:1")]
    metrics = Metrics()
    metrics.watch(Sources(statuses=lambda: statuses, instances=lambda: instances))
    metrics.observe_prediction_error("a:1", 100)
    metrics.observe_prediction_error("b:1", -100)

    def mentioned() -> set[str]:
        return {name for name in ("a:1", "b:1") if name in metrics.render().decode()}

    assert mentioned() == {"a:1", "b:1"}
    del statuses[0], instances[0]
    assert mentioned() == {"b:1"}
    del statuses[0], instances[0]
    assert mentioned() == set()


def test_values_of_labels_are_bounded():
    counters = {f"warnings:kind{number:04}": 1 for number in range(500)} | {
        f"events:T{n}": 1 for n in range(500)
    }
    metrics = watching(status(spec(), counters=counters))
    kinds = {
        dict(labels).get("kind")
        for name, labels in scrape(metrics)
        if name == "kvportal_stream_warnings_total"
    }
    assert len(kinds) == 41
    stream = {"instance_name": "10.0.0.7:8000", "dp_rank": "0"}
    assert value(metrics, "stream_warnings_total", kind="other", **stream) == 460
    assert value(metrics, "stream_events_total", type="other", **stream) == 500


def test_instances_are_counted_by_role_and_state():
    metrics = watching(
        instances=lambda: [Instance("a"), Instance("b"), Instance("c", "MIX", "SUSPECT")],
        etcd_connected=lambda: False,
        decisions_dropped=lambda: 12,
    )
    assert value(metrics, "instances", role="DEFAULT", state="ACTIVE") == 2
    assert value(metrics, "instances", role="MIX", state="SUSPECT") == 1
    assert value(metrics, "instances", role="PREFILL", state="ACTIVE") == 0
    assert value(metrics, "etcd_connected") == 0
    assert value(metrics, "decision_log_dropped_total") == 12


def test_lag_from_the_future_is_counted_and_does_not_lower_the_sum():
    metrics = Metrics()
    metrics.observe_lag(0.02)
    metrics.observe_lag(-3.0)
    assert value(metrics, "event_lag_seconds_sum") == 0.02
    assert value(metrics, "event_lag_seconds_count") == 2
    assert value(metrics, "event_lag_negative_total") == 1


def test_decisions_snapshots_and_errors_are_counted():
    metrics = Metrics()
    metrics.observe_decision("CAR", "routed")
    metrics.observe_snapshot(0.2)
    metrics.watch(Sources(instances=lambda: [Instance("a:1")]))
    metrics.observe_prediction_error("a:1", 512)
    assert value(metrics, "decisions_total", policy="CAR", outcome="routed") == 1
    assert value(metrics, "snapshot_seconds_count") == 1
    assert value(metrics, "prediction_error_tokens_bucket", instance_name="a:1", le="256.0") == 0
    assert value(metrics, "prediction_error_tokens_bucket", instance_name="a:1", le="1024.0") == 1


def test_query_and_select_are_timed(ask, portal):
    ask("POST", "/v1/internal/kv-cache/query", b'{"token_ids":[1]}', JSON)
    ask("POST", "/v1/internal/kv-cache/query", b'{"token_ids":[true]}', JSON)
    ask("POST", "/v1/internal/routing/select", b'{"token_ids":[1]}', JSON)
    assert value(portal.metrics, "query_seconds_count") == 2
    assert value(portal.metrics, "select_seconds_count", policy="CAR") == 1


@pytest.mark.parametrize("token", [None, "wrong"])
def test_metrics_are_open_and_in_the_text_format(ask, portal, token):
    answer = ask("GET", "/metrics", token=token)
    assert answer.status == 200
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert "kvportal_stream_synchronized" in answer.body.decode()
    assert "process_resident_memory_bytes" in answer.body.decode()

"""What the Operations page shows beside the streams: instances, decisions, rates, the source of instances.

`PortalGauges` is handed the parts that exist and reads them once a second; whatever is missing leaves
its section or number away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from kvportal.opsstate import Banner
from kvportal.trends import Totals
from routing.admin_decisions import render_explanation
from routing.decision_log import DecisionLog
from routing.instances.model import HealthState, InstanceView, Snapshot, SourceStatus
from routing.policies.decision import Policy
from routing.policies.explanation import explain
from routing.records import DecisionRecord
from routing.selector import Selector
from streams.hit_watch import HitWatch
from streams.spec import StreamId
from streams.status import Fault, StreamState, StreamStatus

NEWEST_DECISIONS = 20
SHOWN_INVALID = 3
_QUERIES = "kvportal_query_seconds_count"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PortalGauges:
    """Reads the parts of a running portal; every one of them may be missing."""

    statuses: Callable[[], Sequence[StreamStatus]]
    registry: CollectorRegistry | None = None
    """The process's metrics: they have counted the queries already."""
    instances: Callable[[], Snapshot] | None = None
    source: Callable[[], SourceStatus] | None = None
    exclusions: Callable[[], Mapping[str, Fault]] = dict
    selector: Selector | None = None
    decisions: DecisionLog | None = None
    hits: HitWatch | None = None

    def totals(self) -> Totals:
        routed = self.selector.totals() if self.selector else None
        return Totals(
            queries=_counted(self.registry, _QUERIES),
            decisions=routed.decisions if routed else None,
            predicted_hit_sum=routed.hit_ratio_sum if routed else 0.0,
            predicted_hit_count=routed.hit_ratio_num if routed else 0,
        )

    def banners(self) -> Sequence[Banner]:
        return source_banners(self.source()) if self.source else ()

    def last_hits(self) -> tuple[Mapping[StreamId, float], float | None]:
        if self.hits is None:
            return {}, None
        return self.hits.last_hits([status.spec.id for status in self.statuses()])

    def extras(self) -> Mapping[str, Any]:
        extras: Json = {}
        if self.instances is not None:
            offset = time.time() - time.monotonic()
            extras["instances"] = instances_json(
                self.instances().instances, self.exclusions(), self.statuses(), offset
            )
        if self.decisions is not None:
            weight = self.selector.settings.car_prefill_lambda if self.selector else 0.0
            newest = self.decisions.recent(NEWEST_DECISIONS)
            extras["decisions"] = [decision_json(record, weight) for record in newest]
        return extras

    def routing_of(self, prompt: bytes) -> str | None:
        """What CAR would decide for a prompt now, in the words of the decisions' pages."""
        if self.selector is None:
            return None
        return render_explanation(explain(self.selector.preview(prompt, Policy.CAR)))


def _counted(registry: CollectorRegistry | None, sample_name: str) -> int | None:
    """A counter out of the metrics, without collecting all the others."""
    if registry is None:
        return None
    for metric in registry.restricted_registry([sample_name]).collect():
        for sample in metric.samples:
            if sample.name == sample_name:
                return int(sample.value)
    return None


def instances_json(
    views: Iterable[InstanceView],
    exclusions: Mapping[str, Fault],
    statuses: Iterable[StreamStatus],
    offset: float,
) -> list[Json]:
    """Instances in name order. `offset` turns the registry's times into seconds since the epoch."""
    ranks: dict[str, list[StreamStatus]] = {}
    for status in statuses:
        ranks.setdefault(status.spec.instance_name, []).append(status)
    return [
        _instance(view, exclusions.get(view.name), ranks.get(view.name, []), offset)
        for view in sorted(views, key=lambda view: view.name)
    ]


def _instance(view: InstanceView, excluded: Fault | None, ranks: list[StreamStatus], offset: float) -> Json:
    load = view.load
    return {
        "name": view.name,
        "role": str(view.role),
        "current_role": str(view.current_role),
        "state": str(view.state),
        "since": round(view.since + offset),
        "reason": view.reason,
        "incarnation": view.incarnation_id,
        "dp_size": view.dp_size,
        "followed": len(ranks),
        "synchronized": sum(status.state is StreamState.SYNCHRONIZED for status in ranks),
        "load": load
        and {
            "waiting": load.waiting_requests_num,
            "usage": round(load.gpu_cache_usage_perc, 4) if load.valid else None,
            "valid": load.valid,
            "source": str(load.source),
            "at": round(load.received_at + offset),
        },
        "excluded": excluded and {"code": excluded.code, "message": excluded.sentence},
        "hint": instance_hint(view, excluded, len(ranks)),
    }


def instance_hint(view: InstanceView, excluded: Fault | None, followed: int) -> str | None:
    """What to look at although nothing failed: ranks without a stream, no load."""
    if view.state is HealthState.SUSPECT:
        return "Look after the engine. It gets no requests until its next heartbeat, or is removed."
    if excluded is None and 0 < followed < view.dp_size:
        missing = view.dp_size - followed
        have = "has" if missing == 1 else "have"
        return f"{missing} of its {view.dp_size} ranks {have} no stream; its hits do not count."
    if view.load is None:
        return "It has not reported its load yet, so CAR leaves it out."
    if not view.load.valid:
        return "It reports a load that cannot be right, so CAR leaves it out."
    return None


def decision_json(record: DecisionRecord, weight: float) -> Json:
    """A decision in one line: who, and the score's cache part and queue part (CAR only). `weight` is CAR's
    lambda; asking the record for it would have the whole explanation put into words."""
    prefill, decode = record.prefill or {}, record.decode or {}
    ratio, queue = prefill.get("kv_hit_ratio"), prefill.get("queue_cost")
    return {
        "id": record.decision_id,
        "request": record.request_id,
        "at": round(record.at, 2),
        "policy": record.policy,
        "outcome": record.outcome,
        "prefill": prefill.get("instance_name"),
        "decode": decode.get("instance_name"),
        "score": _rounded(prefill.get("score")),
        "cache_part": None if ratio is None else _rounded(weight * (1 - ratio)),
        "queue_part": None if queue is None else _rounded((1 - weight) * queue),
        "tokens": record.input_tokens,
        "hit_tokens": record.predicted_hit_tokens,
        "cached_tokens": record.cached_tokens,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def source_banners(status: SourceStatus) -> list[Banner]:
    """What is wrong with the source of the instances."""
    banners = []
    if status.kind == "etcd" and not status.connected:
        why = f" ({status.error})" if status.error else ""
        banners.append(
            Banner(
                "etcd_away",
                "error",
                "etcd is away",
                f"{status.endpoint or 'No endpoint'} does not answer{why}. The instances last known keep "
                "serving; new ones are not seen. The portal keeps trying and catches up by itself.",
            )
        )
    if status.invalid:
        first = "; ".join(f"{value.key}: {value.reason}" for value in status.invalid[:SHOWN_INVALID])
        more = len(status.invalid) - SHOWN_INVALID
        banners.append(
            Banner(
                "invalid_keys",
                "warning",
                f"{len(status.invalid)} registration{'s are' if len(status.invalid) > 1 else ' is'} skipped",
                first + (f"; and {more} more." if more > 0 else "."),
            )
        )
    return banners

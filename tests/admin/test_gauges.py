from __future__ import annotations

from typing import Any

import pytest

from kvportal.gauges import PortalGauges, decision_json, instances_json, source_banners
from kvportal.metrics import Metrics
from routing.instances.model import (
    HealthState,
    InstanceView,
    InvalidValue,
    Load,
    LoadReport,
    LoadSource,
    Registration,
    Role,
    Snapshot,
    SourceStatus,
)
from routing.records import DecisionRecord
from streams.status import Fault
from tests.admin.values import NOW, lost, status

NAME = "10.0.0.1:8000"


def view(**changes: Any) -> InstanceView:
    load = Load(LoadReport(4, 0.25), LoadSource.HEARTBEAT, 90.0)
    values = {
        "registration": Registration(NAME, Role.MIX, "life-1", dp_size=2),
        "order": 1,
        "current_role": Role.DECODE,
        "state": HealthState.ACTIVE,
        "since": 50.0,
        "reason": "registered",
        "load": load,
        **changes,
    }
    return InstanceView(**values)


def shown(instance: InstanceView, *statuses: Any, excluded: Fault | None = None) -> dict[str, Any]:
    exclusions = {NAME: excluded} if excluded else {}
    return instances_json([instance], exclusions, statuses, NOW - 100)[0]


def test_instance_tells_role_health_load_and_ranks() -> None:
    shows = shown(view(), status(1, 0), lost(1, 1), status(2, 0))
    assert (shows["role"], shows["current_role"], shows["state"]) == ("MIX", "DECODE", "ACTIVE")
    assert shows["since"] == NOW - 50
    assert shows["load"] == {
        "waiting": 4,
        "usage": 0.25,
        "valid": True,
        "source": "heartbeat",
        "at": NOW - 10,
    }
    assert (shows["dp_size"], shows["followed"], shows["synchronized"]) == (2, 2, 1)
    assert shows["excluded"] is None
    assert shows["hint"] is None


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 1, "1 of its 2 ranks has no stream"),
        ({"load": None}, 2, "has not reported its load"),
        ({"load": Load(LoadReport(4, 7.0), LoadSource.ETCD, 1.0)}, 2, "cannot be right"),
        ({"state": HealthState.SUSPECT}, 0, "gets no requests"),
    ],
)
def test_instance_that_needs_a_look_carries_a_hint(changes: Any, ranks: int, words: str) -> None:
    assert words in shown(view(**changes), *(status(1, rank) for rank in range(ranks)))["hint"]


def test_excluded_instance_tells_why() -> None:
    shows = shown(view(), excluded=Fault("role", "it has the decode role"))
    assert shows["excluded"] == {"code": "role", "message": "it has the decode role"}


def test_load_that_makes_no_sense_is_not_put_into_the_state_as_a_number() -> None:
    import orjson

    broken = view(load=Load(LoadReport(4, float("nan")), LoadSource.ETCD, 1.0))
    shows = shown(broken)
    assert shows["load"]["usage"] is None
    assert b"NaN" not in orjson.dumps(shows)


def record(**changes: Any) -> DecisionRecord:
    values = {
        "decision_id": "d1",
        "request_id": "r1",
        "at": NOW,
        "policy": "CAR",
        "outcome": "routed",
        "input_tokens": 1000,
        "prefill": {"instance_name": NAME, "score": 0.45, "kv_hit_ratio": 0.6, "queue_cost": 0.5},
        "decode": None,
        "predicted_hit_tokens": 640,
        "cached_tokens": None,
        "seconds": 0.001,
        "full": False,
        "explanation": {"settings": {"car_prefill_lambda": 0.5}},
        **changes,
    }
    return DecisionRecord(**values)


def test_score_of_a_decision_is_split_into_its_parts() -> None:
    shows = decision_json(record(), 0.5)
    assert (shows["cache_part"], shows["queue_part"], shows["score"]) == (0.2, 0.25, 0.45)
    assert shows["cache_part"] + shows["queue_part"] == pytest.approx(shows["score"])
    assert (shows["prefill"], shows["decode"]) == (NAME, None)


def test_decision_outside_car_has_no_score() -> None:
    blind = {"instance_name": NAME, "score": None, "kv_hit_ratio": None, "queue_cost": None}
    shows = decision_json(record(policy="RR", prefill=blind), 0.5)
    assert (shows["score"], shows["cache_part"], shows["queue_part"]) == (None, None, None)


def test_decision_without_candidates_has_nobody() -> None:
    shows = decision_json(record(outcome="no_candidates", prefill=None), 0.5)
    assert (shows["prefill"], shows["outcome"]) == (None, "no_candidates")


def test_etcd_away_is_a_banner_and_connected_is_none() -> None:
    away = SourceStatus("etcd", False, NOW, "connection refused", "127.0.0.1:2379")
    banner = source_banners(away)[0]
    assert banner.code == "etcd_away"
    assert "127.0.0.1:2379 does not answer (connection refused)" in banner.text
    assert source_banners(SourceStatus("etcd", True, NOW)) == []
    assert source_banners(SourceStatus("embedded", True, NOW)) == []


def test_registrations_that_are_skipped_are_named() -> None:
    invalid = tuple(InvalidValue(f"XLLM:MIX:{n}", "not JSON", 1) for n in range(5))
    banner = source_banners(SourceStatus("etcd", True, NOW, invalid=invalid))[0]
    assert banner.title == "5 registrations are skipped"
    assert "XLLM:MIX:0: not JSON" in banner.text
    assert banner.text.endswith("and 2 more.")


def test_queries_are_counted_by_the_metrics_alone() -> None:
    metrics = Metrics()
    metrics.watch(
        type("Sources", (), {"statuses": staticmethod(lambda: pytest.fail("collected everything"))})()  # type: ignore[arg-type]
    )
    gauges = PortalGauges(statuses=tuple, registry=metrics.registry)
    assert gauges.totals().queries == 0
    for _ in range(3):
        metrics.observe_answer("query", 0.001)
    assert gauges.totals().queries == 3
    assert gauges.totals().decisions is None


def test_sections_exist_only_with_their_parts() -> None:
    assert PortalGauges(statuses=tuple).extras() == {}
    gauges = PortalGauges(statuses=tuple, instances=lambda: Snapshot((view(),)))
    assert [one["name"] for one in gauges.extras()["instances"]] == [NAME]
    assert "decisions" not in gauges.extras()

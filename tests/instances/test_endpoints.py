"""Heartbeat, PUT, DELETE and the list, as functions from bytes to bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from routing.endpoints_instances import (
    delete_endpoint,
    heartbeat_endpoint,
    list_endpoint,
    put_endpoint,
)
from routing.instances.core import Registered
from routing.instances.embedded import LeaseTable
from routing.instances.model import HealthState, InvalidValue, Registration, Role, SourceStatus
from routing.instances.registration import MAX_VALUE_BYTES
from routing.instances.registry import InstanceRegistry
from streams.discovery import DiscoverySettings, discover
from streams.http import ApiError, Endpoint, Request
from streams.status import Fault
from tests.instances.support import closed_port
from tests.support.waiting import wait_until

STATUS = SourceStatus(kind="embedded", connected=True, since=5.0)


@pytest.fixture
def registry() -> Iterator[InstanceRegistry]:
    registry = InstanceRegistry(leases=LeaseTable())
    registry.start()
    yield registry
    registry.stop()


def call(endpoint: Endpoint, body: Any = b"", name: str = "", method: str = "POST") -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        response = endpoint(Request(method, "/path", raw, {"name": name} if name else {}))
    except ApiError as error:
        return error.status, (error.code, error.message)
    return response.status, json.loads(response.body) if response.body else None


def listed(registry: InstanceRegistry, exclusions: dict[str, Fault] | None = None) -> dict[str, Any]:
    status, document = call(list_endpoint(registry, lambda: STATUS, lambda: exclusions or {}), method="GET")
    assert status == 200
    return dict(document)


def beat(name: str = "a:1", incarnation: str | None = "one", **load: Any) -> dict[str, Any]:
    values = {"waiting_requests_num": 3, "gpu_cache_usage_perc": 0.5, **load}
    return {"name": name, "incarnation_id": incarnation, "load_metrics": values}


def test_put_registers_and_the_list_shows_everything(registry: InstanceRegistry) -> None:
    put = put_endpoint(registry)
    body = {"type": 3, "incarnation_id": "one", "register_ts_ms": 7, "dp_size": 2, "ttl_s": 60, "new": {}}
    assert call(put, body, "b:1") == (204, None)
    assert call(put, {"ttl_s": 0.5}, "a:1") == (204, None)
    first, second = listed(registry)["instances"]
    assert (first["name"], first["role"], first["incarnation_id"]) == ("a:1", "DEFAULT", None)
    assert second["load"] is None
    assert {
        key: second[key] for key in ("name", "state", "role", "current_role", "incarnation_id", "excluded")
    } == {
        "name": "b:1",
        "state": "ACTIVE",
        "role": "MIX",
        "current_role": "DECODE",
        "incarnation_id": "one",
        "excluded": None,
    }
    assert (second["dp_size"], second["register_ts_ms"], second["backend"]) == (2, 7, "xllm")


def test_the_list_shows_loads_exclusions_and_the_source(registry: InstanceRegistry) -> None:
    call(put_endpoint(registry), {"incarnation_id": "one", "ttl_s": 60}, "a:1")
    body = {**beat(), "latency_metrics": {"recent_max_ttft": 120, "recent_max_tbt": 9.5}}
    assert call(heartbeat_endpoint(registry), body) == (204, None)
    (instance,) = listed(registry, {"a:1": Fault("role", "because")})["instances"]
    age = instance["load"].pop("age_s")
    assert 0 <= age < 60
    assert instance["load"] == {
        "waiting_requests_num": 3,
        "gpu_cache_usage_perc": 0.5,
        "valid": True,
        "source": "heartbeat",
    }
    assert instance["latency"] == {"recent_max_ttft": 120.0, "recent_max_tbt": 9.5}
    assert instance["excluded"] == {"code": "role", "message": "because"}


def test_skipped_keys_are_listed(registry: InstanceRegistry) -> None:
    status = SourceStatus("etcd", False, 5.0, error="away", invalid=(InvalidValue("k", "not JSON", 9),))
    _, document = call(list_endpoint(registry, lambda: status, dict), method="GET")
    source = document["source"]
    assert (source["kind"], source["connected"], source["error"]) == ("etcd", False, "away")
    assert source["invalid"] == [{"key": "k", "message": "not JSON", "revision": 9}]


def test_a_heartbeat_is_in_force_when_it_is_answered(registry: InstanceRegistry) -> None:
    call(put_endpoint(registry), {"incarnation_id": "one", "ttl_s": 60}, "a:1")
    heartbeat = heartbeat_endpoint(registry)
    for waiting in range(50):
        assert call(heartbeat, beat(waiting_requests_num=waiting))[0] == 204
        load = registry.snapshot().by_name["a:1"].load
        assert load is not None
        assert load.waiting_requests_num == waiting


def test_heartbeats_that_are_refused(registry: InstanceRegistry) -> None:
    call(put_endpoint(registry), {"incarnation_id": "one", "ttl_s": 60}, "a:1")
    heartbeat = heartbeat_endpoint(registry)
    assert call(heartbeat, beat())[0] == 204
    before = registry.snapshot()
    assert call(heartbeat, beat("b:1"))[0] == 404
    status, (code, message) = call(heartbeat, beat(incarnation="two"))
    assert (status, code) == (409, "other_incarnation")
    assert "incarnation_id: 'two'" in message
    assert call(heartbeat, beat(incarnation=None))[0] == 409
    status, (code, message) = call(heartbeat, beat(waiting_requests_num="3"))
    assert (status, code) == (400, "invalid_field")
    assert message.startswith("load_metrics.waiting_requests_num: ")
    assert call(heartbeat, b"{")[0] == 400
    assert call(heartbeat, b"{")[1][0] == "invalid_json"
    assert registry.snapshot() is before


def test_numbers_out_of_range_are_taken_and_shown_as_invalid(registry: InstanceRegistry) -> None:
    call(put_endpoint(registry), {"incarnation_id": "one", "ttl_s": 60}, "a:1")
    huge = b'{"name": "a:1", "incarnation_id": "one", "load_metrics": {"waiting_requests_num": 1e0'.replace(
        b"1e0", b"9" * 40
    )
    for body, valid in (
        (beat(gpu_cache_usage_perc=1.5), False),
        (beat(waiting_requests_num=-4), False),
        (huge + b', "gpu_cache_usage_perc": 1e999}}', False),
        (huge + b', "gpu_cache_usage_perc": 0.5}}', True),
    ):
        assert call(heartbeat_endpoint(registry), body)[0] == 204
        (instance,) = listed(registry)["instances"]
        assert instance["load"]["valid"] is valid


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "ttl_s: missing"),
        ({"ttl_s": 0}, "ttl_s: 0; it must be a number of seconds above 0, at most 86400"),
        ({"ttl_s": -1}, "ttl_s: -1"),
        ({"ttl_s": 86401}, "ttl_s: 86401"),
        ({"ttl_s": "5"}, "ttl_s: must be a number, not text"),
        ({"ttl_s": True}, "ttl_s: must be a number, not a boolean"),
        ({"ttl_s": 5, "dp_size": 0}, "dp_size: 0"),
        ({"ttl_s": 5, "type": 9}, "type: 9"),
        ({"ttl_s": 5, "name": "b:1"}, "name: 'b:1'"),
        ([], "must be an object, not a list"),
        (b"", "not JSON"),
    ],
)
def test_a_registration_that_does_not_fit_is_a_400_with_the_field(
    registry: InstanceRegistry, body: Any, sentence: str
) -> None:
    status, (code, message) = call(put_endpoint(registry), body, "a:1")
    assert status == 400
    assert code in ("invalid_field", "invalid_json")
    assert sentence in message
    assert registry.snapshot().instances == ()


def test_all_faults_of_a_body_are_told_at_once(registry: InstanceRegistry) -> None:
    body = {"dp_size": "2", "type": 9, "register_ts_ms": -1, "tpot_profiling_data": [[1, 2]]}
    status, (code, message) = call(put_endpoint(registry), body, "a b:1")
    assert (status, code) == (400, "invalid_field")
    assert [fault.split(": ")[0] for fault in message.split(". ")] == [
        "dp_size",
        "ttl_s",
        "name",
        "register_ts_ms",
        "type",
        "tpot_profiling_data[0]",
    ]
    heartbeat = {"incarnation_id": 4, "load_metrics": {"waiting_requests_num": 1.5}, "latency_metrics": []}
    status, (code, message) = call(heartbeat_endpoint(registry), heartbeat)
    assert (status, code) == (400, "invalid_field")
    assert {fault.split(": ")[0] for fault in message.split(". ")} == {
        "name",
        "incarnation_id",
        "load_metrics.waiting_requests_num",
        "load_metrics.gpu_cache_usage_perc",
        "latency_metrics",
    }


def test_a_body_that_is_too_long_is_a_413(registry: InstanceRegistry) -> None:
    call(put_endpoint(registry), {"incarnation_id": "one", "ttl_s": 60}, "a:1")
    before = registry.snapshot()
    padding = {"padding": "x" * MAX_VALUE_BYTES}
    for endpoint, body in (
        (put_endpoint(registry), {"incarnation_id": "two", "ttl_s": 60}),
        (heartbeat_endpoint(registry), beat()),
        (delete_endpoint(registry), {}),
    ):
        status, (code, message) = call(endpoint, body | padding, "a:1")
        assert (status, code) == (413, "body_too_large")
        assert "at most 524,288 are allowed" in message
    assert registry.snapshot() is before


def test_a_name_that_cannot_be_one_is_a_400(registry: InstanceRegistry) -> None:
    assert call(put_endpoint(registry), {"ttl_s": 5}, "a b")[0] == 400


def test_a_name_that_is_no_address_registers_and_is_shown_as_one_that_cannot_be_followed(
    registry: InstanceRegistry,
) -> None:
    """Routing can use it, for instance beside static streams of the same name."""
    assert call(put_endpoint(registry), {"ttl_s": 60}, "rubbish") == (204, None)
    found = discover(registry.snapshot().instances, DiscoverySettings(enabled=True), 128)
    (instance,) = listed(registry, dict(found.exclusions))["instances"]
    assert (instance["state"], instance["excluded"]["code"]) == ("ACTIVE", "bad_address")
    assert "host:port" in instance["excluded"]["message"]


def test_delete_gives_a_lease_up(registry: InstanceRegistry) -> None:
    delete = delete_endpoint(registry)
    with closed_port() as port:
        name = f"127.0.0.1:{port}"
        assert call(delete, name=name)[0] == 404
        call(put_endpoint(registry), {"incarnation_id": "one", "ttl_s": 60}, name)
        assert call(delete, {"incarnation_id": "old"}, name)[0] == 409
        assert call(delete, b"{", name)[0] == 400
        assert registry.snapshot().by_name[name].registered
        assert call(delete, name=name) == (204, None)
        wait_until(lambda: registry.snapshot().by_name[name].state is HealthState.SUSPECT)
        assert call(delete, name=name)[0] == 404


def test_with_etcd_instances_do_not_register_here_but_heartbeats_come() -> None:
    registry = InstanceRegistry()
    for endpoint in (put_endpoint(registry), delete_endpoint(registry)):
        status, (code, message) = call(endpoint, {"ttl_s": 5}, "a:1")
        assert (status, code) == (409, "instance_source_etcd")
        assert "--instance-source embedded" in message
    registry.apply([Registered(Registration("a:1", Role.DEFAULT, "one"))])
    assert call(heartbeat_endpoint(registry), beat())[0] == 204

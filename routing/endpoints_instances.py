"""What the routing app answers over HTTP about instances: heartbeat, PUT, DELETE, the list. No framework.

Token, method, size and readiness have been checked before (see `streams.http`). A heartbeat is
answered on the event loop: it computes for some microseconds and waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from routing.instances.core import HeartbeatResult
from routing.instances.model import InstanceView, SourceStatus
from routing.instances.registration import (
    InvalidInputError,
    NotJsonError,
    TooLongError,
    parse_deletion,
    parse_heartbeat,
    parse_leased_registration,
    show,
)
from routing.instances.registry import InstanceRegistry
from streams.http import ApiError, Endpoint, Request, Response, json_response
from streams.status import Fault


def heartbeat_endpoint(registry: InstanceRegistry) -> Endpoint:
    """A sign of life and a load: 204, in force when it is answered. 404 unknown, 409 another life."""

    def heartbeat(request: Request) -> Response:
        try:
            beat = parse_heartbeat(request.body)
        except InvalidInputError as error:
            raise _bad_request(error) from None
        result = registry.heartbeat(beat.name, beat.incarnation_id, beat.load, beat.latency)
        _raise_unless_accepted(result, beat.name, beat.incarnation_id)
        return Response(204)

    return heartbeat


def put_endpoint(registry: InstanceRegistry) -> Endpoint:
    """Register, or register again, with a lease of `ttl_s` seconds: 204. A name that is no address is
    taken as well: routing can use it, only its streams cannot be found (`bad_address`)."""

    def put(request: Request) -> Response:
        _must_be_embedded(registry)
        try:
            registration, ttl = parse_leased_registration(request.params["name"], request.body)
        except InvalidInputError as error:
            raise _bad_request(error) from None
        registry.put(registration, ttl)
        return Response(204)

    return put


def delete_endpoint(registry: InstanceRegistry) -> Endpoint:
    """Give a registration up: 204. A body `{"incarnation_id": ...}` makes it a 409 for another life, so
    that a process that is late to say goodbye does not take its successor down."""

    def delete(request: Request) -> Response:
        _must_be_embedded(registry)
        name = request.params["name"]
        try:
            incarnation_id = parse_deletion(request.body)
        except InvalidInputError as error:
            raise _bad_request(error) from None
        _raise_unless_accepted(registry.delete(name, incarnation_id), name, incarnation_id)
        return Response(204)

    return delete


def list_endpoint(
    registry: InstanceRegistry,
    status: Callable[[], SourceStatus],
    exclusions: Callable[[], Mapping[str, Fault]],
) -> Endpoint:
    """All instances as an operator wants to see them, in name order, and how their source does."""

    def instances(request: Request) -> Response:
        return json_response(instances_document(registry, status(), exclusions()))

    return instances


def instances_document(
    registry: InstanceRegistry, status: SourceStatus, exclusions: Mapping[str, Fault]
) -> dict[str, Any]:
    """`{"instances": [...], "source": {...}}`. Points in time are seconds since the epoch."""
    offset = time.time() - time.monotonic()
    views = sorted(registry.snapshot().instances, key=lambda view: view.name)
    return {
        "instances": [instance_document(view, exclusions.get(view.name), offset) for view in views],
        "source": source_document(status),
    }


def instance_document(view: InstanceView, excluded: Fault | None, offset: float) -> dict[str, Any]:
    """One instance. `offset` turns the registry's times into seconds since the epoch."""
    load, latency = view.load, view.latency
    return {
        "name": view.name,
        "state": view.state,
        "since": view.since + offset,
        "reason": view.reason,
        "role": view.role,
        "current_role": view.current_role,
        "incarnation_id": view.incarnation_id,
        "register_ts_ms": view.registration.register_ts_ms,
        "dp_size": view.dp_size,
        "backend": view.backend,
        "registered": view.registered,
        "heartbeat_at": None if view.heartbeat_at is None else view.heartbeat_at + offset,
        "load": None
        if load is None
        else {
            "waiting_requests_num": load.waiting_requests_num,
            "gpu_cache_usage_perc": load.gpu_cache_usage_perc,
            "valid": load.valid,
            "source": load.source,
            "age_s": max(0.0, time.monotonic() - load.received_at),
        },
        "latency": None
        if latency is None
        else {"recent_max_ttft": latency.recent_max_ttft, "recent_max_tbt": latency.recent_max_tbt},
        "excluded": None if excluded is None else {"code": excluded.code, "message": excluded.sentence},
    }


def source_document(status: SourceStatus) -> dict[str, Any]:
    """How the source of instances does, with the keys that it skips."""
    return {
        "kind": status.kind,
        "connected": status.connected,
        "since": status.since,
        "error": status.error,
        "endpoint": status.endpoint,
        "revision": status.revision,
        "relists": status.relists,
        "reconnects": status.reconnects,
        "invalid": [
            {"key": value.key, "message": value.reason, "revision": value.revision}
            for value in status.invalid
        ],
        "invalid_total": status.invalid_total,
    }


def _must_be_embedded(registry: InstanceRegistry) -> None:
    if not registry.has_leases:
        raise ApiError(
            409,
            "instance_source_etcd",
            "this portal takes its instances from etcd; register there, or start it with "
            "--instance-source embedded",
        )


def _raise_unless_accepted(result: HeartbeatResult, name: str, incarnation_id: str | None) -> None:
    match result:
        case HeartbeatResult.UNKNOWN_INSTANCE:
            raise ApiError(404, "unknown_instance", f"name: no instance {show(name)} is registered")
        case HeartbeatResult.OTHER_INCARNATION:
            given = "missing" if incarnation_id is None else show(incarnation_id)
            raise ApiError(
                409,
                "other_incarnation",
                f"incarnation_id: {given}; another incarnation of {show(name)} is registered",
            )


def _bad_request(error: InvalidInputError) -> ApiError:
    match error:
        case NotJsonError():
            return ApiError(400, "invalid_json", str(error))
        case TooLongError():
            return ApiError(413, "body_too_large", f"the body is {error}")
    return ApiError(400, "invalid_field", str(error))

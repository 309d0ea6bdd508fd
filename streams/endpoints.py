"""What the streams app answers over HTTP: `query`, `GET streams`, `resync`. No framework in here.

Each factory takes what its endpoint needs and returns the function that answers requests. Token,
method, size and readiness have been checked before (see `streams.http`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from streams.body import flag_field, int_field, read_object, read_prompt, text_field
from streams.http import ApiError, Endpoint, Request, Response, json_response
from streams.resync import ResyncOrder, ResyncSource, ResyncTarget, matching
from streams.status import Match, StreamState, StreamStatus

MAX_NAME_LENGTH = 256


class Index(Protocol):
    """The part of the directory that answers queries."""

    def query(self, prompt: bytes) -> Sequence[Match]:
        """How much of a prompt (token IDs as packed little-endian uint32) each stream holds, in
        (instance, rank) order."""


def query_endpoint(index: Index, *, max_query_tokens: int) -> Endpoint:
    """`{"token_ids": [...]}` -> `{"matches": [...]}`, one element per stream. Other keys are ignored.

    Runs on the event loop: `max_query_tokens` bounds how long it holds it.
    """

    def query(request: Request) -> Response:
        prompt = read_prompt(request.body, max_tokens=max_query_tokens).prompt
        return json_response({"matches": [match_json(match) for match in index.query(prompt)]})

    return query


def match_json(match: Match) -> dict[str, Any]:
    """One stream's answer, in the order of the protocol; counts are tokens and blocks."""
    spec = match.spec
    return {
        "instance_name": spec.instance_name,
        "dp_rank": spec.dp_rank,
        "synchronized": match.synchronized,
        "sequence": match.sequence,
        "device_hit_tokens": match.device_hit_tokens,
        "host_only_hit_tokens": match.host_only_hit_tokens,
        "reusable_prefix_tokens": match.reusable_prefix_tokens,
        "device_blocks": match.device_blocks,
        "host_blocks": match.host_blocks,
        "error": None if match.error is None else str(match.error),
        "block_size": spec.block_size,
        "incarnation_id": spec.incarnation,
    }


def streams_endpoint(statuses: Callable[[], Sequence[StreamStatus]]) -> Endpoint:
    """Every live stream as an operator wants to see it: `{"streams": [...]}`, (instance, rank) order."""

    def streams(request: Request) -> Response:
        return json_response({"streams": [status_json(status) for status in statuses()]})

    return streams


def status_json(status: StreamStatus) -> dict[str, Any]:
    """Times are seconds since the epoch; `error` and `warning` are `code: sentence` or null."""
    spec, snapshot = status.spec, status.last_snapshot
    return {
        "instance_name": spec.instance_name,
        "dp_rank": spec.dp_rank,
        "state": status.state.value,
        "synchronized": status.state is StreamState.SYNCHRONIZED,
        "since": status.since,
        "error": None if status.error is None else str(status.error),
        "warning": None if status.warning is None else str(status.warning),
        "sequence": status.sequence,
        "device_blocks": status.device_blocks,
        "host_blocks": status.host_blocks,
        "mapped_blocks": status.mapped_blocks,
        "last_event_at": status.last_event_at,
        "lag_seconds": status.lag_seconds,
        "last_snapshot": None
        if snapshot is None
        else {
            "at": snapshot.at,
            "watermark": snapshot.watermark,
            "size_bytes": snapshot.size_bytes,
            "seconds": snapshot.seconds,
            "count": snapshot.count,
        },
        "counters": dict(status.counters),
        "endpoint": spec.endpoint,
        "replay_endpoint": spec.replay_endpoint,
        "topic": spec.topic,
        "block_size": spec.block_size,
        "incarnation_id": spec.incarnation,
    }


def resync_endpoint(
    statuses: Callable[[], Sequence[StreamStatus]],
    order: Callable[[ResyncOrder], int],
    *,
    clock: Callable[[], float] = time.time,
) -> Endpoint:
    """`{"instance_name"?, "dp_rank"?, "drop"?}` -> 202 `{"streams": n}`; 404 when none matches.

    Without a name or a rank, or without any body, it means every stream, so a key that it does not know
    is refused: a typing error must not resynchronise everything. `order` passes the order on, leaves the
    audit, and returns the number of streams it concerns here; it must not wait for anything.
    """

    def resync(request: Request) -> Response:
        fields = read_object(request.body or b"{}", known=("instance_name", "dp_rank", "drop"))
        target = ResyncTarget(
            text_field(fields, "instance_name", max_length=MAX_NAME_LENGTH), int_field(fields, "dp_rank")
        )
        drop = flag_field(fields, "drop")
        if not matching((target,), (status.spec.id for status in statuses())):
            raise ApiError(404, "not_found", _no_stream(target))
        placed = ResyncOrder(
            actor=request.actor, source=ResyncSource.API, at=clock(), targets=(target,), drop=drop
        )
        return json_response({"streams": order(placed)}, 202)

    return resync


def _no_stream(target: ResyncTarget) -> str:
    """That none matches, in a sentence that says where to look."""
    if target.instance_name is not None:
        return f"no stream matches {target}; see GET /v1/internal/streams"
    if target.dp_rank is not None:
        return f"no instance has a stream of rank {target.dp_rank}; see GET /v1/internal/streams"
    return "no stream is followed, so there is nothing to resynchronise; see GET /v1/internal/instances"

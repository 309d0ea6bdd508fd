"""The rows of the history and of the replicas: each function writes or reads one kind, and nothing else.

Called on the history's thread only (`kvportal.history`), inside its error handling; a function may
be called again with the same values after a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import models, transaction

from kvportal.models import Replica
from streams.models import NAME_LENGTH, ResyncRequest, ResyncResult, Stream, StreamStateChange
from streams.resync import ResyncOrder, ResyncOutcome
from streams.spec import StreamId, StreamSpec
from streams.status import StreamChange

SEEN_EVERY = timedelta(minutes=1)
"""How stale `Stream.last_seen` may get before it is written again."""
ORDER_LIFETIME = timedelta(minutes=5)
"""An order that a replica has not heard of for so long is not carried out any more."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much history is kept. Whatever bound is met first applies; days and rows."""

    change_days: float = 30.0
    change_rows: int = 200_000
    resync_days: float = 365.0
    resync_rows: int = 20_000
    stream_days: float = 30.0
    """After so many days without being followed, a stream leaves the list."""
    replica_hours: float = 24.0
    """How long a replica that stopped writing is still shown, as gone."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What one replica wrote last."""

    name: str
    started_at: float
    heartbeat_at: float
    state: Mapping[str, Any]


def wall(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def write_changes(replica: str, changes: Sequence[StreamChange]) -> None:
    StreamStateChange.objects.bulk_create(
        StreamStateChange(
            at=wall(change.at),
            replica=replica,
            instance_name=change.spec.instance_name[:NAME_LENGTH],
            dp_rank=change.spec.dp_rank,
            old_state=str(change.old),
            new_state=str(change.new),
            code=change.fault.code if change.fault else "",
            sentence=change.fault.sentence if change.fault else "",
            detail=change.detail,
        )
        for change in changes
    )


def write_outcome(outcome: ResyncOutcome) -> None:
    """One replica's outcome; the latest replaces the ones before."""
    ResyncResult.objects.update_or_create(
        request=ResyncRequest.record(outcome.order),
        replica=outcome.replica,
        defaults={
            "at": wall(outcome.at),
            "state": str(outcome.state),
            "reached": outcome.reached,
            "settled": outcome.settled,
            "detail": outcome.detail,
        },
    )


def latest_order_id() -> int:
    """The newest order's row number; 0 without one."""
    return ResyncRequest.objects.aggregate(newest=models.Max("id"))["newest"] or 0


def open_orders(replica: str, after_id: int, now: float) -> list[ResyncOrder]:
    """Orders behind `after_id` that `replica` has no outcome for and that are not too old."""
    done = ResyncResult.objects.filter(request=models.OuterRef("pk"), replica=replica)
    rows = ResyncRequest.objects.filter(id__gt=after_id, at__gte=wall(now) - ORDER_LIFETIME)
    return [row.order for row in rows.exclude(models.Exists(done)).order_by("id")]


def touch_streams(specs: Iterable[StreamSpec], now: float) -> None:
    """Make sure that every stream followed has its row, with the endpoints in use. Two queries at most
    when nothing changed, a handful when much did."""
    at = wall(now)
    wanted = {(spec.instance_name[:NAME_LENGTH], spec.dp_rank): spec for spec in specs}
    rows = {(row.instance_name, row.dp_rank): row for row in Stream.objects.all()}
    missing = [
        Stream(instance_name=name, dp_rank=rank, **_endpoints(spec), first_seen=at, last_seen=at)
        for (name, rank), spec in wanted.items()
        if (name, rank) not in rows
    ]
    stale = [row for key, row in rows.items() if key in wanted and _refresh(row, wanted[key], at)]
    if missing:
        # Another replica may have been faster.
        Stream.objects.bulk_create(missing, ignore_conflicts=True)
    if stale:
        Stream.objects.bulk_update(stale, ["endpoint", "replay_endpoint", "last_seen"])


def leave_streams(streams: Iterable[StreamId], now: float) -> None:
    """Note to the second when these were last followed here. A query for each: streams leave seldom."""
    for stream in streams:
        rows = Stream.objects.filter(instance_name=stream.instance_name[:NAME_LENGTH], dp_rank=stream.dp_rank)
        rows.update(last_seen=wall(now))


def _endpoints(spec: StreamSpec) -> dict[str, str]:
    return {"endpoint": spec.endpoint[:NAME_LENGTH], "replay_endpoint": spec.replay_endpoint[:NAME_LENGTH]}


def _refresh(row: Stream, spec: StreamSpec, at: datetime) -> bool:
    endpoints = _endpoints(spec)
    moved = (row.endpoint, row.replay_endpoint) != tuple(endpoints.values())
    if not moved and at - row.last_seen < SEEN_EVERY:
        return False
    row.endpoint, row.replay_endpoint = endpoints.values()
    row.last_seen = at
    return True


def write_replica(view: ReplicaView) -> None:
    Replica.objects.update_or_create(
        name=view.name,
        defaults={
            "started_at": wall(view.started_at),
            "heartbeat_at": wall(view.heartbeat_at),
            "state": view.state,
        },
    )


def forget_replica(name: str) -> None:
    """An orderly shutdown leaves no row that would look like an outage."""
    Replica.objects.filter(name=name).delete()


def read_replicas() -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(row.name, row.started_at.timestamp(), row.heartbeat_at.timestamp(), row.state)
        for row in Replica.objects.all()
    )


def prune(retention: Retention, now: float) -> int:
    """Delete what is beyond the retention; the number of rows that went."""
    at = wall(now)
    gone = 0
    with transaction.atomic():
        for manager, days, rows in (
            (StreamStateChange.objects, retention.change_days, retention.change_rows),
            (ResyncRequest.objects, retention.resync_days, retention.resync_rows),
        ):
            gone += manager.filter(at__lt=at - timedelta(days=days)).delete()[0]
            surplus = manager.order_by("-id").values_list("id", flat=True)[rows : rows + 1].first()
            if surplus is not None:
                gone += manager.filter(id__lte=surplus).delete()[0]
        gone += Stream.objects.filter(last_seen__lt=at - timedelta(days=retention.stream_days)).delete()[0]
        silent = at - timedelta(hours=retention.replica_hours)
        gone += Replica.objects.filter(heartbeat_at__lt=silent).delete()[0]
    return gone

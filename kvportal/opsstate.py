"""The state of the portal as the Operations page gets it: values in, plain JSON values out. Pure.

One dictionary describes everything the page shows; it is serialised once for all open pages. Times
are wall-clock seconds since the epoch, so that a page counts "since" by itself and an unchanged
stream stays an unchanged value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvportal.history import HistoryHealth
from kvportal.records import ReplicaView
from kvportal.trends import Trends
from streams.advice import STARTING_CODES, advice
from streams.spec import StreamId
from streams.status import Fault, StreamState, StreamStatus
from streams.wording import counted, some_of

REPLICA_GONE_SECONDS = 15.0
"""A replica whose row has not changed for so long is shown as gone."""
REPLICA_STALE_SECONDS = 60.0
"""A row that is so old when it is first read is a leftover; less may be a difference of clocks."""
SILENT_SECONDS = 300.0
"""A stream that has been followed for so long without one live event gets a hint."""
NO_HIT_SECONDS = 3600.0
NAMED_RANKS = 8
SKEW_SECONDS = -0.05
"""A lag below this is not noise: the engine's clock is ahead of ours."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Banner:
    """Something that concerns the whole page: `level` is `error`, `warning` or `info`."""

    code: str
    level: str
    title: str
    text: str

    def to_json(self) -> Json:
        return {"code": self.code, "level": self.level, "title": self.title, "text": self.text}


INDEX_OFF = Banner(
    "index_off",
    "info",
    "The index is off",
    "No stream is followed and queries answer kv_events_disabled. "
    "Start the portal with --kv-events-config-file to follow streams.",
)


def no_streams(discovery: bool) -> Banner:
    """What to do when the index is on and empty."""
    if discovery:
        text = (
            "No registered instance offers one yet. Instances appear when they register; the Instances "
            "section tells why one is left out."
        )
    else:
        text = "The KV events file lists none and discovery is off. Add streams to it, or turn discovery on."
    return Banner("no_streams", "info", "There are no streams", text)


def history_banner(health: HistoryHealth) -> Banner | None:
    if health.error is None:
        return None
    return Banner(
        "history_failing",
        "warning",
        "History and audit are not being saved",
        f"The database fails ({health.error}). Waiting to be written: {counted(health.queued, 'record')}. "
        f"Lost: {health.dropped:,}. Streams and queries are not affected.",
    )


def worker_banner(error: str | None) -> Banner | None:
    if error is None:
        return None
    return Banner(
        "worker_failing",
        "warning",
        "Orders reach other replicas late",
        f"The channel layer fails ({error}). Orders travel through the database until it is back.",
    )


def stream_json(
    status: StreamStatus, trends: Trends, now: float, hints: Sequence[str], elsewhere: Sequence[Json]
) -> Json:
    snapshot = status.last_snapshot
    return {
        "instance": status.spec.instance_name,
        "rank": status.spec.dp_rank,
        "state": str(status.state),
        "since": round(trends.lost_since(status.spec.id) or status.since, 1),
        "changed": round(status.since, 1),
        "starting": status.error is not None and status.error.code in STARTING_CODES,
        "error": _fault(status.error),
        "warning": _fault(status.warning),
        "advice": advice(status.error or status.warning, status.spec),
        "hints": list(hints),
        "elsewhere": list(elsewhere),
        "sequence": status.sequence,
        "device": status.device_blocks,
        "host": status.host_blocks,
        "mapped": status.mapped_blocks,
        "events": trends.stream_rate(status.spec.id),
        "last_event": None if status.last_event_at is None else round(status.last_event_at),
        "lag": None if status.lag_seconds is None else round(status.lag_seconds, 4),
        "snapshot": snapshot
        and {
            "at": round(snapshot.at, 1),
            "watermark": snapshot.watermark,
            "bytes": snapshot.size_bytes,
            "seconds": round(snapshot.seconds, 4),
            "count": snapshot.count,
        },
        "gaps": status.counters.get("gaps", 0),
        "endpoint": status.spec.endpoint,
        "replay_endpoint": status.spec.replay_endpoint,
    }


def _fault(fault: Fault | None) -> Json | None:
    return None if fault is None else {"code": fault.code, "sentence": fault.sentence}


def stream_hints(
    status: StreamStatus,
    first_seen: float | None,
    now: float,
    last_hit: float | None,
    traffic_since: float | None,
) -> tuple[str, ...]:
    """What an operator should look at although nothing failed.

    `last_hit`: when the stream last brought a hit; `traffic_since`: since when queries have been coming in
    without a pause. Both None where nothing measures them.
    """
    hints = []
    watched = now - first_seen if first_seen is not None else 0.0
    if (
        status.state is StreamState.SYNCHRONIZED
        and status.last_event_at is None
        and watched >= SILENT_SECONDS
    ):
        hints.append(
            "No live event since it was connected. If the engine serves requests, check that it publishes "
            "KV events for this rank and that the topic is the same on both sides."
        )
    if status.lag_seconds is not None and status.lag_seconds < SKEW_SECONDS:
        hints.append(
            f"Events arrive {-status.lag_seconds:.1f} s before they were sent: the engine's clock is ahead "
            "of this machine's. Check the time service (NTP) on both."
        )
    serving = status.state is StreamState.SYNCHRONIZED and watched >= NO_HIT_SECONDS
    if serving and traffic_since is not None and now - traffic_since >= NO_HIT_SECONDS:
        if last_hit is None or now - last_hit >= NO_HIT_SECONDS:
            hints.append(
                "No query found a block here in an hour of traffic. Check that prompts are tokenized as the "
                "engine does it and that the block size is the engine's."
            )
    return tuple(hints)


def missing_ranks(statuses: Iterable[StreamStatus]) -> dict[str, tuple[int, ...]]:
    """Instances whose ranks have holes: rank 2 is followed, rank 1 is not."""
    ranks: dict[str, set[int]] = {}
    for status in statuses:
        ranks.setdefault(status.spec.instance_name, set()).add(status.spec.dp_rank)
    holes = {name: tuple(sorted(set(range(max(found))) - found)) for name, found in ranks.items()}
    return {name: missing for name, missing in holes.items() if missing}


def _missing_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]} of this instance is not followed; its hits are unknown."
    named = some_of(ranks, NAMED_RANKS)
    return f"Ranks {named} of this instance are not followed; their hits are unknown."


def replica_state(statuses: Iterable[StreamStatus]) -> Json:
    """What a replica writes for the others: its own view of each stream, in short."""
    return {
        "streams": {
            str(status.spec.id): {
                "state": str(status.state),
                "since": round(status.since, 1),
                "error": None if status.error is None else str(status.error),
                "sequence": status.sequence,
                "device": status.device_blocks,
                "host": status.host_blocks,
            }
            for status in statuses
        }
    }


def streams_seen(view: ReplicaView) -> frozenset[StreamId]:
    """The streams that a replica followed when it wrote; see `replica_state`."""
    found = map(StreamId.read, view.state.get("streams", {}))
    return frozenset(stream for stream in found if stream is not None)


class Presence:
    """Which replicas still write. Judged by whether their heartbeat moves on, not by its value: the
    clocks of two machines may differ by more than a heartbeat."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[float, float]] = {}

    def gone(self, views: Iterable[ReplicaView], now: float) -> frozenset[str]:
        """Names of the replicas that are gone, after reading their rows at `now`."""
        names = set()
        moved = {}
        for view in views:
            heartbeat, at = self._moved.get(view.name, (None, now))
            if heartbeat is None and now - view.heartbeat_at > REPLICA_STALE_SECONDS:
                at = view.heartbeat_at
            elif heartbeat != view.heartbeat_at:
                at = now
            moved[view.name] = (view.heartbeat_at, at)
            if now - at > REPLICA_GONE_SECONDS:
                names.add(view.name)
        self._moved = moved
        return frozenset(names)


def replicas_json(views: Sequence[ReplicaView], gone: frozenset[str], own_name: str) -> list[Json]:
    result = []
    for view in views:
        streams = view.state.get("streams", {})
        result.append(
            {
                "name": view.name,
                "own": view.name == own_name,
                "gone_since": round(view.heartbeat_at, 1) if view.name in gone else None,
                "started": round(view.started_at, 1),
                "streams": len(streams),
                "synchronized": sum(s.get("state") == StreamState.SYNCHRONIZED for s in streams.values()),
            }
        )
    return result


def disagreeing(status: StreamStatus, others: Iterable[ReplicaView]) -> list[Json]:
    """Replicas that see the stream in another state, with what they say about it."""
    result = []
    for view in others:
        seen = view.state.get("streams", {}).get(str(status.spec.id))
        if seen is None:
            result.append({"replica": view.name, "state": "absent", "error": None})
        elif seen["state"] != status.state:
            result.append({"replica": view.name, "state": seen["state"], "error": seen["error"]})
    return result


@dataclass(frozen=True, slots=True)
class Picture:
    """All that goes into one state."""

    now: float
    replica: str
    statuses: tuple[StreamStatus, ...]
    trends: Trends
    banners: Sequence[Banner]
    views: Sequence[ReplicaView] = ()
    gone: frozenset[str] = frozenset()
    """Names of the replicas that stopped writing."""
    last_hits: Mapping[StreamId, float] | None = None
    traffic_since: float | None = None
    extras: Mapping[str, Any] | None = None
    """Sections that exist only where routing runs: `instances`, `decisions`."""


def build(picture: Picture) -> Json:
    """The whole state, without version and time, so that equal states are equal values."""
    now, trends = picture.now, picture.trends
    holes = missing_ranks(picture.statuses)
    others = [view for view in picture.views if view.name not in picture.gone | {picture.replica}]
    streams = []
    for status in picture.statuses:
        last_hit = (picture.last_hits or {}).get(status.spec.id)
        hints = list(
            stream_hints(status, trends.first_seen(status.spec.id), now, last_hit, picture.traffic_since)
        )
        if status.spec.instance_name in holes:
            hints.append(_missing_text(holes[status.spec.instance_name]))
        streams.append(stream_json(status, trends, now, hints, disagreeing(status, others)))
    cards = {name: value for name, value in trends.newest().items() if name != "at"}
    return {
        "replica": picture.replica,
        "banners": [banner.to_json() for banner in picture.banners],
        "cards": {**cards, "streams": len(picture.statuses)},
        "streams": streams,
        "replicas": replicas_json(picture.views, picture.gone, picture.replica),
        **(picture.extras or {}),
    }

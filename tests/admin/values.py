"""Values of streams for tests: no engine, no socket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streams.spec import StreamId, StreamSpec
from streams.status import Fault, SnapshotInfo, StreamChange, StreamState, StreamStatus

NOW = 1_800_000_000.0
GAP = Fault("sequence_gap", "message 12 followed 9: 2 missing")


def spec(number: int = 1, rank: int = 0) -> StreamSpec:
    port = 20_000 + 10 * number + rank
    return StreamSpec(
        f"10.0.0.{number}:8000",
        rank,
        f"tcp://10.0.0.{number}:{port}",
        f"tcp://10.0.0.{number}:{port + 20_000}",
    )


def status(
    number: int = 1,
    rank: int = 0,
    *,
    state: StreamState = StreamState.SYNCHRONIZED,
    since: float = NOW - 100,
    error: Fault | None = None,
    snapshot_at: float | None = NOW - 50,
    counters: Mapping[str, int] | None = None,
    **changes: Any,
) -> StreamStatus:
    serves = state is StreamState.SYNCHRONIZED
    values: dict[str, Any] = {
        "spec": spec(number, rank),
        "state": state,
        "since": since,
        "error": error,
        "warning": None,
        "sequence": 40 if serves else None,
        "device_blocks": 30 if serves else 0,
        "host_blocks": 10 if serves else 0,
        "mapped_blocks": 45,
        "last_event_at": NOW - 1,
        "lag_seconds": 0.002,
        "last_snapshot": snapshot_at and SnapshotInfo(snapshot_at, 7, 2048, 0.01, 1),
        "counters": counters or {},
    }
    return StreamStatus(**{**values, **changes})


def lost(number: int = 1, rank: int = 0, **changes: Any) -> StreamStatus:
    return status(number, rank, **{"state": StreamState.UNSYNCHRONIZED, "error": GAP, **changes})


def change(number: int = 1, *, at: float = NOW, fault: Fault | None = GAP, **changes: Any) -> StreamChange:
    values = {"old": StreamState.SYNCHRONIZED, "new": StreamState.UNSYNCHRONIZED, **changes}
    return StreamChange(at, spec(number), values["old"], values["new"], fault, values.get("detail", ""))


class FakeDirectory:
    """Remembers what it was told; its statuses are whatever the test sets."""

    def __init__(self, *statuses: StreamStatus) -> None:
        self.now_statuses: tuple[StreamStatus, ...] = statuses
        self.told: list[tuple[StreamId, bool]] = []
        self.failure: Exception | None = None

    def statuses(self) -> tuple[StreamStatus, ...]:
        return self.now_statuses

    def resync(
        self, *, instance_name: str | None = None, dp_rank: int | None = None, drop: bool = False
    ) -> tuple[StreamId, ...]:
        if self.failure is not None:
            raise self.failure
        reached = tuple(
            one.spec.id
            for one in self.now_statuses
            if instance_name in (None, one.spec.instance_name) and dp_rank in (None, one.spec.dp_rank)
        )
        self.told += [(stream, drop) for stream in reached]
        return reached


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

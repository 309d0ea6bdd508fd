"""What the streams app tells: immutable pictures of live streams and of query results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from streams.spec import StreamSpec


class StreamState(StrEnum):
    """Where a stream is in its life (events.md, section 4)."""

    CONNECTING = "connecting"
    SYNCING = "syncing"
    SYNCHRONIZED = "synchronized"
    UNSYNCHRONIZED = "unsynchronized"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why something does not work: a stable code and a sentence a person can act on."""

    code: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The last snapshot that was put in service."""

    at: float
    """Wall clock, seconds since the epoch."""
    watermark: int
    size_bytes: int
    seconds: float
    """From the request to the swap."""
    count: int
    """How many snapshots have been put in service since the stream was created."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream as operators see it. Taken at one moment; never changes afterwards."""

    spec: StreamSpec
    state: StreamState
    since: float
    """Wall clock of the last change of state, seconds since the epoch."""
    error: Fault | None
    """Why it does not serve; None while it does."""
    warning: Fault | None
    """What is wrong although it serves (failed calibration, unknown events, throttled, ...)."""
    sequence: int | None
    """Last message in the serving view; None when nothing is served."""
    device_blocks: int
    host_blocks: int
    mapped_blocks: int
    """Entries of the block-hash map, retained ones, orphans and opaque blocks included."""
    last_event_at: float | None
    """Wall clock at which the last live message arrived."""
    lag_seconds: float | None
    """Batch timestamp to visible, of the last batch; negative when clocks disagree."""
    last_snapshot: SnapshotInfo | None
    counters: Mapping[str, int] = field(default_factory=dict)
    """Monotonic counters since the stream was created. Keys: `messages`, `bytes`,
    `events:<type>`, `resyncs:<reason>`, `gaps`, `warnings:<kind>`, `drift:<absent|unclaimed>`,
    `throttled_ms`."""


class Match(NamedTuple):
    """How much of one prompt one stream holds. Token counts; zeros when unsynchronized.

    A NamedTuple, because a query makes one for each of up to 128 streams.
    """

    spec: StreamSpec
    synchronized: bool
    sequence: int | None
    device_hit_tokens: int
    host_only_hit_tokens: int
    device_blocks: int
    host_blocks: int
    error: Fault | None

    @property
    def reusable_prefix_tokens(self) -> int:
        return self.device_hit_tokens + self.host_only_hit_tokens


@dataclass(frozen=True, slots=True)
class StreamChange:
    """One step in a stream's life, for the history that operators read."""

    at: float
    """Wall clock, seconds since the epoch."""
    spec: StreamSpec
    old: StreamState
    new: StreamState
    fault: Fault | None
    """The reason for losing sync; None when nothing was wrong."""
    detail: str = ""
    """What happened, in a few words (`snapshot at watermark 17, 1,024 blocks`)."""

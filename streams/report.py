"""What people see of one stream: counters, warnings, times, and the steps of its life.

Written by the stream's own thread; read from any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from streams.core.events import Batch, Skipped
from streams.core.reply import SnapshotReply
from streams.spec import StreamSpec
from streams.status import Fault, SnapshotInfo, StreamChange, StreamState

log = logging.getLogger(__name__)

NOTICE_SECONDS = 600.0
"""How long a warning about skipped events is shown after the last of them."""

MAX_LAG = 366 * 86_400.0
"""Seconds; a timestamp further off is no clock skew but nonsense, and one would spoil every mean."""


class StreamMetrics(Protocol):
    """Where a stream's measurements go."""

    def observe_lag(self, seconds: float) -> None:
        """Batch timestamp to visible."""

    def observe_snapshot(self, seconds: float) -> None:
        """Request to visible."""


class NullMetrics:
    """Measurements that nobody wants."""

    def observe_lag(self, seconds: float) -> None:
        pass

    def observe_snapshot(self, seconds: float) -> None:
        pass


class StreamReport:
    """See the module's text. `wall` tells seconds since the epoch."""

    def __init__(
        self,
        spec: StreamSpec,
        wall: Callable[[], float],
        on_change: Callable[[StreamChange], None],
        metrics: StreamMetrics,
    ) -> None:
        self._spec = spec
        self._wall = wall
        self._on_change = on_change
        self._metrics = metrics
        self.counters: dict[str, int] = {"messages": 0, "bytes": 0, "gaps": 0}
        self.since = wall()
        self.last_event_at: float | None = None
        self.lag: float | None = None
        self.last_snapshot: SnapshotInfo | None = None
        self.detail = ""
        """What has just happened, in a few words; goes into the next step of the history."""
        self._told: tuple[StreamState, Fault | None] | None = None
        self._notice: tuple[float, Fault] | None = None
        self._throttled = 0.0

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def received(self, size: int) -> None:
        """A live message arrived."""
        self.count("messages")
        self.count("bytes", size)
        self.last_event_at = self._wall()

    def decoded(self, batch: Batch) -> None:
        for event in batch.events:
            self.count(f"events:{type(event).__name__}")
        self.skipped(batch.warnings)

    def skipped(self, warnings: Iterable[Skipped]) -> None:
        """Events that this version does not know, or does not index."""
        for skipped in warnings:
            self.count(f"warnings:{skipped.kind}", skipped.count)
            self._notice = (self._wall(), Fault(skipped.kind, skipped.sentence))

    def throttled(self, seconds: float) -> None:
        """The stream had to sleep because it used more than its share."""
        self._throttled += seconds
        self.counters["throttled_ms"] = round(self._throttled * 1000)
        sentence = "the engine sends more than a quarter of a core can take; the stream is slowed down"
        self._notice = (self._wall(), Fault("throttled", sentence))

    def visible(self, batch: Batch) -> None:
        """A batch reached the view."""
        lag = self._wall() - batch.timestamp
        if abs(lag) <= MAX_LAG:
            self.lag = lag
            self._metrics.observe_lag(lag)

    def snapshot(self, reply: SnapshotReply, seconds: float) -> None:
        """A snapshot was put in service, or confirmed what is, `seconds` after its request."""
        count = 1 if self.last_snapshot is None else self.last_snapshot.count + 1
        self.last_snapshot = SnapshotInfo(self._wall(), reply.watermark, reply.size, seconds, count)
        self._metrics.observe_snapshot(seconds)

    def tell(self, state: StreamState, fault: Fault | None) -> None:
        """A step for the history, if this is another state or another kind of fault."""
        before, self._told = self._told, (state, fault)
        detail, self.detail = self.detail, ""
        old = StreamState.CONNECTING if before is None else before[0]
        if before is not None and (old, _code(before[1])) == (state, _code(fault)):
            return
        if old is not state:
            self.since = self._wall()
        try:
            self._on_change(StreamChange(self._wall(), self._spec, old, state, fault, detail))
        except Exception:
            # The stream serves all the same.
            log.exception("stream %s: its history could not be told", self._spec.id)

    @property
    def notice(self) -> Fault | None:
        """The last thing worth a warning, for a while."""
        if self._notice is None or self._wall() - self._notice[0] > NOTICE_SECONDS:
            return None
        return self._notice[1]


def _code(fault: Fault | None) -> str | None:
    return None if fault is None else fault.code

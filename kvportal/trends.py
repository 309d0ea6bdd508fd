"""Rates and the last ten minutes, kept from one observation per second. Pure: time is an argument.

What streams and routing count only ever grows; people read rates. `Trends` is told the totals once a
second and answers with the numbers of the cards, the series of the small charts and each stream's
own rate and series.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from streams.spec import StreamId
from streams.status import StreamState, StreamStatus

SERIES_SECONDS = 600
STREAM_STEP_SECONDS = 5
RATE_SECONDS = 5.0
"""Rates are averages over so many seconds."""

CARD_COLUMNS = ("at", "synchronized", "device", "host", "events", "queries", "decisions", "hit_ratio")
STREAM_COLUMNS = ("at", "device", "host", "events", "lag")

Point = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of the whole portal since its start. None: there is no such thing here."""

    queries: int | None = None
    decisions: int | None = None
    predicted_hit_sum: float = 0.0
    """Sum of the predicted hit ratios of `predicted_hit_count` decisions."""
    predicted_hit_count: int = 0


@dataclass(slots=True)
class _Stream:
    first_seen: float
    counted: int
    """What the stream's own event counters said last; they restart when the stream is new."""
    events: int = 0
    lost_since: float | None = None
    """Since when it has not been synchronized, however often it tried; None while it is."""
    recent: deque[tuple[float, float]] = field(default_factory=deque)
    series: deque[Point] = field(default_factory=lambda: deque(maxlen=SERIES_SECONDS // STREAM_STEP_SECONDS))
    next_point: float = 0.0


class Trends:
    """The observations of the last minutes. Not thread-safe: one thread observes, readers get copies."""

    def __init__(self) -> None:
        self._streams: dict[StreamId, _Stream] = {}
        self._events = 0
        self._recent: dict[str, deque[tuple[float, float]]] = {
            name: deque() for name in ("events", "queries", "decisions", "hit_sum", "hit_count")
        }
        self._series: deque[Point] = deque(maxlen=SERIES_SECONDS)
        self._last = 0.0
        """Wall clock of the last observation."""

    def observe(self, now: float, statuses: Iterable[StreamStatus], totals: Totals) -> None:
        """Take in one observation; `now` is the wall clock, seconds. Where it was set back, what was seen
        after `now` is forgotten: charts and rates go on from here."""
        statuses = tuple(statuses)
        if now < self._last:
            self._forget_after(now)
        self._last = now
        self._observe_streams(now, statuses)
        _push(self._recent["events"], now, self._events)
        if totals.queries is not None:
            _push(self._recent["queries"], now, totals.queries)
        if totals.decisions is not None:
            _push(self._recent["decisions"], now, totals.decisions)
            _push(self._recent["hit_sum"], now, totals.predicted_hit_sum)
            _push(self._recent["hit_count"], now, totals.predicted_hit_count)
        self._series.append(
            (
                round(now, 1),
                sum(status.state is StreamState.SYNCHRONIZED for status in statuses),
                sum(status.device_blocks for status in statuses),
                sum(status.host_blocks for status in statuses),
                self.rate("events"),
                self.rate("queries"),
                self.rate("decisions"),
                self.hit_ratio(),
            )
        )

    def _observe_streams(self, now: float, statuses: tuple[StreamStatus, ...]) -> None:
        gone = self._streams.keys() - {status.spec.id for status in statuses}
        for stream in gone:
            del self._streams[stream]
        for status in statuses:
            counted = event_count(status)
            known = self._streams.get(status.spec.id)
            if known is None:
                known = self._streams[status.spec.id] = _Stream(now, counted)
            grown = counted - known.counted if counted >= known.counted else counted
            known.counted = counted
            if status.state is StreamState.SYNCHRONIZED:
                known.lost_since = None
            elif known.lost_since is None:
                known.lost_since = status.since
            known.events += grown
            self._events += grown
            _push(known.recent, now, known.events)
            if now >= known.next_point:
                known.next_point = now + STREAM_STEP_SECONDS
                known.series.append(_stream_point(now, status, _rate(known.recent)))

    def _forget_after(self, now: float) -> None:
        for recent in self._recent.values():
            _drop_after(recent, now)
        _drop_after(self._series, now)
        for known in self._streams.values():
            _drop_after(known.recent, now)
            _drop_after(known.series, now)
            known.first_seen = min(known.first_seen, now)
            known.next_point = min(known.next_point, now)
            if known.lost_since is not None:
                known.lost_since = min(known.lost_since, now)

    # ---- the cards

    def rate(self, name: str) -> float | None:
        """`events`, `queries` or `decisions` per second; None where nothing counts them."""
        return _rate(self._recent[name])

    def hit_ratio(self) -> float | None:
        """Mean predicted hit ratio of the last decisions; None without any."""
        counts, sums = self._recent["hit_count"], self._recent["hit_sum"]
        if len(counts) < 2 or counts[-1][1] <= counts[0][1]:
            return None
        return round((sums[-1][1] - sums[0][1]) / (counts[-1][1] - counts[0][1]), 4)

    def series(self) -> dict[str, list[float | None]]:
        """The last ten minutes of the cards, by column (`CARD_COLUMNS`)."""
        return _columns(CARD_COLUMNS, self._series)

    def newest(self) -> dict[str, float | None]:
        return dict(zip(CARD_COLUMNS, self._series[-1], strict=True)) if self._series else {}

    # ---- one stream

    def stream_rate(self, stream: StreamId) -> float | None:
        known = self._streams.get(stream)
        return _rate(known.recent) if known else None

    def first_seen(self, stream: StreamId) -> float | None:
        """Wall clock at which the stream was first observed."""
        known = self._streams.get(stream)
        return known.first_seen if known else None

    def lost_since(self, stream: StreamId) -> float | None:
        """Wall clock since which the stream has not been synchronized, attempts in between included."""
        known = self._streams.get(stream)
        return known.lost_since if known else None

    def stream_series(self, stream: StreamId) -> dict[str, list[float | None]] | None:
        """The last ten minutes of one stream, by column (`STREAM_COLUMNS`), a point every 5 s."""
        known = self._streams.get(stream)
        return _columns(STREAM_COLUMNS, known.series) if known else None


def event_count(status: StreamStatus) -> int:
    """All events that the stream has applied, of whatever type."""
    return sum(count for name, count in status.counters.items() if name.startswith("events:"))


def _stream_point(now: float, status: StreamStatus, rate: float | None) -> Point:
    lag = None if status.lag_seconds is None else round(status.lag_seconds, 4)
    return (round(now, 1), status.device_blocks, status.host_blocks, rate, lag)


def _push(recent: deque[tuple[float, float]], now: float, total: float) -> None:
    """Keep the totals of the last `RATE_SECONDS` and the one before, to measure from."""
    recent.append((now, total))
    while len(recent) > 2 and now - recent[1][0] >= RATE_SECONDS:
        recent.popleft()


def _drop_after(points: deque[Any], now: float) -> None:
    """Points in the order of their times, which come first in each."""
    while points and points[-1][0] >= now:
        points.pop()


def _rate(recent: deque[tuple[float, float]]) -> float | None:
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return None
    return round(max(0.0, (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])), 1)


def _columns(names: tuple[str, ...], points: Iterable[Point]) -> dict[str, list[float | None]]:
    points = tuple(points)
    return {name: [point[index] for point in points] for index, name in enumerate(names)}

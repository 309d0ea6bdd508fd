"""Notices which streams bring hits, for the hint on those that never do.

Stands in front of the index and passes queries through. Only some of the queries are looked at: over
an hour of traffic that is more than enough, and it costs a busy portal nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from streams.spec import StreamId
from streams.status import Match

LOOK_EVERY_SECONDS = 0.05
PAUSE_SECONDS = 300.0
"""Without a query for so long, traffic counts as interrupted."""


class Index(Protocol):
    def query(self, prompt: bytes) -> Sequence[Match]: ...


class HitWatch:
    """An index that remembers when each stream last brought a hit. Thread-safe: it only overwrites."""

    def __init__(self, index: Index, *, clock: Callable[[], float] = time.time) -> None:
        self._index = index
        self._clock = clock
        self._next_look = 0.0
        self._traffic_since: float | None = None
        self._last_query = 0.0
        self._last_hits: dict[StreamId, float] = {}

    def query(self, prompt: bytes) -> Sequence[Match]:
        matches = self._index.query(prompt)
        now = self._clock()
        if now >= self._next_look and prompt:
            self._next_look = now + LOOK_EVERY_SECONDS
            self._look(matches, now)
        return matches

    def _look(self, matches: Sequence[Match], now: float) -> None:
        if self._traffic_since is None or now - self._last_query > PAUSE_SECONDS:
            self._traffic_since = now
        self._last_query = now
        for match in matches:
            if match.device_hit_tokens or match.host_only_hit_tokens:
                self._last_hits[match.spec.id] = now

    def last_hits(self, streams: Sequence[StreamId]) -> tuple[Mapping[StreamId, float], float | None]:
        """When each of these streams last brought a hit (absent: never), and since when queries have
        been coming in without a long pause (None: they are not). Forgets all other streams."""
        now = self._clock()
        hits = {stream: self._last_hits[stream] for stream in streams if stream in self._last_hits}
        for gone in self._last_hits.keys() - hits.keys():
            self._last_hits.pop(gone, None)
        return hits, None if now - self._last_query > PAUSE_SECONDS else self._traffic_since

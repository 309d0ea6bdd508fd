"""The live state of the portal: sampled once a second, serialised once, offered to every open page.

A sampler thread observes the streams, keeps the trends and, while somebody looks, builds the state
of the Operations page. One text serves all pages. A page that acknowledges gets the next state only
after it has acknowledged the last one, and then the newest: a slow or sleeping browser costs one
reference. For clients that only read see `kvportal.consumers.Client`.

Lifetime: `Live(source, ...)`, `start()`, `stop()`. Pages come and go with `subscribe` and `unsubscribe`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import orjson

from kvportal.opsstate import Banner, Picture, build
from kvportal.records import ReplicaView
from kvportal.trends import Totals, Trends
from streams.spec import StreamId
from streams.status import StreamStatus

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
KEEPALIVE_SECONDS = 10.0
"""An unchanged state is sent again after so long, so that a page can tell quiet from dead."""


class Source(Protocol):
    """Where the sampler looks. Called on its thread, once a second."""

    def statuses(self) -> tuple[StreamStatus, ...]: ...

    def totals(self) -> Totals: ...

    def banners(self) -> Sequence[Banner]: ...

    def replicas(self) -> tuple[Sequence[ReplicaView], frozenset[str]]:
        """What every replica wrote last, and the names of those that stopped."""

    def last_hits(self) -> tuple[Mapping[StreamId, float], float | None]:
        """When each stream last brought a hit, and since when queries come in without a pause."""

    def extras(self) -> Mapping[str, Any]:
        """Sections that exist only where routing runs (`instances`, `decisions`), as JSON values."""


class Subscriber:
    """One open page. Every method runs on the page's event loop."""

    def __init__(self, send: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._send = send
        self._full: tuple[int, str] | None = None
        self._latest: tuple[int, str] | None = None
        self._in_flight: int | None = None
        self._open = False
        """States wait until the page has been offered its first full one."""
        self._sending: asyncio.Task[None] | None = None

    def offer_full(self, version: int, text: str) -> None:
        """A full state, for a page that starts; it goes out before any other."""
        self._full = (version, text)
        self._open = True
        self._flush()

    def offer(self, version: int, text: str) -> None:
        """There is a newer state; it goes out as soon as the page has shown the last one."""
        self._latest = (version, text)
        self._flush()

    def acknowledge(self, version: object) -> None:
        """The page has shown `version`."""
        if version == self._in_flight:
            self._in_flight = None
            self._flush()

    def close(self) -> None:
        self._open, self._full, self._latest = False, None, None

    def _flush(self) -> None:
        if not self._open or self._in_flight is not None:
            return
        if self._full is not None:
            chosen, self._full = self._full, None
            if self._latest is not None and self._latest[0] <= chosen[0]:
                self._latest = None
        elif self._latest is not None:
            chosen, self._latest = self._latest, None
        else:
            return
        self._in_flight, text = chosen
        self._sending = asyncio.get_running_loop().create_task(self._deliver(text))

    async def _deliver(self, text: str) -> None:
        try:
            await self._send(text)
        except Exception as error:  # noqa: BLE001 - the page is gone; whoever reads from it will notice
            log.debug("a page did not take its state: %s", error)
            self.close()


class Live:
    """Sampler thread, trends, and the pages that watch."""

    def __init__(
        self,
        source: Source,
        replica: str,
        *,
        clock: Callable[[], float] = time.time,
        period: float = PERIOD_SECONDS,
    ) -> None:
        self._source = source
        self._replica = replica
        self._clock = clock
        self._period = period
        self._lock = threading.Lock()
        self._trends = Trends()
        self._subscribers: dict[Subscriber, asyncio.AbstractEventLoop] = {}
        self._version = 0
        self._body = b""
        self._sent_version = 0
        self._sent_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="live-sampler", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 2.0) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.wait(self._period):
            try:
                self.sample()
            except Exception:
                log.exception("a sample of the live state failed")

    # ---- the sampler's thread

    def sample(self) -> None:
        """Observe once; publish when something changed and somebody watches."""
        now = self._clock()
        with self._lock:
            statuses = self._source.statuses()
            self._trends.observe(now, statuses, self._source.totals())
            watchers = list(self._subscribers.items())
            if not watchers:
                return
            self._refresh(now, statuses)
            if self._version == self._sent_version and now - self._sent_at < KEEPALIVE_SECONDS:
                return
            self._sent_version, self._sent_at = self._version, now
            version, text = self._version, self._text(now, self._body)
        for subscriber, loop in watchers:
            try:
                loop.call_soon_threadsafe(subscriber.offer, version, text)
            except RuntimeError:  # its loop was closed
                self.unsubscribe(subscriber)

    def _refresh(self, now: float, statuses: tuple[StreamStatus, ...]) -> None:
        """Build the state; it gets a new version when it differs from the last one."""
        body = orjson.dumps(self._state(now, statuses))
        if body != self._body:
            self._body = body
            self._version += 1

    def _state(self, now: float, statuses: tuple[StreamStatus, ...]) -> dict[str, Any]:
        last_hits, traffic_since = self._source.last_hits()
        views, gone = self._source.replicas()
        return build(
            Picture(
                now=now,
                replica=self._replica,
                statuses=statuses,
                trends=self._trends,
                banners=self._source.banners(),
                views=views,
                gone=gone,
                last_hits=last_hits,
                traffic_since=traffic_since,
                extras=self._source.extras(),
            )
        )

    def _text(self, now: float, body: bytes) -> str:
        head = b'{"type":"state","version":%d,"now":%.2f,' % (self._version, now)
        return (head + body[1:]).decode()

    # ---- pages

    def subscribe(self, subscriber: Subscriber) -> None:
        """Offer every new state to `subscriber` on the running loop; it still needs a `full()` one."""
        with self._lock:
            self._subscribers[subscriber] = asyncio.get_running_loop()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        with self._lock:
            self._subscribers.pop(subscriber, None)

    def full(self) -> tuple[int, str]:
        """The state with the last ten minutes of the charts, for a page that starts. Any thread."""
        now = self._clock()
        with self._lock:
            self._refresh(now, self._source.statuses())
            series = orjson.dumps(self._trends.series())
            return self._version, self._text(now, b'{"series":' + series + b"," + self._body[1:])

    def stream_series(self, stream: StreamId) -> dict[str, list[float | None]] | None:
        """The last ten minutes of one stream. Any thread."""
        with self._lock:
            return self._trends.stream_series(stream)


_current: Live | None = None


def install(live: Live | None) -> None:
    """Offer the running sampler to the pages of this process; None takes it back."""
    global _current
    _current = live


def current() -> Live | None:
    return _current

"""Gathers the facts that health and readiness are judged by, cheaply enough for every request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from kvportal.health import Facts, Roles, count_roles
from routing.instances.model import Snapshot
from streams.status import StreamState, StreamStatus

LOOK_SECONDS = 0.2
"""How old the counts of streams and the look at the threads may be. Instances are always current."""


class FactsReader:
    """Asked on any thread; what it remembers between calls is replaced whole."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        statuses: Callable[[], Sequence[StreamStatus]],
        desired: Callable[[], int],
        kv_events: bool,
        static_streams: bool,
        follows_nothing: bool = False,
        source_trouble: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._statuses = statuses
        self._desired = desired
        self._kv_events = kv_events
        self._static_streams = static_streams
        self._follows_nothing = follows_nothing
        self._source_trouble = source_trouble
        self._clock = clock
        self._threads: frozenset[str] = frozenset()
        self._up_since: float | None = None
        self._draining = False
        self._roles: tuple[int, Roles] = (-1, Roles(0, 0, 0, 0))
        self._look: tuple[float, int, int, tuple[str, ...]] = (float("-inf"), 0, 0, ())

    def up(self, threads: Collection[str]) -> None:
        """The portal runs now, and with it threads of these names, for as long as it does."""
        self._threads = frozenset(threads)
        self._up_since = self._clock()

    def draining(self) -> None:
        self._draining = True

    def down(self) -> None:
        self._threads = frozenset()
        self._up_since = None

    def __call__(self) -> Facts:
        now = self._clock()
        roles = self._counted(self._snapshot())
        _, desired, synchronized, broken = self._looked(now)
        return Facts(
            running=self._up_since is not None,
            draining=self._draining,
            broken=broken,
            kv_events=self._kv_events,
            static_streams=self._static_streams,
            follows_nothing=self._follows_nothing,
            instances=roles.instances,
            source_trouble=None if roles.instances else self._source_trouble(),
            default=roles.default,
            prefill=roles.prefill,
            decode=roles.decode,
            desired_streams=desired,
            synchronized_streams=synchronized,
            seconds_up=0.0 if self._up_since is None else now - self._up_since,
        )

    def _counted(self, snapshot: Snapshot) -> Roles:
        """Counted anew when an instance changed, not for every request."""
        version, roles = self._roles
        if version != snapshot.topology_version:
            roles = count_roles(snapshot.instances)
            self._roles = (snapshot.topology_version, roles)
        return roles

    def _looked(self, now: float) -> tuple[float, int, int, tuple[str, ...]]:
        if now - self._look[0] >= LOOK_SECONDS:
            statuses = self._statuses()
            synchronized = sum(status.state is StreamState.SYNCHRONIZED for status in statuses)
            running = {thread.name for thread in threading.enumerate()}
            broken = tuple(f"the thread {name} has ended" for name in sorted(self._threads - running))
            self._look = (now, self._desired(), synchronized, broken)
        return self._look

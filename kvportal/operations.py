"""What people need of the running portal, in one piece: history, commands and the live state.

Lifetime, in the order that the runtime follows:

* `Operations(replica)` builds; nothing runs yet.
* `follow(directory)` says which streams it is about; without it the index is shown as off.
* `observe(gauges)` says what else there is to show (`kvportal.gauges`).
* `start()` starts the threads and offers the portal to the admin and to `/ws/ops/`.
* `attach(loop)` starts the command worker on the server's event loop, as soon as there is one.
* `detach()` ends it, before that loop is closed.
* `stop()` ends the threads; state changes and outcomes that are still queued are written.

`record_change` goes to the directory as its `on_change`; `order_resync` is what every order goes through.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvportal import live, records
from kvportal.commands import Commands, Resyncer
from kvportal.explorer import explored
from kvportal.history import History
from kvportal.opsstate import (
    INDEX_OFF,
    Banner,
    Presence,
    history_banner,
    no_streams,
    replica_state,
    streams_seen,
    worker_banner,
)
from kvportal.records import ReplicaView, Retention
from kvportal.trends import Totals
from streams import console
from streams.advice import STARTING_CODES
from streams.index import BlockHoldings
from streams.resync import ResyncOrder
from streams.spec import StreamId, StreamSpec
from streams.status import Match, StreamChange, StreamStatus
from streams.wording import counted

REPLICA_SECONDS = 3.0
REPLICA_CHORE = "replica"
PRUNE_SECONDS = 600.0

log = logging.getLogger(__name__)


class Directory(Resyncer, Protocol):
    """The part of the directory that people need."""

    def query(self, prompt: bytes) -> Sequence[Match]: ...

    def explore(self, prompt: bytes) -> Sequence[BlockHoldings]: ...


class Gauges(Protocol):
    """What the rest of the portal tells about itself; each may be left to its default."""

    def totals(self) -> Totals: ...

    def banners(self) -> Sequence[Banner]: ...

    def last_hits(self) -> tuple[Mapping[StreamId, float], float | None]: ...

    def extras(self) -> Mapping[str, Any]: ...

    def routing_of(self, prompt: bytes) -> str | None:
        """What routing would decide for a prompt now, as HTML; None where nothing routes."""


class NoGauges:
    """Nothing beside the streams."""

    def totals(self) -> Totals:
        return Totals()

    def banners(self) -> Sequence[Banner]:
        return ()

    def last_hits(self) -> tuple[Mapping[StreamId, float], float | None]:
        return {}, None

    def extras(self) -> Mapping[str, Any]:
        return {}

    def routing_of(self, prompt: bytes) -> str | None:
        return None


def is_start(change: StreamChange) -> bool:
    """Whether a change only tells that a stream is followed from now on."""
    return change.old is change.new and change.fault is not None and change.fault.code in STARTING_CODES


class Operations:
    """One replica's history, commands and live state; the admin's `Console`, the sampler's `Source`."""

    def __init__(
        self,
        replica: str,
        *,
        retention: Retention | None = None,
        discovery: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.replica = replica
        self._gauges: Gauges = NoGauges()
        self._retention = retention or Retention()
        self._discovery = discovery
        self._clock = clock
        self._directory: Directory | None = None
        self._started_at = clock()
        self._listed: frozenset[StreamSpec] = frozenset()
        """Streams whose rows are up to date."""
        self._presence = Presence()
        self._views: tuple[tuple[ReplicaView, ...], frozenset[str]] = ((), frozenset())
        self.history = History(replica, clock=clock)
        self.history.add_chore(REPLICA_CHORE, REPLICA_SECONDS, self._exchange)
        self.history.add_chore("retention", PRUNE_SECONDS, self._prune)
        self.commands = Commands(self, self.history, clock=clock)
        self.live = live.Live(self, replica, clock=clock)

    # ---- life

    def follow(self, directory: Directory) -> None:
        """The directory whose streams are shown and steered; before `start`."""
        self._directory = directory

    def observe(self, gauges: Gauges) -> None:
        """What is shown beside the streams; before `start`."""
        self._gauges = gauges

    def start(self) -> None:
        self._started_at = self._clock()
        self.history.start()
        self.live.start()
        live.install(self.live)
        console.install(self)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.commands.attach(loop)

    def detach(self) -> None:
        self.commands.detach()

    def stop(self) -> None:
        console.install(None)
        live.install(None)
        self.live.stop()
        self.history.stop(farewell=lambda: records.forget_replica(self.replica))

    # ---- what the directory and the endpoints call

    def record_change(self, change: StreamChange) -> None:
        """The directory's `on_change`: only puts it in a queue."""
        if not is_start(change):
            self.history.record_change(change)
        if change.spec not in self._listed:
            self.history.hurry(REPLICA_CHORE)

    def order_resync(self, order: ResyncOrder) -> int:
        return self.commands.order(order)

    # ---- the admin's console

    def statuses(self) -> tuple[StreamStatus, ...]:
        return () if self._directory is None else self._directory.statuses()

    def followed(self) -> frozenset[StreamId]:
        views, gone = self._views
        others = (view for view in views if view.name not in gone | {self.replica})
        return frozenset(status.spec.id for status in self.statuses()).union(*map(streams_seen, others))

    def resync(
        self, *, instance_name: str | None = None, dp_rank: int | None = None, drop: bool = False
    ) -> tuple[StreamId, ...]:
        if self._directory is None:
            return ()
        return self._directory.resync(instance_name=instance_name, dp_rank=dp_rank, drop=drop)

    def series(self, stream: StreamId) -> dict[str, list[float | None]] | None:
        return self.live.stream_series(stream)

    def explore(self, prompt: bytes) -> dict[str, Any] | None:
        """What every stream holds of a prompt, and what routing makes of that."""
        if self._directory is None:
            return None
        found = explored(prompt, self._directory.query(prompt), self._directory.explore(prompt))
        return {**found, "routing": self._gauges.routing_of(prompt)}

    # ---- the sampler's source

    def totals(self) -> Totals:
        return self._gauges.totals()

    def last_hits(self) -> tuple[Mapping[StreamId, float], float | None]:
        return self._gauges.last_hits()

    def extras(self) -> Mapping[str, Any]:
        return self._gauges.extras()

    def replicas(self) -> tuple[Sequence[ReplicaView], frozenset[str]]:
        return self._views

    def banners(self) -> Sequence[Banner]:
        own = [history_banner(self.history.health()), worker_banner(self.commands.worker_error)]
        if self._directory is None:
            own.append(INDEX_OFF)
        elif not self.statuses():
            own.append(no_streams(self._discovery))
        return [*self._gauges.banners(), *(banner for banner in own if banner is not None)]

    # ---- chores, on the history's thread

    def _exchange(self, now: float) -> None:
        """Write this replica's row and the rows of its streams; read what the other replicas wrote."""
        statuses = self.statuses()
        specs = frozenset(status.spec for status in statuses)
        records.touch_streams(specs, now)
        records.leave_streams({spec.id for spec in self._listed} - {spec.id for spec in specs}, now)
        self._listed = specs
        records.write_replica(ReplicaView(self.replica, self._started_at, now, replica_state(statuses)))
        views = records.read_replicas()
        self._views = (views, self._presence.gone(views, now))

    def _prune(self, now: float) -> None:
        gone = records.prune(self._retention, now)
        if gone:
            log.info("beyond the retention, deleted from the history: %s", counted(gone, "row"))

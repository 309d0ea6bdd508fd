"""Which of two loads counts: the one posted here or the one found in etcd. Pure.

A heartbeat received by this replica wins for ten seconds; after that the last to arrive wins. Loads
do not expire.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from routing.instances.model import Load, LoadReport, LoadSource

HEARTBEAT_PRECEDENCE: Final = 10.0
"""Seconds for which a heartbeat received here beats etcd."""


@dataclass(frozen=True, slots=True)
class LoadPair:
    """The last load from each source, and the one that counts."""

    heartbeat: Load | None = None
    stored: Load | None = None
    current: Load | None = None
    stored_revision: int = 0
    """etcd's mod_revision of `stored`."""

    def with_heartbeat(self, report: LoadReport, now: float) -> LoadPair:
        load = Load(report, LoadSource.HEARTBEAT, now)
        return replace(self, heartbeat=load, current=load)

    def with_stored(self, report: LoadReport, now: float, revision: int) -> LoadPair:
        return replace(self, stored=Load(report, LoadSource.ETCD, now), stored_revision=revision).at(now)

    def without_stored(self) -> LoadPair:
        """The load in etcd is gone; what was posted here stays."""
        return replace(self, stored=None, current=self.heartbeat, stored_revision=0)

    def without_stored_before(self, revision: int) -> LoadPair:
        """The instance registered again at `revision`: a load written before that is ignored, here as by
        a replica that starts later and finds the two keys."""
        is_older = self.stored is not None and self.stored_revision < revision
        return self.without_stored() if is_older else self

    def at(self, now: float) -> LoadPair:
        """The pair with the load that counts at `now`."""
        return replace(self, current=self._choose(now))

    @property
    def turns_at(self) -> float | None:
        """When the load that counts will be another one without anything arriving; None: never."""
        if self.heartbeat is None or self.stored is None or self.current is self.stored:
            return None
        if self.stored.received_at < self.heartbeat.received_at:
            return None
        return self.heartbeat.received_at + HEARTBEAT_PRECEDENCE

    def _choose(self, now: float) -> Load | None:
        if self.heartbeat is None or self.stored is None:
            return self.heartbeat or self.stored
        if now < self.heartbeat.received_at + HEARTBEAT_PRECEDENCE:
            return self.heartbeat
        later = self.stored.received_at >= self.heartbeat.received_at
        return self.stored if later else self.heartbeat


NO_LOAD: Final = LoadPair()

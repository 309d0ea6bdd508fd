"""The embedded registry's leases. Pure: the time is passed in.

Without etcd, instances register over HTTP with a time to live that every heartbeat renews, or they
are entered in the admin, with or without one. The end of a lease is to the machine what the deletion
of a key in etcd is. The registration is kept after that, so that a heartbeat can revive it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from routing.instances.core import Deleted, Input, Registered
from routing.instances.model import Registration

MAX_TTL_SECONDS: Final = 86_400.0


class Origin(StrEnum):
    """Who registered an instance."""

    API = "api"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Entry:
    """An instance that somebody entered in the admin."""

    registration: Registration
    ttl: float | None = None
    """Seconds without a heartbeat until it counts as gone; None: it is never missed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One registration and how long it holds without another sign of life."""

    registration: Registration
    origin: Origin
    ttl: float | None
    expires_at: float | None
    """None: never, or it has expired already."""
    expired: bool = False


class LeaseTable:
    """All leases. Every method returns what the instance machine has to be told."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def put(
        self, registration: Registration, ttl: float | None, now: float, origin: Origin = Origin.API
    ) -> list[Input]:
        """Register, or register again; the last one to come decides."""
        expires_at = None if ttl is None else now + ttl
        self._leases[registration.name] = Lease(registration, origin, ttl, expires_at)
        return [Registered(registration)]

    def delete(self, name: str, reason: str = "it was deleted over HTTP") -> list[Input]:
        """Give a lease up. Nothing happens when there is none."""
        lease = self._leases.pop(name, None)
        if lease is None or lease.expired:
            return []
        return [Deleted(name, lease.registration.identity, reason)]

    def replace_entered(self, entered: Iterable[Entry], now: float) -> list[Input]:
        """Take over what the admin says now; registrations over HTTP stay as they are."""
        wanted = {item.registration.name: item for item in entered}
        inputs: list[Input] = []
        for name, lease in list(self._leases.items()):
            if lease.origin is Origin.ADMIN and name not in wanted:
                inputs += self.delete(name, "it was removed in the admin")
        for name, item in wanted.items():
            known = self._leases.get(name)
            same = known is not None and (known.registration, known.ttl) == (item.registration, item.ttl)
            if not same and (known is None or known.origin is Origin.ADMIN):
                inputs += self.put(item.registration, item.ttl, now, Origin.ADMIN)
        return inputs

    def renew(self, name: str, now: float) -> list[Input]:
        """A heartbeat of the registered incarnation arrived; one after the end revives the lease."""
        lease = self._leases.get(name)
        if lease is None or lease.ttl is None:
            return []
        self._leases[name] = replace(lease, expires_at=now + lease.ttl, expired=False)
        return [Registered(lease.registration)] if lease.expired else []

    def revive(self, name: str, incarnation_id: str | None, now: float) -> list[Input]:
        """A heartbeat arrived for an instance that may be gone altogether. One that was entered in the
        admin belongs there, so it comes back without being entered again."""
        lease = self._leases.get(name)
        if lease is None or not lease.expired or lease.origin is not Origin.ADMIN:
            return []
        registered = lease.registration.incarnation_id
        if registered is not None and registered != incarnation_id:
            return []
        return self.renew(name, now)

    def expire(self, now: float) -> list[Input]:
        """End the leases whose time is over."""
        inputs: list[Input] = []
        for name, lease in self._leases.items():
            if lease.expires_at is not None and now >= lease.expires_at:
                self._leases[name] = replace(lease, expires_at=None, expired=True)
                inputs.append(Deleted(name, lease.registration.identity, f"no heartbeat for {lease.ttl:g} s"))
        return inputs

    def forget(self, name: str) -> None:
        """The machine removed the instance. What registered over HTTP has to do so again."""
        lease = self._leases.get(name)
        if lease is not None and lease.expired and lease.origin is Origin.API:
            del self._leases[name]

    def get(self, name: str) -> Lease | None:
        return self._leases.get(name)

    def next_deadline(self) -> float | None:
        times = (lease.expires_at for lease in self._leases.values() if lease.expires_at is not None)
        return min(times, default=None)

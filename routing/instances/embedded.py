"""The embedded registry's leases. Pure: the time is passed in.

Without etcd, instances register over HTTP with a time to live that every heartbeat renews, or they
are entered in the admin, with or without one. The end of a lease is to the machine what the deletion
of a key in etcd is. The registration is kept after that, so that a heartbeat can revive it.

Under one name, what registered over HTTP counts for as long as that instance is known; then what was
entered counts again.
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
    """None: never, or it is over already."""
    over: bool = False
    """It ran out or was given up; a heartbeat revives it."""


class LeaseTable:
    """All leases. Every method returns what the instance machine has to be told."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._entered: dict[str, Entry] = {}
        """What the admin said last, by name."""

    def put(self, registration: Registration, ttl: float, now: float) -> list[Input]:
        """Register over HTTP, or register again; the last one to come decides."""
        return self._begin(registration, Origin.API, ttl, now)

    def delete(self, name: str) -> list[Input]:
        """Give a lease up. Nothing happens when there is none, or it is over. One that was entered in the
        admin belongs there and waits for a heartbeat; what registered over HTTP has to do so again."""
        lease = self._leases.get(name)
        if lease is None:
            return []
        if lease.origin is Origin.ADMIN:
            self._leases[name] = replace(lease, expires_at=None, over=True)
        else:
            del self._leases[name]
        return self._ended(lease, "it was deleted over HTTP")

    def replace_entered(self, entered: Iterable[Entry], now: float) -> list[Input]:
        """Take over what the admin says now, as far as it differs from what it said last. Registrations
        over HTTP stay as they are."""
        before, self._entered = self._entered, {entry.registration.name: entry for entry in entered}
        inputs: list[Input] = []
        for name in before.keys() - self._entered.keys():
            lease = self._leases.get(name)
            if lease is not None and lease.origin is Origin.ADMIN:
                del self._leases[name]
                inputs += self._ended(lease, "it was removed in the admin")
        for name, entry in self._entered.items():
            if entry != before.get(name):
                inputs += self._enter(name, now)
        return inputs

    def renew(self, name: str, now: float) -> list[Input]:
        """A heartbeat of the registered incarnation arrived; one after the end revives the lease."""
        lease = self._leases.get(name)
        if lease is None or (lease.ttl is None and not lease.over):
            return []
        self._leases[name] = replace(lease, expires_at=_expiry(lease.ttl, now), over=False)
        return [Registered(lease.registration)] if lease.over else []

    def revive(self, name: str, incarnation_id: str | None, now: float) -> list[Input]:
        """A heartbeat arrived for an instance that may be gone altogether. One that was entered in the
        admin belongs there, so it comes back without being entered again."""
        lease = self._leases.get(name)
        if lease is None or not lease.over or lease.origin is not Origin.ADMIN:
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
                self._leases[name] = replace(lease, expires_at=None, over=True)
                inputs += self._ended(lease, f"no heartbeat for {lease.ttl:g} s")
        return inputs

    def forget(self, name: str, now: float) -> list[Input]:
        """The machine removed the instance. What registered over HTTP has to do so again; what was
        entered under its name, if anything, counts from now on."""
        lease = self._leases.get(name)
        if lease is not None and lease.origin is Origin.API and lease.over:
            del self._leases[name]
        return self._enter(name, now) if name not in self._leases else []

    def get(self, name: str) -> Lease | None:
        return self._leases.get(name)

    def next_deadline(self) -> float | None:
        times = (lease.expires_at for lease in self._leases.values() if lease.expires_at is not None)
        return min(times, default=None)

    def _enter(self, name: str, now: float) -> list[Input]:
        """What the admin says of `name` counts, unless there is nothing or somebody registered over HTTP."""
        entry, lease = self._entered.get(name), self._leases.get(name)
        if entry is None or (lease is not None and lease.origin is Origin.API):
            return []
        return self._begin(entry.registration, Origin.ADMIN, entry.ttl, now)

    def _begin(
        self, registration: Registration, origin: Origin, ttl: float | None, now: float
    ) -> list[Input]:
        self._leases[registration.name] = Lease(registration, origin, ttl, _expiry(ttl, now))
        return [Registered(registration)]

    @staticmethod
    def _ended(lease: Lease, reason: str) -> list[Input]:
        registration = lease.registration
        return [] if lease.over else [Deleted(registration.name, registration.identity, reason)]


def _expiry(ttl: float | None, now: float) -> float | None:
    return None if ttl is None else now + ttl

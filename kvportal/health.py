"""When the portal lives, when it can serve, and when it is ready: decisions over plain facts.

* *Live*: everything that the process needs is running. Anything else is mended by a restart.
* *Able to serve*: some group of instances could take a request now. `query` and `select` answer 503
  `not_ready` while there is none.
* *Ready*: able to serve, warm enough after a start, and not draining. Only `/readyz` asks for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from routing.instances.model import InstanceView, Role
from streams.http import ApiError, Endpoint, Request, Response, json_response
from streams.wording import counted


@dataclass(frozen=True, slots=True)
class Facts:
    """What the decisions need to know, at one moment."""

    running: bool
    """The runtime is up: started, not stopped."""
    draining: bool = False
    """Told to stop; requests are still answered until the port closes."""
    broken: tuple[str, ...] = ()
    """Parts that should run and do not, in words (`the history writer has ended`)."""
    kv_events: bool = True
    """The index is on."""
    static_streams: bool = False
    """Streams are named in the configuration, not discovered; at least one."""
    follows_nothing: bool = False
    """The index is on, but no stream is named, and discovery does not look for any."""
    instances: int = 0
    """All instances known, whatever their state."""
    source_trouble: str | None = None
    """Why none may be known although there are some; looked at while none is."""
    default: int = 0
    """Instances that can be scheduled, by role; one that is MIX under its current role."""
    prefill: int = 0
    decode: int = 0
    desired_streams: int = 0
    synchronized_streams: int = 0
    seconds_up: float = 0.0
    """Since the runtime came up."""


class Roles(NamedTuple):
    """How many instances there are, and how many can be scheduled, by current role."""

    instances: int
    default: int
    prefill: int
    decode: int


def count_roles(instances: Sequence[InstanceView]) -> Roles:
    """The part of the facts that the registry's snapshot tells."""
    roles = [instance.current_role for instance in instances if instance.schedulable]
    return Roles(
        len(instances), roles.count(Role.DEFAULT), roles.count(Role.PREFILL), roles.count(Role.DECODE)
    )


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How long `/readyz` waits for streams after a start."""

    share: float = 0.8
    """Of the desired streams, rounded up."""
    seconds: float = 20.0


def why_not_able(facts: Facts) -> str | None:
    """Why no request can be served now; None when one can."""
    if not facts.running:
        return "the portal is starting or stopping"
    if facts.default or (facts.prefill and facts.decode):
        return None
    if facts.static_streams and not facts.instances:
        return None
    if not facts.instances and facts.source_trouble:
        return facts.source_trouble
    if not facts.instances:
        nothing = "; the KV events file neither enables discovery nor names streams"
        return "no instance is registered" + (nothing if facts.follows_nothing else "")
    have = [
        f"{count} {role}" for role, count in (("PREFILL", facts.prefill), ("DECODE", facts.decode)) if count
    ]
    return (
        f"no group of the {facts.instances} registered instances can serve: it takes a DEFAULT, or a "
        f"prefill and a decode instance that can be scheduled; there are {' and '.join(have) or 'none'}"
    )


def why_cold(facts: Facts, warm_up: WarmUp) -> str | None:
    """What a portal that has just started still waits for; None when it is warm or has waited enough."""
    if not facts.kv_events or facts.follows_nothing or facts.seconds_up >= warm_up.seconds:
        return None
    if not facts.desired_streams:
        return f"no stream is known yet (waiting up to {warm_up.seconds:g} s after the start)"
    wanted = math.ceil(facts.desired_streams * warm_up.share)
    if facts.synchronized_streams >= wanted:
        return None
    every = counted(facts.desired_streams, "stream")
    verb = "is" if facts.desired_streams == 1 else "are"
    return (
        f"{facts.synchronized_streams} of {every} {verb} synchronized, waiting for "
        f"{wanted} (up to {warm_up.seconds:g} s after the start)"
    )


class Readiness:
    """The health endpoints and the gate. Remembers one thing: that the portal has been warm once.

    `facts` is called for each request and must be cheap.
    """

    def __init__(self, facts: Callable[[], Facts], warm_up: WarmUp | None = None) -> None:
        self._facts = facts
        self._warm_up = warm_up or WarmUp()
        self._warm = False

    def missing(self) -> tuple[str, ...]:
        """Everything that stands between the portal and being ready; empty: it is ready."""
        facts = self._facts()
        cold = None if self._warm else why_cold(facts, self._warm_up)
        if facts.running and cold is None:
            self._warm = True
        draining = "the portal is draining: it stops soon" if facts.draining else None
        reasons = (draining, why_not_able(facts), cold if facts.running else None, *facts.broken)
        return tuple(reason for reason in reasons if reason is not None)

    def query_gate(self) -> ApiError | None:
        """For endpoints that need the index."""
        if not self._facts().kv_events:
            return ApiError(
                503,
                "kv_events_disabled",
                "the index is off: the portal was started without --kv-events-config-file",
            )
        return self.serving_gate()

    def index_gate(self) -> ApiError | None:
        """For endpoints that act on the index whether or not a group can serve."""
        return None if self._facts().kv_events else self.query_gate()

    def serving_gate(self) -> ApiError | None:
        """For endpoints that need a group of instances: routing works without the index."""
        reason = why_not_able(self._facts())
        return None if reason is None else ApiError(503, "not_ready", reason)

    def livez(self, request: Request) -> Response:
        """200 while all parts run; 503 names those that do not."""
        facts = self._facts()
        if facts.broken:
            return json_response({"status": "broken", "missing": list(facts.broken)}, 503)
        return json_response({"status": "alive"})

    def readyz(self, request: Request) -> Response:
        """200 when ready; 503 names what is missing."""
        missing = self.missing()
        if missing:
            return json_response({"status": "not_ready", "missing": list(missing)}, 503)
        return json_response({"status": "ready"})

    @property
    def opened(self) -> dict[str, Endpoint]:
        return {"livez": self.livez, "readyz": self.readyz}

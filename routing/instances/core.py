"""The life of instances as a pure machine: inputs and the time in, actions and snapshots out.

    registered ──▶ ACTIVE ──key gone, probe 200──▶ LEASE_LOST ──no heartbeat──▶ SUSPECT ──▶ removed
                     │  ▲                             │   ▲                       │  ▲
                     │  └────── registered again ─────┴───│───────────────────────┘  │
                     │                                    └──────── heartbeat ───────┤
                     └───────────────── key gone, probe failed ──────────────────────┘

Nothing here reads a clock, starts a thread or touches the network: `now` is passed in, and what has
to be done outside comes back as actions. The machine is used by one caller at a time (the registry
shell); the snapshots that it hands out are immutable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import assert_never

from routing.instances.load import NO_LOAD, LoadPair
from routing.instances.model import (
    HealthState,
    InstanceView,
    Latency,
    LoadReport,
    Registration,
    Role,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """How long an instance may be silent. Seconds."""

    lease_lost_heartbeat_timeout: float = 3.0
    """LEASE_LOST without a heartbeat for this long becomes SUSPECT."""
    suspect_timeout: float = 15.0
    """SUSPECT for this long is removed."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The instance's registration was written (again)."""

    registration: Registration
    revision: int = 0
    key: str = ""
    """Where it is written in etcd."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """The instance's registration is gone: its key was deleted, or its lease ended."""

    name: str
    identity: str | None = None
    """Whose registration it was. A known identity that is not the current one is stale: the
    process that it belonged to has already been replaced."""
    reason: str = "its key was deleted"


@dataclass(frozen=True, slots=True)
class StoredLoad:
    """A load arrived from etcd."""

    name: str
    report: LoadReport
    revision: int


@dataclass(frozen=True, slots=True)
class StoredLoadDeleted:
    """The load in etcd is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to a `StartProbe`."""

    name: str
    token: int
    healthy: bool
    detail: str = ""
    """What was seen, in a few words."""


Input = Registered | Deleted | StoredLoad | StoredLoadDeleted | ProbeResult


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Ask `http://<name>/health` and feed a `ProbeResult` with the same token."""

    name: str
    token: int


@dataclass(frozen=True, slots=True)
class Transition:
    """An instance changed its state: for the log and for people."""

    name: str
    identity: str | None
    old: HealthState | None
    """None: it was not there."""
    new: HealthState | None
    """None: it is gone."""
    reason: str


Action = StartProbe | Transition


class HeartbeatResult(Enum):
    """What became of a heartbeat."""

    ACCEPTED = "accepted"
    UNKNOWN_INSTANCE = "unknown instance"
    OTHER_INCARNATION = "other incarnation"


@dataclass(slots=True)
class _Life:
    """Everything known of one incarnation; a replacement starts with a new one."""

    registration: Registration
    order: int
    current_role: Role
    state: HealthState
    since: float
    reason: str
    revision: int
    key: str
    registered: bool = True
    probe: int | None = None
    """Token of the probe under way; a result with another token is of the past."""
    heartbeat_at: float | None = None
    loads: LoadPair = NO_LOAD
    latency: Latency | None = None
    view: InstanceView | None = None
    """Cached; None when something changed."""


class InstanceMachine:
    """All instances and their health. Times are seconds of one monotonic clock, never going back."""

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self._settings = settings or HealthSettings()
        self._lives: dict[str, _Life] = {}
        self._next_order = 0
        self._next_token = 0
        self._actions: list[Action] = []
        self._topology_version = 0
        self._snapshot = Snapshot()

    def apply(self, item: Input, now: float) -> list[Action]:
        """Feed one input. Returns what has to be done and what changed."""
        match item:
            case Registered():
                self._register(item, now)
            case Deleted():
                self._delete(item)
            case StoredLoad():
                self._store_load(item, now)
            case StoredLoadDeleted():
                self._drop_stored_load(item.name)
            case ProbeResult():
                self._probed(item, now)
            case _:
                assert_never(item)
        return self._taken_actions()

    def heartbeat(
        self,
        name: str,
        incarnation_id: str | None,
        now: float,
        report: LoadReport | None = None,
        latency: Latency | None = None,
    ) -> tuple[HeartbeatResult, list[Action]]:
        """A sign of life. It must name the registered incarnation, if one is registered."""
        life = self._lives.get(name)
        if life is None:
            return HeartbeatResult.UNKNOWN_INSTANCE, []
        registered = life.registration.incarnation_id
        if registered is not None and incarnation_id != registered:
            return HeartbeatResult.OTHER_INCARNATION, []
        life.heartbeat_at = now
        life.view = None
        life.latency = latency or life.latency
        if report is not None:
            life.loads = life.loads.with_heartbeat(report, now)
        if life.state is HealthState.SUSPECT:
            self._move(life, HealthState.LEASE_LOST, now, "a heartbeat arrived")
        return HeartbeatResult.ACCEPTED, self._taken_actions()

    def set_current_role(self, name: str, identity: str | None, role: Role) -> bool:
        """Flip a MIX instance. False when it is not there any more, not MIX, or another life."""
        life = self._lives.get(name)
        if (
            life is None
            or life.registration.role is not Role.MIX
            or life.registration.identity != identity
            or role not in (Role.PREFILL, Role.DECODE)
        ):
            return False
        if life.current_role is not role:
            life.current_role = role
            self._touch(life)
        return True

    def advance(self, now: float) -> list[Action]:
        """Let time pass: silent instances fall, loads change precedence."""
        for life in list(self._lives.values()):
            if life.state is HealthState.LEASE_LOST and now >= self._silent_at(life):
                self._move(life, HealthState.SUSPECT, now, self._silence())
            if life.state is HealthState.SUSPECT and now >= self._removed_at(life):
                self._remove(life, f"SUSPECT for {self._settings.suspect_timeout:g} s")
            elif life.loads.turns_at is not None and now >= life.loads.turns_at:
                life.loads = life.loads.at(now)
                life.view = None
        return self._taken_actions()

    def next_deadline(self) -> float | None:
        """When `advance` has something to do at the latest; None: never, as things stand."""
        return min(self._deadlines(), default=None)

    def snapshot(self) -> Snapshot:
        """What is known now. The same object as long as nothing changes."""
        changed = self._topology_version != self._snapshot.topology_version
        if not changed and all(life.view is not None for life in self._lives.values()):
            return self._snapshot
        views = tuple(_view(life) for life in self._lives.values())
        self._snapshot = Snapshot(
            instances=views,
            by_name=MappingProxyType({view.name: view for view in views}),
            version=self._snapshot.version + 1,
            topology_version=self._topology_version,
        )
        return self._snapshot

    # ---- inputs

    def _register(self, item: Registered, now: float) -> None:
        life = self._lives.get(item.registration.name)
        if life is not None and life.registration.identity != item.registration.identity:
            self._remove(life, "another incarnation registered")
            life = None
        if life is None:
            self._begin(item, now)
        else:
            self._refresh(life, item, now)

    def _begin(self, item: Registered, now: float) -> None:
        registration = item.registration
        life = _Life(
            registration=registration,
            order=self._next_order,
            current_role=self._first_role(registration),
            state=HealthState.ACTIVE,
            since=now,
            reason="registered",
            revision=item.revision,
            key=item.key,
        )
        self._next_order += 1
        self._lives[registration.name] = life
        self._touch(life)
        self._report(life, None, HealthState.ACTIVE, life.reason)

    def _refresh(self, life: _Life, item: Registered, now: float) -> None:
        was = life.registration
        life.registration = item.registration
        life.revision = item.revision
        life.key = item.key
        life.registered = True
        life.probe = None
        life.loads = life.loads.without_stored_before(item.revision)
        if item.registration.role is not was.role:
            life.current_role = self._first_role(item.registration)
        if life.state is HealthState.ACTIVE:
            life.reason = "registered again"
            self._touch(life)
        else:
            self._move(life, HealthState.ACTIVE, now, "registered again")

    def _first_role(self, registration: Registration) -> Role:
        """A MIX instance takes the side that is missing: it decodes unless there is somebody else for
        that, in whatever state: one that is SUSPECT for a moment must not make it change sides."""
        if registration.role is not Role.MIX:
            return registration.role
        decoders = (
            life.current_role is Role.DECODE
            for name, life in self._lives.items()
            if name != registration.name
        )
        return Role.PREFILL if any(decoders) else Role.DECODE

    def _delete(self, item: Deleted) -> None:
        life = self._lives.get(item.name)
        if life is None or not life.registered:
            return
        identity = life.registration.identity
        if item.identity is not None and identity is not None and item.identity != identity:
            return
        life.registered = False
        life.reason = f"{item.reason}; asking its /health"
        life.probe = self._next_token
        self._next_token += 1
        self._touch(life)
        self._actions.append(StartProbe(item.name, life.probe))

    def _probed(self, item: ProbeResult, now: float) -> None:
        life = self._lives.get(item.name)
        if life is None or life.probe != item.token:
            return
        life.probe = None
        state = HealthState.LEASE_LOST if item.healthy else HealthState.SUSPECT
        self._move(life, state, now, f"its registration is gone; /health: {item.detail or 'no answer'}")

    def _store_load(self, item: StoredLoad, now: float) -> None:
        life = self._lives.get(item.name)
        if life is None:
            return
        if item.revision < life.revision:
            # What stands in etcd now belongs to an earlier life, so nothing from there counts.
            life.loads = life.loads.without_stored()
        else:
            life.loads = life.loads.with_stored(item.report, now, item.revision)
        life.view = None

    def _drop_stored_load(self, name: str) -> None:
        life = self._lives.get(name)
        if life is not None:
            life.loads = life.loads.without_stored()
            life.view = None

    # ---- changes

    def _move(self, life: _Life, state: HealthState, now: float, reason: str) -> None:
        old = life.state
        life.state, life.since, life.reason = state, now, reason
        self._touch(life)
        self._report(life, old, state, reason)

    def _remove(self, life: _Life, reason: str) -> None:
        del self._lives[life.registration.name]
        self._topology_version += 1
        self._report(life, life.state, None, reason)

    def _touch(self, life: _Life) -> None:
        life.view = None
        self._topology_version += 1

    def _report(self, life: _Life, old: HealthState | None, new: HealthState | None, reason: str) -> None:
        registration = life.registration
        self._actions.append(Transition(registration.name, registration.identity, old, new, reason))

    def _taken_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # ---- time

    def _silent_at(self, life: _Life) -> float:
        """When a LEASE_LOST instance becomes SUSPECT: it has the full time after losing its lease,
        even if its last heartbeat is older."""
        last_sign = max(life.since, life.heartbeat_at if life.heartbeat_at is not None else life.since)
        return last_sign + self._settings.lease_lost_heartbeat_timeout

    def _removed_at(self, life: _Life) -> float:
        return life.since + self._settings.suspect_timeout

    def _silence(self) -> str:
        return f"no heartbeat for {self._settings.lease_lost_heartbeat_timeout:g} s without registration"

    def _deadlines(self) -> Iterator[float]:
        for life in self._lives.values():
            if life.state is HealthState.LEASE_LOST:
                yield self._silent_at(life)
            elif life.state is HealthState.SUSPECT:
                yield self._removed_at(life)
            if life.loads.turns_at is not None:
                yield life.loads.turns_at


def _view(life: _Life) -> InstanceView:
    if life.view is None:
        life.view = InstanceView(
            registration=life.registration,
            order=life.order,
            current_role=life.current_role,
            state=life.state,
            since=life.since,
            reason=life.reason,
            heartbeat_at=life.heartbeat_at,
            load=life.loads.current,
            latency=life.latency,
            revision=life.revision,
            key=life.key,
            registered=life.registered,
        )
    return life.view

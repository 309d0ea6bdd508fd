"""Random walks of the health machine, compared with a plain retelling of the rules.

The retelling keeps whole histories and looks things up in them, where the machine keeps the least that
it needs; they share no code.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing.instances.core import (
    Action,
    Deleted,
    HealthSettings,
    HeartbeatResult,
    InstanceMachine,
    ProbeResult,
    Registered,
    StartProbe,
    StoredLoad,
    StoredLoadDeleted,
    Transition,
)
from routing.instances.model import LoadReport, LoadSource, Registration, Role, Snapshot

NAMES = ("a:1", "b:1")
LEGAL = {
    (None, "ACTIVE"),
    ("ACTIVE", "LEASE_LOST"),
    ("ACTIVE", "SUSPECT"),
    ("LEASE_LOST", "ACTIVE"),
    ("LEASE_LOST", "SUSPECT"),
    ("SUSPECT", "ACTIVE"),
    ("SUSPECT", "LEASE_LOST"),
    ("ACTIVE", None),  # replaced by another incarnation
    ("LEASE_LOST", None),
    ("SUSPECT", None),
}

# Mostly the same process, answering the probe that was started last: otherwise walks go nowhere.
IDENTITIES = ("one", "one", "one", "one", "two", None)
ROLES = tuple(Role)
CHOICES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "register": (NAMES, IDENTITIES, ROLES),
    "delete": (NAMES, IDENTITIES),
    "probe": ((0, 0, 0, 1, 2), (True, False)),
    "heartbeat": (NAMES, IDENTITIES, (True, False)),
    "stored": (NAMES, (-2, -1, 0, 1, 2)),
    "unstored": (NAMES,),
    "flip": (NAMES, IDENTITIES, ROLES),
    "wait": ((0.25, 1.0, 2.0, 3.0, 5.0, 9.75, 10.0, 15.0, 40.0),),
}
step = st.one_of(
    *(
        st.tuples(st.just(kind), *(st.sampled_from(values) for values in arguments))
        for kind, arguments in CHOICES.items()
    )
)


@dataclass
class Told:
    """One life, with everything that happened to it."""

    registration: Registration
    revision: int
    current: Role
    born: float
    registered: bool = True
    probe: int | None = None
    entered: list[tuple[str, float]] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    loads: list[tuple[LoadSource, float, LoadReport]] = field(default_factory=list)
    stored_at: int = 0
    """Revision of the last load from etcd."""

    def forget_stored(self) -> None:
        self.loads[:] = [item for item in self.loads if item[0] is LoadSource.HEARTBEAT]

    @property
    def state(self) -> str:
        return self.entered[-1][0]

    def enter(self, state: str, now: float) -> None:
        self.entered.append((state, now))


class Retelling:
    """The rules, one after the other."""

    def __init__(self) -> None:
        self.lives: dict[str, Told] = {}

    def pass_time(self, now: float) -> None:
        for name, life in list(self.lives.items()):
            since = life.entered[-1][1]
            if life.state == "LEASE_LOST" and now - max([since, *life.beats]) >= 3.0:
                life.enter("SUSPECT", now)
            elif life.state == "SUSPECT" and now - since >= 15.0:
                del self.lives[name]

    def register(self, registration: Registration, revision: int, now: float) -> None:
        known = self.lives.get(registration.name)
        if known is not None and known.registration.incarnation_id == registration.incarnation_id:
            if known.registration.role != registration.role:
                known.current = self.role_for(registration)
            known.registration, known.revision = registration, revision
            if known.stored_at < revision:
                known.forget_stored()
            known.registered, known.probe = True, None
            if known.state != "ACTIVE":
                known.enter("ACTIVE", now)
            return
        self.lives.pop(registration.name, None)
        life = Told(registration, revision, self.role_for(registration), now)
        life.enter("ACTIVE", now)
        self.lives[registration.name] = life

    def role_for(self, registration: Registration) -> Role:
        if registration.role is not Role.MIX:
            return registration.role
        others = [life for name, life in self.lives.items() if name != registration.name]
        return Role.PREFILL if any(other.current == "DECODE" for other in others) else Role.DECODE

    def load(self, life: Told, now: float) -> tuple[LoadSource, float, LoadReport] | None:
        beats = [item for item in life.loads if item[0] is LoadSource.HEARTBEAT]
        if beats and now - beats[-1][1] < 10.0:
            return beats[-1]
        return life.loads[-1] if life.loads else None


def compare(machine: InstanceMachine, told: Retelling, now: float) -> None:
    snapshot = machine.snapshot()
    assert [view.name for view in snapshot.instances] == list(told.lives)
    orders = [view.order for view in snapshot.instances]
    assert orders == sorted(set(orders))
    for view in snapshot.instances:
        life = told.lives[view.name]
        assert (view.state, view.since) == life.entered[-1]
        assert (view.current_role, view.registered) == (life.current, life.registered)
        expected = told.load(life, now)
        actual = None if view.load is None else (view.load.source, view.load.received_at, view.load.report)
        assert actual == expected
        assert (view.current_role is Role.MIX) is False
        assert view.role is Role.MIX or view.current_role is view.role
    deadline = machine.next_deadline()
    assert deadline is None or deadline > now
    falling = any(life.state != "ACTIVE" for life in told.lives.values())
    assert not falling or deadline is not None


class Walk:
    """The machine and the retelling, side by side."""

    def __init__(self, *, keep_snapshots: bool = True) -> None:
        self.keep_snapshots = keep_snapshots
        self.machine = InstanceMachine(HealthSettings(3.0, 15.0))
        self.told = Retelling()
        self.now = 0.0
        self.revision = 100
        self.probes: list[StartProbe] = []
        self.snapshots: list[tuple[Snapshot, str]] = []

    def take(self, number: int, kind: str, arguments: Sequence[Any]) -> None:
        # Two arrivals at one moment have no order that a rule could speak of.
        self.now += 1 / 1024
        actions = self.advance()
        report = LoadReport(number, 0.5)
        actions += getattr(self, kind)(*arguments, *([report] if kind in ("heartbeat", "stored") else []))
        for action in actions:
            if isinstance(action, StartProbe):
                self.probes.append(action)
            elif isinstance(action, Transition):
                assert (action.old, action.new) in LEGAL
        compare(self.machine, self.told, self.now)
        if self.keep_snapshots:
            snapshot = self.machine.snapshot()
            self.snapshots.append((snapshot, repr(snapshot)))

    def advance(self) -> list[Action]:
        self.told.pass_time(self.now)
        return self.machine.advance(self.now)

    def register(self, name: str, identity: str | None, role: Role) -> list[Action]:
        self.revision += 1
        registration = Registration(name, role, identity)
        self.told.register(registration, self.revision, self.now)
        return self.machine.apply(Registered(registration, self.revision), self.now)

    def delete(self, name: str, identity: str | None) -> list[Action]:
        actions = self.machine.apply(Deleted(name, identity), self.now)
        life = self.told.lives.get(name)
        own = life and life.registration.incarnation_id
        if life and life.registered and (own is None or identity in (None, own)):
            life.registered = False
            (probe,) = (action for action in actions if isinstance(action, StartProbe))
            life.probe = probe.token
        else:
            assert actions == []
        return actions

    def probe(self, back: int, healthy: bool) -> list[Action]:
        if back >= len(self.probes):
            return []
        probe = self.probes[-1 - back]
        life = self.told.lives.get(probe.name)
        if life and life.probe == probe.token:
            life.probe = None
            life.enter("LEASE_LOST" if healthy else "SUSPECT", self.now)
        return self.machine.apply(ProbeResult(probe.name, probe.token, healthy), self.now)

    def heartbeat(self, name: str, identity: str | None, loaded: bool, report: LoadReport) -> list[Action]:
        result, actions = self.machine.heartbeat(name, identity, self.now, report if loaded else None)
        life = self.told.lives.get(name)
        if life is None:
            assert result is HeartbeatResult.UNKNOWN_INSTANCE
        elif life.registration.incarnation_id not in (None, identity):
            assert result is HeartbeatResult.OTHER_INCARNATION
        else:
            assert result is HeartbeatResult.ACCEPTED
            life.beats.append(self.now)
            if loaded:
                life.loads.append((LoadSource.HEARTBEAT, self.now, report))
            if life.state == "SUSPECT":
                life.enter("LEASE_LOST", self.now)
        return actions

    def stored(self, name: str, age: int, report: LoadReport) -> list[Action]:
        life = self.told.lives.get(name)
        written = (life.revision if life else self.revision) + age
        if life and age < 0:
            life.forget_stored()
        elif life:
            life.loads.append((LoadSource.ETCD, self.now, report))
            life.stored_at = written
        return self.machine.apply(StoredLoad(name, report, written), self.now)

    def unstored(self, name: str) -> list[Action]:
        if name in self.told.lives:
            self.told.lives[name].forget_stored()
        return self.machine.apply(StoredLoadDeleted(name), self.now)

    def flip(self, name: str, identity: str | None, role: Role) -> list[Action]:
        life = self.told.lives.get(name)
        possible = (
            life is not None
            and life.registration.role is Role.MIX
            and life.registration.incarnation_id == identity
            and role in (Role.PREFILL, Role.DECODE)
        )
        assert self.machine.set_current_role(name, identity, role) is possible
        if possible and life:
            life.current = role
        return []

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.advance()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(step, max_size=60))
def test_any_short_walk_obeys_the_rules(steps: list[tuple]) -> None:
    walk = Walk()
    for number, (kind, *arguments) in enumerate(steps):
        walk.take(number, kind, arguments)
    for snapshot, was in walk.snapshots:
        assert repr(snapshot) == was, "a snapshot that was handed out has changed"


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk_obeys_the_rules(seed: int) -> None:
    chance = random.Random(seed)
    walk = Walk(keep_snapshots=False)
    for number in range(10_000):
        kind = chance.choice(list(CHOICES))
        walk.take(number, kind, [chance.choice(values) for values in CHOICES[kind]])

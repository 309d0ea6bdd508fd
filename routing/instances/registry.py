"""The registry of instances: the machine of `core`, made usable from several threads.

All inputs (etcd's watch, HTTP, probes, time) go through one lock, which is held for microseconds:
the machine only computes. Readers never take it: they read `snapshot`, an immutable value that is
swapped in one step. A thread of its own lets time pass when something is due. Times in snapshots
are those of `time.monotonic`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from routing.instances.core import (
    Action,
    HealthSettings,
    HeartbeatResult,
    Input,
    InstanceMachine,
    StartProbe,
    Transition,
)
from routing.instances.embedded import Entry, LeaseTable
from routing.instances.model import Latency, LoadReport, Registration, Role, Snapshot
from routing.instances.probe import Prober, ProbeSettings

log = logging.getLogger(__name__)


class InstanceRegistry:
    """All instances that are known now. `leases` is for the embedded registry alone."""

    def __init__(
        self,
        health: HealthSettings | None = None,
        probe: ProbeSettings | None = None,
        *,
        leases: LeaseTable | None = None,
    ) -> None:
        self._machine = InstanceMachine(health)
        self._leases = leases
        self._prober = Prober(probe or ProbeSettings(), lambda result: self.apply([result]))
        self._due = threading.Condition()
        self._deadline: float | None = None
        self._stopping = False
        self._snapshot = Snapshot()
        self._subscribers: tuple[Callable[[], None], ...] = ()
        self._thread = threading.Thread(target=self._run, name="instance-clock", daemon=True)

    def snapshot(self) -> Snapshot:
        """All instances now. Takes no lock."""
        return self._snapshot

    @property
    def has_leases(self) -> bool:
        """Whether instances can register here over HTTP."""
        return self._leases is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the threads. The last snapshot stays readable."""
        with self._due:
            self._stopping = True
            self._due.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._prober.stop(timeout)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change other than load, on whichever thread brought it. It must
        return at once and not raise; setting an event is what it is for."""
        with self._due:
            self._subscribers += (callback,)

    # ---- inputs

    def apply(self, inputs: Iterable[Input]) -> None:
        """Feed the machine, all of it before anybody sees a new snapshot."""
        with self._due:
            actions = self._feed(inputs)
            changed = self._publish()
        self._carry_out(actions, changed)

    def heartbeat(
        self,
        name: str,
        incarnation_id: str | None,
        report: LoadReport | None = None,
        latency: Latency | None = None,
    ) -> HeartbeatResult:
        """A sign of life, with its load. In force when this returns."""
        with self._due:
            now = time.monotonic()
            revived = [] if self._leases is None else self._leases.revive(name, incarnation_id, now)
            actions = self._feed(revived)
            result, more = self._machine.heartbeat(name, incarnation_id, now, report, latency)
            actions += more
            if result is HeartbeatResult.ACCEPTED and self._leases is not None:
                actions += self._feed(self._leases.renew(name, now))
            changed = self._publish()
        self._carry_out(actions, changed)
        return result

    def set_current_role(self, name: str, identity: str | None, role: Role) -> bool:
        """Flip a MIX instance. False when that life of it is gone, or it is not MIX."""
        with self._due:
            done = self._machine.set_current_role(name, identity, role)
            changed = self._publish()
        self._carry_out([], changed)
        return done

    def put(self, registration: Registration, ttl: float) -> None:
        """Register with a lease of `ttl` seconds. For the embedded registry alone."""
        with self._due:
            leases = self._must_have_leases()
            actions = self._feed(leases.put(registration, ttl, time.monotonic()))
            changed = self._publish()
        self._carry_out(actions, changed)

    def delete(self, name: str, incarnation_id: str | None = None) -> HeartbeatResult:
        """Give a lease up, if it is that incarnation's (or nobody knows whose). For the embedded registry
        alone."""
        with self._due:
            leases = self._must_have_leases()
            lease = leases.get(name)
            if lease is None:
                return HeartbeatResult.UNKNOWN_INSTANCE
            registered = lease.registration.incarnation_id
            if None not in (incarnation_id, registered) and incarnation_id != registered:
                return HeartbeatResult.OTHER_INCARNATION
            actions = self._feed(leases.delete(name))
            changed = self._publish()
        self._carry_out(actions, changed)
        return HeartbeatResult.ACCEPTED

    def set_entered(self, entered: Iterable[Entry]) -> None:
        """Take over the instances entered in the admin. For the embedded registry alone."""
        with self._due:
            leases = self._must_have_leases()
            actions = self._feed(leases.replace_entered(entered, time.monotonic()))
            changed = self._publish()
        self._carry_out(actions, changed)

    # ---- under the lock

    def _must_have_leases(self) -> LeaseTable:
        if self._leases is None:
            raise RuntimeError("instances register in etcd, not here")
        return self._leases

    def _feed(self, inputs: Iterable[Input]) -> list[Action]:
        now = time.monotonic()
        actions: list[Action] = []
        for item in inputs:
            actions += self._machine.apply(item, now)
        return actions

    def _advance(self) -> list[Action]:
        now = time.monotonic()
        actions: list[Action] = []
        if self._leases is not None:
            actions += self._feed(self._leases.expire(now))
        fallen = self._machine.advance(now)
        actions += fallen
        if self._leases is not None:
            for action in fallen:
                if isinstance(action, Transition) and action.new is None:
                    actions += self._feed(self._leases.forget(action.name, now))
        return actions

    def _publish(self) -> bool:
        """Swap the snapshot in. Whether anything but load changed."""
        before, self._snapshot = self._snapshot, self._machine.snapshot()
        deadlines = [self._machine.next_deadline()]
        if self._leases is not None:
            deadlines.append(self._leases.next_deadline())
        earliest = min((d for d in deadlines if d is not None), default=None)
        if earliest != self._deadline:
            self._deadline = earliest
            self._due.notify_all()
        return before.topology_version != self._snapshot.topology_version

    # ---- without the lock

    def _carry_out(self, actions: Iterable[Action], changed: bool) -> None:
        for action in actions:
            match action:
                case StartProbe():
                    self._prober.start_probe(action)
                case Transition():
                    _log_transition(action)
        if changed:
            for callback in self._subscribers:
                callback()

    def _run(self) -> None:
        while True:
            with self._due:
                while not self._stopping and not self._is_due():
                    self._due.wait(self._seconds_left())
                if self._stopping:
                    return
                actions = self._advance()
                changed = self._publish()
            self._carry_out(actions, changed)

    def _is_due(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


def _log_transition(transition: Transition) -> None:
    log.log(
        logging.INFO if transition.new is not None else logging.WARNING,
        "instance %s: %s → %s (%s)",
        transition.name,
        transition.old or "unknown",
        transition.new or "removed",
        transition.reason,
    )

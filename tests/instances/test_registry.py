"""The registry as several threads use it: real probes, real time, atomic snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from routing.instances.core import Deleted, HealthSettings, HeartbeatResult, Registered, StoredLoad
from routing.instances.embedded import Entry, LeaseTable
from routing.instances.model import HealthState, LoadReport, Registration, Role
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from tests.instances.support import Engine, closed_port, silent_port, states_of
from tests.support.waiting import wait_until

QUICK = HealthSettings(lease_lost_heartbeat_timeout=0.2, suspect_timeout=0.3)
STEADY = 1.0
"""Seconds without a heartbeat in which a test process on a busy machine surely comes to send one."""
PATIENT = HealthSettings(lease_lost_heartbeat_timeout=60.0, suspect_timeout=60.0)
PROBE = ProbeSettings(timeout=0.3, attempts=2)
ACTIVE, LEASE_LOST, SUSPECT = HealthState


@contextmanager
def running(health: HealthSettings = PATIENT, *, leases: bool = False) -> Iterator[InstanceRegistry]:
    registry = InstanceRegistry(health, PROBE, leases=LeaseTable() if leases else None)
    registry.start()
    try:
        yield registry
    finally:
        registry.stop()


def state(registry: InstanceRegistry, name: str) -> HealthState | None:
    view = registry.snapshot().by_name.get(name)
    return None if view is None else view.state


def wait_for(registry: InstanceRegistry, name: str, expected: HealthState | None) -> None:
    wait_until(lambda: state(registry, name) is expected, 10, lambda: f"{registry.snapshot()}")


def test_a_deleted_engine_that_answers_loses_its_lease_then_falls_silent_and_is_removed() -> None:
    with Engine().serving() as engine, running(QUICK) as registry:
        registry.apply([Registered(Registration(engine.name, incarnation_id="one"))])
        registry.apply([Deleted(engine.name, "one")])
        seen = []
        registry.subscribe(lambda: seen.append(state(registry, engine.name)))
        wait_for(registry, engine.name, None)
    assert seen == [LEASE_LOST, SUSPECT, None]


def test_heartbeats_keep_a_lease_lost_engine_and_bring_a_suspect_one_back() -> None:
    with Engine().serving() as engine, running(HealthSettings(STEADY, 60.0)) as registry:
        registry.apply([Registered(Registration(engine.name, incarnation_id="one")), Deleted(engine.name)])
        wait_for(registry, engine.name, SUSPECT)
        assert registry.heartbeat(engine.name, "one") is HeartbeatResult.ACCEPTED
        assert state(registry, engine.name) is LEASE_LOST
        until = time.monotonic() + 1.5 * STEADY
        while time.monotonic() < until:
            registry.heartbeat(engine.name, "one")
            assert state(registry, engine.name) is LEASE_LOST
            time.sleep(0.01)


def test_a_deleted_engine_that_does_not_answer_is_suspect() -> None:
    with closed_port() as port, running() as registry:
        name = f"127.0.0.1:{port}"
        registry.apply([Registered(Registration(name))])
        registry.apply([Deleted(name)])
        wait_for(registry, name, SUSPECT)
        assert "refused" in registry.snapshot().by_name[name].reason


def test_a_registration_while_the_probe_runs_wins() -> None:
    with silent_port() as port, running() as registry:
        name = f"127.0.0.1:{port}"
        registration = Registration(name, incarnation_id="one")
        registry.apply([Registered(registration), Deleted(name), Registered(registration)])
        assert state(registry, name) is ACTIVE
        # A probe that began later, and takes as long, is over: so is the first.
        later = f"localhost:{port}"
        registry.apply([Registered(Registration(later)), Deleted(later)])
        wait_for(registry, later, SUSPECT)
        assert state(registry, name) is ACTIVE


def test_a_batch_becomes_visible_in_one_step() -> None:
    with running() as registry:
        sizes = set()
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                snapshot = registry.snapshot()
                sizes.add(len(snapshot.instances))
                assert set(snapshot.by_name) == {view.name for view in snapshot.instances}

        reader = threading.Thread(target=look)
        reader.start()
        registry.apply([Registered(Registration(f"a:{n}")) for n in range(1, 129)])
        wait_until(lambda: 128 in sizes)
        stop.set()
        reader.join()
    assert sizes <= {0, 128}


def test_subscribers_hear_of_everything_but_load() -> None:
    with running() as registry:
        heard = []
        registry.subscribe(lambda: heard.append(registry.snapshot().version))
        registry.apply([Registered(Registration("a:1", Role.MIX, "one"))])
        assert len(heard) == 1
        registry.heartbeat("a:1", "one", LoadReport(1, 0.5))
        registry.apply([StoredLoad("a:1", LoadReport(2, 0.5), 1)])
        assert len(heard) == 1
        assert registry.set_current_role("a:1", "one", Role.PREFILL)
        assert len(heard) == 2
        assert not registry.set_current_role("a:1", "two", Role.DECODE)
        assert len(heard) == 2


def test_heartbeats_from_many_threads_are_all_in_force() -> None:
    with running() as registry:
        registry.apply([Registered(Registration(f"a:{n}", incarnation_id="x")) for n in range(8)])

        def beat(number: int) -> None:
            for count in range(200):
                registry.heartbeat(f"a:{number}", "x", LoadReport(count, 0.5))
                load = registry.snapshot().by_name[f"a:{number}"].load
                assert load is not None
                assert load.waiting_requests_num == count

        failures: list[BaseException] = []

        def guarded(number: int) -> None:
            try:
                beat(number)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_a_lease_ends_and_a_heartbeat_revives_it() -> None:
    with Engine().serving() as engine, running(leases=True) as registry:
        registry.put(Registration(engine.name, incarnation_id="one"), STEADY)
        assert state(registry, engine.name) is ACTIVE
        wait_for(registry, engine.name, LEASE_LOST)
        assert registry.heartbeat(engine.name, "two") is HeartbeatResult.OTHER_INCARNATION
        assert state(registry, engine.name) is LEASE_LOST
        assert registry.heartbeat(engine.name, "one") is HeartbeatResult.ACCEPTED
        assert state(registry, engine.name) is ACTIVE
        wait_for(registry, engine.name, LEASE_LOST)


def test_heartbeats_keep_a_lease() -> None:
    with running(leases=True) as registry:
        registry.put(Registration("127.0.0.1:1", incarnation_id="one"), STEADY)
        until = time.monotonic() + 1.5 * STEADY
        while time.monotonic() < until:
            registry.heartbeat("127.0.0.1:1", "one")
            assert registry.snapshot().by_name["127.0.0.1:1"].registered
            time.sleep(0.01)


def test_a_deleted_lease_is_given_up_by_its_own_incarnation_only() -> None:
    with closed_port() as port, running(leases=True) as registry:
        name = f"127.0.0.1:{port}"
        assert registry.delete(name) is HeartbeatResult.UNKNOWN_INSTANCE
        registry.put(Registration(name, incarnation_id="two"), 60.0)
        assert registry.delete(name, "one") is HeartbeatResult.OTHER_INCARNATION
        assert registry.snapshot().by_name[name].registered
        assert registry.delete(name, "two") is HeartbeatResult.ACCEPTED
        wait_for(registry, name, SUSPECT)


def test_what_was_removed_after_its_lease_has_to_register_again() -> None:
    with closed_port() as port, running(QUICK, leases=True) as registry:
        name = f"127.0.0.1:{port}"
        states = states_of(registry, name)
        registry.put(Registration(name, incarnation_id="one"), 0.1)
        wait_until(lambda: states[-2:] == [SUSPECT, None])
        assert registry.heartbeat(name, "one") is HeartbeatResult.UNKNOWN_INSTANCE
        assert registry.delete(name) is HeartbeatResult.UNKNOWN_INSTANCE
        registry.put(Registration(name, incarnation_id="one"), 60.0)
        assert state(registry, name) is ACTIVE


def test_an_entered_instance_counts_again_once_the_one_that_registered_over_it_is_removed() -> None:
    with closed_port() as port, running(QUICK, leases=True) as registry:
        name = f"127.0.0.1:{port}"
        entered = Registration(name, Role.PREFILL, register_ts_ms=5)
        registry.set_entered([Entry(entered)])
        states = states_of(registry, name)
        registry.put(Registration(name, Role.DECODE, "one"), STEADY)
        assert registry.snapshot().by_name[name].role is Role.DECODE
        registry.set_entered([Entry(entered), Entry(Registration("other:1"))])
        assert registry.snapshot().by_name[name].role is Role.DECODE
        wait_until(lambda: SUSPECT in states and states[-1] is ACTIVE)
        assert registry.snapshot().by_name[name].role is Role.PREFILL


def test_a_deletion_that_names_an_incarnation_is_taken_where_none_is_known() -> None:
    with closed_port() as port, running(leases=True) as registry:
        name = f"127.0.0.1:{port}"
        registry.set_entered([Entry(Registration(name, register_ts_ms=5))])
        assert registry.delete(name, "whichever") is HeartbeatResult.ACCEPTED
        wait_for(registry, name, SUSPECT)


def test_an_entered_instance_is_revived_by_a_heartbeat_even_after_its_removal() -> None:
    with closed_port() as port, running(QUICK, leases=True) as registry:
        name = f"127.0.0.1:{port}"
        states = states_of(registry, name)
        registry.set_entered([Entry(Registration(name, register_ts_ms=5), 0.1)])
        wait_until(lambda: states[-2:] == [SUSPECT, None])
        assert registry.heartbeat(name, "whichever", LoadReport(1, 0.5)) is HeartbeatResult.ACCEPTED
        assert state(registry, name) is ACTIVE
        assert registry.snapshot().by_name[name].load is not None


def test_a_stopped_registry_has_no_threads_and_keeps_its_last_snapshot() -> None:
    with running() as registry:
        registry.apply([Registered(Registration("a:1"))])
    names = {thread.name for thread in threading.enumerate()}
    assert names.isdisjoint({"instance-clock", "health-probe"})
    assert state(registry, "a:1") is ACTIVE

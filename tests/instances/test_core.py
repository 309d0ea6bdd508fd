"""The health machine, transition by transition."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

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
from routing.instances.model import (
    HealthState,
    InstanceView,
    Latency,
    LoadReport,
    LoadSource,
    Registration,
    Role,
)

ACTIVE, LEASE_LOST, SUSPECT = HealthState
NAME = "a:1"
LOAD = LoadReport(3, 0.25)


def registration(
    name: str = NAME, incarnation: str | None = "one", role: Role = Role.DEFAULT, dp_size: int = 1
) -> Registration:
    return Registration(name=name, role=role, incarnation_id=incarnation, dp_size=dp_size)


def machine_with(*registrations: Registration) -> InstanceMachine:
    machine = InstanceMachine(HealthSettings(lease_lost_heartbeat_timeout=3.0, suspect_timeout=15.0))
    for item in registrations:
        machine.apply(Registered(item), 0.0)
    return machine


def view(machine: InstanceMachine, name: str = NAME) -> InstanceView:
    return machine.snapshot().by_name[name]


def state(machine: InstanceMachine, name: str = NAME) -> HealthState | None:
    found = machine.snapshot().by_name.get(name)
    return None if found is None else found.state


def probe_of(actions: Iterable[Action]) -> StartProbe:
    (probe,) = (action for action in actions if isinstance(action, StartProbe))
    return probe


def lose(machine: InstanceMachine, now: float, *, healthy: bool, name: str = NAME) -> list[Action]:
    probe = probe_of(machine.apply(Deleted(name), now))
    return machine.apply(ProbeResult(name, probe.token, healthy, "status 200" if healthy else "refused"), now)


# ---- registration


def test_a_new_name_is_active() -> None:
    machine = machine_with()
    (transition,) = machine.apply(Registered(registration(), 7, "key"), 5.0)
    assert transition == Transition(NAME, "one", None, ACTIVE, "registered")
    found = view(machine)
    assert (found.state, found.since, found.revision, found.key, found.load) == (ACTIVE, 5.0, 7, "key", None)


def test_the_same_incarnation_again_is_a_refresh() -> None:
    machine = machine_with(registration())
    machine.heartbeat(NAME, "one", 1.0, LOAD)
    before = view(machine)
    assert machine.apply(Registered(registration(dp_size=2), 9), 2.0) == []
    after = view(machine)
    assert (after.order, after.since, after.load, after.dp_size) == (
        before.order,
        before.since,
        before.load,
        2,
    )
    assert after.revision == 9


@pytest.mark.parametrize("healthy", [True, False])
def test_a_refresh_makes_an_instance_active_again(healthy: bool) -> None:
    machine = machine_with(registration())
    lose(machine, 1.0, healthy=healthy)
    (transition,) = machine.apply(Registered(registration()), 2.0)
    assert isinstance(transition, Transition)
    assert (transition.old, transition.new) == (LEASE_LOST if healthy else SUSPECT, ACTIVE)
    assert view(machine).registered


def test_another_incarnation_removes_the_old_one_with_everything_known_of_it() -> None:
    machine = machine_with(registration(), registration("b:2"))
    machine.heartbeat(NAME, "one", 1.0, LOAD, Latency(1.0, 2.0))
    old = view(machine)
    gone, came = machine.apply(Registered(registration(incarnation="two")), 2.0)
    assert isinstance(gone, Transition)
    assert isinstance(came, Transition)
    assert (gone.identity, gone.new) == ("one", None)
    assert (came.identity, came.old, came.new) == ("two", None, ACTIVE)
    new = view(machine)
    assert (new.load, new.latency, new.heartbeat_at) == (None, None, None)
    assert new.order > old.order
    assert [item.name for item in machine.snapshot().instances] == ["b:2", NAME]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (registration(incarnation=None), registration(incarnation=None), True),
        (registration(incarnation="one"), registration(incarnation=None), False),
        (registration(incarnation=None), registration(incarnation="one"), False),
        (Registration(NAME, register_ts_ms=1), Registration(NAME, register_ts_ms=1), True),
        (Registration(NAME, register_ts_ms=1), Registration(NAME, register_ts_ms=2), False),
        (Registration(NAME, register_ts_ms=1), Registration(NAME), False),
        (
            Registration(NAME, incarnation_id="x", register_ts_ms=1),
            Registration(NAME, incarnation_id="x", register_ts_ms=2),
            True,
        ),
    ],
)
def test_what_makes_another_life(first: Registration, second: Registration, same: bool) -> None:
    machine = machine_with(first)
    order = view(machine).order
    machine.apply(Registered(second), 1.0)
    assert (view(machine).order == order) is same


# ---- deletion and probes


def test_a_deletion_starts_a_probe_and_changes_nothing_else() -> None:
    machine = machine_with(registration())
    actions = machine.apply(Deleted(NAME), 1.0)
    assert probe_of(actions).name == NAME
    assert len(actions) == 1
    assert state(machine) is ACTIVE
    assert not view(machine).registered


@pytest.mark.parametrize(("healthy", "expected"), [(True, LEASE_LOST), (False, SUSPECT)])
def test_the_probe_decides(healthy: bool, expected: HealthState) -> None:
    machine = machine_with(registration())
    (transition,) = lose(machine, 1.0, healthy=healthy)
    assert isinstance(transition, Transition)
    assert (transition.old, transition.new) == (ACTIVE, expected)
    assert ("200" in transition.reason) is healthy
    assert view(machine).schedulable is healthy


def test_a_deletion_that_carries_another_incarnation_is_stale() -> None:
    machine = machine_with(registration(incarnation="two"))
    assert machine.apply(Deleted(NAME, "one"), 1.0) == []
    assert view(machine).registered


@pytest.mark.parametrize("identity", ["two", None])
def test_a_deletion_of_the_current_or_of_an_unknown_incarnation_counts(identity: str | None) -> None:
    machine = machine_with(registration(incarnation="two"))
    assert probe_of(machine.apply(Deleted(NAME, identity), 1.0))


def test_a_result_is_dropped_when_the_name_was_registered_after_the_probe_began() -> None:
    machine = machine_with(registration())
    probe = probe_of(machine.apply(Deleted(NAME), 1.0))
    machine.apply(Registered(registration()), 1.5)
    assert machine.apply(ProbeResult(NAME, probe.token, healthy=False), 2.0) == []
    assert state(machine) is ACTIVE


def test_a_result_for_a_process_that_was_replaced_is_dropped() -> None:
    machine = machine_with(registration())
    probe = probe_of(machine.apply(Deleted(NAME), 1.0))
    machine.apply(Registered(registration(incarnation="two")), 1.5)
    assert machine.apply(ProbeResult(NAME, probe.token, healthy=False), 2.0) == []
    assert state(machine) is ACTIVE


def test_only_the_last_probe_counts() -> None:
    machine = machine_with(registration())
    first = probe_of(machine.apply(Deleted(NAME), 1.0))
    machine.apply(Registered(registration()), 1.1)
    second = probe_of(machine.apply(Deleted(NAME), 1.2))
    assert machine.apply(ProbeResult(NAME, first.token, healthy=False), 1.3) == []
    machine.apply(ProbeResult(NAME, second.token, healthy=True), 1.4)
    assert state(machine) is LEASE_LOST
    assert machine.apply(ProbeResult(NAME, second.token, healthy=False), 1.5) == []


def test_a_second_deletion_and_unknown_names_change_nothing() -> None:
    machine = machine_with(registration())
    lose(machine, 1.0, healthy=True)
    assert machine.apply(Deleted(NAME), 1.5) == []
    assert machine.apply(Deleted("nobody:1"), 1.5) == []
    assert machine.apply(ProbeResult("nobody:1", 0, healthy=True), 1.5) == []
    assert state(machine) is LEASE_LOST


# ---- time and heartbeats


@pytest.mark.parametrize(("after", "expected"), [(2.999, LEASE_LOST), (3.0, SUSPECT), (50.0, SUSPECT)])
def test_lease_lost_without_a_heartbeat_becomes_suspect(after: float, expected: HealthState) -> None:
    machine = machine_with(registration())
    lose(machine, 10.0, healthy=True)
    assert machine.next_deadline() == 13.0
    machine.advance(10.0 + after)
    assert state(machine) is expected


def test_heartbeats_keep_lease_lost_alive_and_an_older_one_does_not_shorten_it() -> None:
    machine = machine_with(registration())
    machine.heartbeat(NAME, "one", 9.0)
    lose(machine, 10.0, healthy=True)
    machine.advance(12.9)
    assert state(machine) is LEASE_LOST
    machine.heartbeat(NAME, "one", 12.9)
    machine.advance(15.8)
    assert state(machine) is LEASE_LOST
    machine.advance(15.9)
    assert state(machine) is SUSPECT


@pytest.mark.parametrize(("after", "expected"), [(14.999, SUSPECT), (15.0, None)])
def test_suspect_is_removed_in_time(after: float, expected: HealthState | None) -> None:
    machine = machine_with(registration())
    lose(machine, 10.0, healthy=False)
    assert machine.next_deadline() == 25.0
    machine.advance(10.0 + after)
    assert state(machine) is expected


def test_a_heartbeat_of_the_same_incarnation_leads_back_to_lease_lost() -> None:
    machine = machine_with(registration())
    lose(machine, 10.0, healthy=False)
    result, (transition,) = machine.heartbeat(NAME, "one", 20.0)
    assert result is HeartbeatResult.ACCEPTED
    assert isinstance(transition, Transition)
    assert (transition.old, transition.new) == (SUSPECT, LEASE_LOST)
    assert machine.next_deadline() == 23.0


@pytest.mark.parametrize(
    ("registered", "sent", "expected"),
    [
        ("one", "one", HeartbeatResult.ACCEPTED),
        ("one", "two", HeartbeatResult.OTHER_INCARNATION),
        ("one", None, HeartbeatResult.OTHER_INCARNATION),
        (None, None, HeartbeatResult.ACCEPTED),
        (None, "one", HeartbeatResult.ACCEPTED),
    ],
)
def test_a_heartbeat_must_name_the_registered_incarnation(
    registered: str | None, sent: str | None, expected: HeartbeatResult
) -> None:
    machine = machine_with(registration(incarnation=registered))
    lose(machine, 1.0, healthy=False)
    result, actions = machine.heartbeat(NAME, sent, 2.0, LOAD)
    accepted = expected is HeartbeatResult.ACCEPTED
    assert result is expected
    assert bool(actions) is accepted
    assert state(machine) is (LEASE_LOST if accepted else SUSPECT)
    assert (view(machine).load is not None) is accepted


def test_a_removed_instance_is_unknown_to_heartbeats_and_comes_back_by_registration_alone() -> None:
    machine = machine_with(registration())
    lose(machine, 0.0, healthy=False)
    machine.advance(100.0)
    assert machine.heartbeat(NAME, "one", 101.0, LOAD) == (HeartbeatResult.UNKNOWN_INSTANCE, [])
    machine.apply(StoredLoad(NAME, LOAD, 99), 101.0)
    assert machine.snapshot().instances == ()
    machine.apply(Registered(registration()), 102.0)
    assert (state(machine), view(machine).load) == (ACTIVE, None)


def test_active_instances_have_no_deadline() -> None:
    machine = machine_with(registration())
    machine.heartbeat(NAME, "one", 1.0, LOAD)
    assert machine.next_deadline() is None
    assert machine.advance(1e9) == []
    assert state(machine) is ACTIVE


# ---- roles


def mix(name: str, incarnation: str = "one") -> Registration:
    return registration(name, incarnation, Role.MIX)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((), Role.DECODE),
        ((registration("d:1", role=Role.DEFAULT),), Role.DECODE),
        ((registration("p:1", role=Role.PREFILL),), Role.DECODE),
        ((registration("d:1", role=Role.DECODE),), Role.PREFILL),
        ((mix("m:1"),), Role.PREFILL),
        ((mix("m:1"), mix("m:2")), Role.PREFILL),
    ],
)
def test_mix_takes_the_side_that_is_missing(before: tuple[Registration, ...], expected: Role) -> None:
    machine = machine_with(*before, mix("new:1"))
    found = view(machine, "new:1")
    assert (found.role, found.current_role) == (Role.MIX, expected)


def test_a_replaced_mix_does_not_count_itself_as_the_decoder() -> None:
    machine = machine_with(mix("m:1"))
    machine.apply(Registered(mix("m:1", "two")), 1.0)
    assert view(machine, "m:1").current_role is Role.DECODE


@pytest.mark.parametrize("decoder", [registration("d:1", role=Role.DECODE), mix("d:1")])
@pytest.mark.parametrize("healthy", [True, False])
def test_a_decoder_counts_in_whatever_state_until_it_is_removed(decoder: Registration, healthy: bool) -> None:
    machine = machine_with(decoder)
    lose(machine, 1.0, healthy=healthy, name="d:1")
    machine.apply(Registered(mix("m:1")), 2.0)
    assert view(machine, "m:1").current_role is Role.PREFILL
    machine.advance(10.0)
    machine.advance(100.0)
    assert state(machine, "d:1") is None
    machine.apply(Registered(mix("m:2")), 101.0)
    assert view(machine, "m:2").current_role is Role.DECODE


def test_mix_keeps_its_role_through_refreshes_and_loss_of_the_lease() -> None:
    machine = machine_with(mix("m:1"), mix("m:2"))
    assert machine.set_current_role("m:2", "one", Role.DECODE)
    machine.apply(Registered(mix("m:2")), 1.0)
    lose(machine, 2.0, healthy=False, name="m:2")
    machine.apply(Registered(mix("m:2")), 3.0)
    assert view(machine, "m:2").current_role is Role.DECODE


@pytest.mark.parametrize(
    ("name", "identity", "role", "done"),
    [
        ("m:1", "one", Role.PREFILL, True),
        ("m:1", "one", Role.DECODE, True),
        ("m:1", "two", Role.PREFILL, False),
        ("m:1", None, Role.PREFILL, False),
        ("m:1", "one", Role.DEFAULT, False),
        ("m:1", "one", Role.MIX, False),
        ("p:1", "one", Role.DECODE, False),
        ("nobody:1", "one", Role.DECODE, False),
    ],
)
def test_only_a_living_mix_can_be_flipped(name: str, identity: str | None, role: Role, done: bool) -> None:
    machine = machine_with(mix("m:1"), registration("p:1", role=Role.PREFILL))
    assert machine.set_current_role(name, identity, role) is done
    assert view(machine, "m:1").current_role is (role if done else Role.DECODE)


def test_a_registration_with_another_type_changes_the_role() -> None:
    machine = machine_with(registration(role=Role.PREFILL))
    machine.apply(Registered(registration(role=Role.MIX)), 1.0)
    assert view(machine).current_role is Role.DECODE
    machine.apply(Registered(registration(role=Role.DEFAULT)), 2.0)
    assert view(machine).current_role is Role.DEFAULT


@pytest.mark.parametrize(
    ("role", "prefill"), [(Role.DEFAULT, True), (Role.PREFILL, True), (Role.DECODE, False)]
)
def test_who_has_which_role(role: Role, prefill: bool) -> None:
    found = view(machine_with(registration(role=role)))
    assert (found.takes_prefill, found.current_role) == (prefill, role)


def test_serving_counts_those_that_can_be_scheduled_by_current_role() -> None:
    machine = machine_with(
        registration("a:1"), registration("b:1", role=Role.PREFILL), mix("m:1"), mix("m:2"), mix("m:3")
    )
    lose(machine, 1.0, healthy=False, name="m:3")
    lose(machine, 1.0, healthy=True, name="m:2")
    assert machine.snapshot().serving() == {Role.DEFAULT: 1, Role.PREFILL: 2, Role.DECODE: 1}


# ---- load


def test_a_stored_load_older_than_the_registration_is_ignored() -> None:
    machine = machine_with()
    machine.apply(Registered(registration(), 10), 0.0)
    machine.apply(StoredLoad(NAME, LOAD, 9), 1.0)
    assert view(machine).load is None
    machine.apply(StoredLoad(NAME, LOAD, 11), 2.0)
    load = view(machine).load
    assert load is not None
    assert (load.report, load.source, load.received_at) == (LOAD, LoadSource.ETCD, 2.0)


def test_registering_again_ends_what_the_load_in_etcd_is_worth_and_keeps_the_heartbeat() -> None:
    machine = machine_with()
    machine.apply(Registered(registration(), 10), 0.0)
    machine.apply(StoredLoad(NAME, LOAD, 11), 1.0)
    machine.apply(Registered(registration(), 11), 2.0)
    assert view(machine).load is not None, "written in one transaction"
    machine.apply(Registered(registration(), 12), 3.0)
    assert view(machine).load is None
    machine.heartbeat(NAME, "one", 4.0, LOAD)
    machine.apply(StoredLoad(NAME, LoadReport(9, 0.5), 13), 20.0)
    machine.apply(Registered(registration(), 14), 21.0)
    load = view(machine).load
    assert load is not None
    assert (load.source, load.report) == (LoadSource.HEARTBEAT, LOAD)


def test_a_load_of_an_earlier_life_takes_the_place_of_what_was_known_from_etcd() -> None:
    """As when the store is replaced by one with lower revisions."""
    machine = machine_with()
    machine.apply(Registered(registration(), 1000), 0.0)
    machine.apply(StoredLoad(NAME, LOAD, 1001), 1.0)
    machine.apply(Registered(registration(), 9), 2.0)
    machine.apply(StoredLoad(NAME, LoadReport(1, 0.5), 8), 3.0)
    assert view(machine).load is None


def test_the_deletion_of_the_stored_load_clears_what_came_from_there_alone() -> None:
    machine = machine_with(registration())
    machine.apply(StoredLoad(NAME, LOAD, 1), 1.0)
    machine.apply(StoredLoadDeleted(NAME), 2.0)
    assert view(machine).load is None
    machine.heartbeat(NAME, "one", 3.0, LOAD)
    machine.apply(StoredLoadDeleted(NAME), 4.0)
    load = view(machine).load
    assert load is not None
    assert load.source is LoadSource.HEARTBEAT
    machine.apply(StoredLoadDeleted("nobody:1"), 5.0)


def test_precedence_turns_by_itself_when_its_time_is_over() -> None:
    machine = machine_with(registration())
    machine.heartbeat(NAME, "one", 100.0, LOAD)
    machine.apply(StoredLoad(NAME, LoadReport(9, 0.5), 1), 105.0)
    assert view(machine).load is not None
    assert machine.next_deadline() == 110.0
    topology = machine.snapshot().topology_version
    machine.advance(110.0)
    load = view(machine).load
    assert load is not None
    assert (load.source, load.received_at) == (LoadSource.ETCD, 105.0)
    assert machine.next_deadline() is None
    assert machine.snapshot().topology_version == topology


def test_load_does_not_expire() -> None:
    machine = machine_with(registration())
    machine.heartbeat(NAME, "one", 1.0, LOAD)
    machine.advance(1e6)
    load = view(machine).load
    assert load is not None
    assert load.report == LOAD


# ---- snapshots


def test_snapshots_do_not_change_and_are_the_same_object_while_nothing_happens() -> None:
    machine = machine_with(registration(), registration("b:2"))
    first = machine.snapshot()
    assert machine.snapshot() is first
    machine.heartbeat(NAME, "one", 1.0, LOAD)
    second = machine.snapshot()
    assert first.by_name[NAME].load is None
    assert second.by_name["b:2"] is first.by_name["b:2"]
    assert second.version > first.version
    assert second.topology_version == first.topology_version
    lose(machine, 2.0, healthy=False)
    third = machine.snapshot()
    assert third.topology_version > second.topology_version
    assert second.by_name[NAME].state is ACTIVE

"""The facts behind `/livez` and `/readyz`."""

from __future__ import annotations

import threading

from kvportal.facts import LOOK_SECONDS, FactsReader
from routing.instances.model import HealthState, InstanceView, Registration, Role, Snapshot
from streams.status import StreamState, StreamStatus
from tests.http.shells import spec, status


def view(order: int, role: Role, current: Role, state: HealthState = HealthState.ACTIVE) -> InstanceView:
    return InstanceView(Registration(f"i{order}", role), order, current, state, 0.0, "registered")


class Situation:
    """Everything that a reader asks, in the hands of the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.instances = Snapshot()
        self.desired = 0
        self.statuses: tuple[StreamStatus, ...] = ()
        self.trouble: str | None = None
        self.facts = FactsReader(
            snapshot=lambda: self.instances,
            statuses=lambda: self.statuses,
            desired=lambda: self.desired,
            kv_events=True,
            static_streams=False,
            source_trouble=lambda: self.trouble,
            clock=lambda: self.now,
        )


def test_instances_count_by_their_current_role_while_they_can_be_scheduled():
    situation = Situation()
    situation.instances = Snapshot(
        instances=(
            view(0, Role.DEFAULT, Role.DEFAULT),
            view(1, Role.MIX, Role.PREFILL, HealthState.LEASE_LOST),
            view(2, Role.MIX, Role.DECODE),
            view(3, Role.DECODE, Role.DECODE, HealthState.SUSPECT),
        ),
        topology_version=1,
    )
    facts = situation.facts()
    assert (facts.instances, facts.default, facts.prefill, facts.decode) == (4, 1, 1, 1)
    situation.instances = Snapshot(instances=(), topology_version=2)
    assert (situation.facts().instances, situation.facts().default) == (0, 0)


def test_what_keeps_instances_from_being_known_is_told_while_none_is():
    situation = Situation()
    situation.trouble = "etcd is not connected: no answer in time"
    assert situation.facts().source_trouble == situation.trouble
    situation.instances = Snapshot(instances=(view(0, Role.DEFAULT, Role.DEFAULT),), topology_version=1)
    assert situation.facts().source_trouble is None


def test_it_runs_from_up_to_down():
    situation = Situation()
    assert not situation.facts().running
    situation.facts.up(())
    situation.now += 7
    assert situation.facts().running
    assert situation.facts().seconds_up == 7
    assert not situation.facts().draining
    situation.facts.draining()
    assert situation.facts().draining
    situation.facts.down()
    assert not situation.facts().running


def test_streams_are_counted_again_after_a_moment():
    situation = Situation()
    assert situation.facts().desired_streams == 0
    situation.desired = 3
    states = (StreamState.SYNCHRONIZED, StreamState.UNSYNCHRONIZED, StreamState.SYNCHRONIZED)
    situation.statuses = tuple(status(spec(rank=rank), state) for rank, state in enumerate(states))
    assert (situation.facts().desired_streams, situation.facts().synchronized_streams) == (0, 0)
    situation.now += LOOK_SECONDS
    assert (situation.facts().desired_streams, situation.facts().synchronized_streams) == (3, 2)


def test_a_thread_that_has_ended_is_named():
    situation = Situation()
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="essential")
    thread.start()
    situation.facts.up(["essential"])
    assert situation.facts().broken == ()
    leave.set()
    thread.join()
    situation.now += LOOK_SECONDS
    assert situation.facts().broken == ("the thread essential has ended",)
    situation.facts.down()
    situation.now += LOOK_SECONDS
    assert situation.facts().broken == ()

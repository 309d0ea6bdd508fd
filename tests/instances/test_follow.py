"""The loop between registry and directory: what it tells the directory, when, and in which steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from routing.instances.core import Deleted, HealthSettings, Registered
from routing.instances.follow import DiscoveryLoop
from routing.instances.model import HealthState, LoadReport, Registration, Role
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from streams.discovery import DiscoverySettings
from streams.spec import StreamSpec
from tests.instances.support import closed_port, states_of
from tests.support.waiting import wait_until


class Recorder:
    """A directory that only writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.fail_next = False

    def set_desired(self, specs: Iterable[StreamSpec]) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("not now")
        self.told.append(tuple(f"{spec.instance_name}/{spec.dp_rank}" for spec in specs))

    @property
    def changes(self) -> list[tuple[str, ...]]:
        """What was told, without repetitions."""
        return [told for n, told in enumerate(self.told) if n == 0 or self.told[n - 1] != told]


@contextmanager
def loop(
    refresh_ms: int = 60_000, max_streams: int = 128
) -> Iterator[tuple[InstanceRegistry, Recorder, DiscoveryLoop]]:
    registry = InstanceRegistry(HealthSettings(60.0, 0.2), ProbeSettings(timeout=0.3, attempts=1))
    recorder = Recorder()
    # Offsets that leave room above the ports that the system hands out.
    settings = DiscoverySettings(
        True, event_port_offset=1000, replay_port_offset=3000, refresh_interval_ms=refresh_ms
    )
    follower = DiscoveryLoop(registry, recorder, settings, max_streams)
    registry.start()
    follower.start()
    wait_until(lambda: recorder.told)
    try:
        yield registry, recorder, follower
    finally:
        follower.stop()
        registry.stop()


def registered(
    name: str, incarnation: str | None = "one", dp_size: int = 1, role: Role = Role.DEFAULT
) -> Registered:
    return Registered(Registration(name, role, incarnation, dp_size=dp_size))


def told(recorder: Recorder, *expected: str) -> None:
    wait_until(lambda: recorder.told[-1] == expected, 10, lambda: f"{recorder.told}")


def test_a_change_is_followed_at_once_and_not_only_after_the_interval() -> None:
    with loop(refresh_ms=60_000) as (registry, recorder, follower):
        registry.apply([registered("a:1", dp_size=2)])
        told(recorder, "a:1/0", "a:1/1")
        registry.apply([registered("b:1", role=Role.MIX)])
        assert follower.exclusions()["b:1"].code == "role"
        registry.set_current_role("b:1", "one", Role.PREFILL)
        told(recorder, "a:1/0", "a:1/1", "b:1/0")
        assert [spec.dp_rank for spec in follower.desired()] == [0, 1, 0]
        assert follower.exclusions() == {}


def test_the_interval_repairs_what_failed() -> None:
    with loop(refresh_ms=50) as (registry, recorder, _):
        recorder.fail_next = True
        registry.apply([registered("a:1")])
        told(recorder, "a:1/0")


def test_loads_do_not_wake_the_loop() -> None:
    with loop(refresh_ms=60_000) as (registry, recorder, _):
        registry.apply([registered("a:1")])
        told(recorder, "a:1/0")
        count = len(recorder.told)
        for n in range(100):
            registry.heartbeat("a:1", "one", LoadReport(n, 0.5))
        registry.apply([registered("b:1")])
        told(recorder, "a:1/0", "b:1/0")
        assert len(recorder.told) == count + 1


def test_a_suspect_instance_is_dropped_and_a_lease_lost_one_stays() -> None:
    with closed_port() as port, loop() as (registry, recorder, follower):
        name = f"127.0.0.1:{port}"
        registry.apply([registered(name)])
        told(recorder, f"{name}/0")
        registry.apply([Deleted(name)])
        told(recorder)
        assert follower.exclusions() == {}


def test_a_change_of_ranks_takes_all_streams_of_the_instance_down_first() -> None:
    with loop() as (registry, recorder, _):
        registry.apply([registered("a:1", dp_size=2), registered("b:1")])
        told(recorder, "a:1/0", "a:1/1", "b:1/0")
        registry.apply([registered("a:1", dp_size=3)])
        told(recorder, "a:1/0", "a:1/1", "a:1/2", "b:1/0")
        assert recorder.changes[-3:] == [
            ("a:1/0", "a:1/1", "b:1/0"),
            ("b:1/0",),
            ("a:1/0", "a:1/1", "a:1/2", "b:1/0"),
        ]


def test_another_life_that_nothing_tells_apart_starts_over_all_the_same() -> None:
    with closed_port() as port, loop(refresh_ms=60_000) as (registry, recorder, _):
        name = f"127.0.0.1:{port}"
        registry.apply([registered(name, None), registered("b:1", None)])
        told(recorder, "b:1/0", f"{name}/0") if name > "b:1" else told(recorder, f"{name}/0", "b:1/0")
        order = registry.snapshot().by_name[name].order
        # Replaced twice within one look of the loop: the specs are the same, the process is not.
        registry.apply([registered(name, "other"), registered(name, None)])
        assert registry.snapshot().by_name[name].order != order
        wait_until(lambda: recorder.changes[-2:-1] == [("b:1/0",)], 10, lambda: f"{recorder.told}")


def test_exclusions_are_those_of_the_snapshot_that_is_shown() -> None:
    with loop(max_streams=2) as (registry, _, follower):
        registry.apply([registered("a:1", dp_size=2), registered("b:1"), registered("h:9", dp_size=10**12)])
        assert {name: fault.code for name, fault in follower.exclusions().items()} == {
            "b:1": "max_streams",
            "h:9": "port_overflow",
        }


def test_stop_ends_the_thread() -> None:
    with loop():
        pass
    assert "discovery" not in {thread.name for thread in threading.enumerate()}


def test_states_reach_the_directory_through_the_health_machine() -> None:
    """SUSPECT, and back by a registration: dropped and taken up again."""
    with closed_port() as port, loop() as (registry, recorder, _):
        name = f"127.0.0.1:{port}"
        registry.apply([registered(name)])
        told(recorder, f"{name}/0")
        states = states_of(registry, name)
        registry.apply([Deleted(name)])
        wait_until(lambda: HealthState.SUSPECT in states)
        told(recorder)
        registry.apply([registered(name)])
        told(recorder, f"{name}/0")

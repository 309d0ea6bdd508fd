"""Discovery end to end: real engines on TCP, registered in a real etcd, followed by a real directory."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from routing.instances.core import HealthSettings
from routing.instances.etcd import EtcdClient
from routing.instances.follow import DiscoveryLoop
from routing.instances.keys import KeyNames
from routing.instances.model import HealthState, Role
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from routing.instances.sources import EtcdSource, Instances
from streams.directory import Directory
from streams.discovery import DiscoverySettings
from streams.simulator import SimulatedEngine
from streams.spec import Limits, StreamId
from streams.status import Match, StreamState, StreamStatus
from tests.instances.support import Engine, TestEtcd, quick_settings, registration_value
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("etcd")

EVENT_OFFSET, REPLAY_OFFSET = 1000, 3000
"""Small enough that ports which the system hands out have room above them."""
SETTINGS = DiscoverySettings(
    True,
    block_size=16,
    event_port_offset=EVENT_OFFSET,
    replay_port_offset=REPLAY_OFFSET,
    refresh_interval_ms=1000,
)
NAMES = KeyNames()
_incarnations = itertools.count(1)


class Machine:
    """An address where one engine after the other runs."""

    def __init__(self, ranks: int = 1) -> None:
        self.engine: SimulatedEngine | None = None
        for _ in range(100):
            # Below the ports that the system gives to clients: one of those must not be taken while the
            # next process starts.
            port = random.SystemRandom().randrange(14_000, 28_000)
            self.name = f"127.0.0.1:{port}"
            self.event_port, self.replay_port = port + EVENT_OFFSET, port + REPLAY_OFFSET
            try:
                self.run(ranks)
            except OSError:
                continue
            return
        raise AssertionError("no free ports")

    def run(self, ranks: int = 1) -> SimulatedEngine:
        """A new process at this address, with other content than the one before: some traffic, and its
        own prompt on each rank."""
        if self.engine is not None:
            self.engine.close()
        self.incarnation = f"process-{next(_incarnations)}"
        self.engine = SimulatedEngine(
            seed=next(_incarnations),
            dp_size=ranks,
            device_blocks=50,
            event_port=self.event_port,
            replay_port=self.replay_port,
        )
        self.engine.step(3, wait=False)
        self.prompts = [
            random.Random(f"{self.incarnation}/{rank}").choices(range(90_000), k=160) for rank in range(ranks)
        ]
        for rank, prompt in zip(self.engine.ranks, self.prompts, strict=True):
            rank.store(prompt)
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class Site:
    """A portal as far as it follows streams, and the etcd that it lives on."""

    def __init__(
        self, client: EtcdClient, instances: Instances, directory: Directory, loop: DiscoveryLoop
    ) -> None:
        self.client = client
        self.instances = instances
        self.directory = directory
        self.loop = loop

    def register(self, name: str, incarnation: str, *, role: Role = Role.DEFAULT, **fields: object) -> int:
        return self.client.put(NAMES.registration(role, name), registration_value(incarnation, **fields))

    def leave(self, name: str, role: Role = Role.DEFAULT) -> None:
        self.client.delete(NAMES.registration(role, name))

    def statuses(self) -> dict[StreamId, StreamStatus]:
        return {status.spec.id: status for status in self.directory.statuses()}

    def wait_synchronized(self, *streams: tuple[str, int], incarnation: str | None = None) -> None:
        """Wait until exactly these streams are followed, and all of them serve."""
        expected = {StreamId(*stream) for stream in streams}

        def serving() -> bool:
            statuses = self.statuses()
            return set(statuses) == expected and all(
                status.state is StreamState.SYNCHRONIZED
                and (incarnation is None or status.spec.incarnation == incarnation)
                for status in statuses.values()
            )

        wait_until(serving, 20, lambda: f"{expected}\n{self.statuses()}\n{self.loop.exclusions()}")

    def matches(self, prompt: Iterable[int] = ()) -> list[Match]:
        return self.directory.query(array("I", prompt).tobytes())

    def hits(self, prompt: Iterable[int]) -> dict[str, int]:
        """Tokens of a prompt that are held, by stream; streams without any left out."""
        matches = self.matches(prompt)
        return {str(m.spec.id): m.reusable_prefix_tokens for m in matches if m.reusable_prefix_tokens}

    def excluded(self) -> dict[str, str]:
        return {name: fault.code for name, fault in self.loop.exclusions().items()}


@contextmanager
def portal(etcd: TestEtcd, *, max_streams: int = 128, health: HealthSettings | None = None) -> Iterator[Site]:
    registry = InstanceRegistry(health or HealthSettings(60.0, 60.0), ProbeSettings(timeout=0.5, attempts=1))
    instances = Instances(registry, EtcdSource(registry, quick_settings(etcd.endpoint, request_timeout=2.0)))
    # No calibration by itself: a snapshot that is taken has a reason that the test knows.
    directory = Directory(Limits(max_streams=max_streams, resync_interval_ms=3_600_000))
    loop = DiscoveryLoop(registry, directory, SETTINGS, max_streams)
    with ExitStack() as stack:
        client = stack.enter_context(closing(EtcdClient(quick_settings(etcd.endpoint, request_timeout=2.0))))
        for start, stop in (
            (directory.start, directory.stop),
            (instances.start, instances.stop),
            (loop.start, loop.stop),
        ):
            start()
            stack.callback(stop)
        yield Site(client, instances, directory, loop)


@pytest.fixture
def site(common_etcd: TestEtcd) -> Iterator[Site]:
    with portal(common_etcd) as site:
        yield site


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made: list[Machine] = []
    yield made
    for machine in made:
        machine.close()


def machine(machines: list[Machine], ranks: int = 1) -> Machine:
    machines.append(Machine(ranks))
    return machines[-1]


class Bystander:
    """An instance that has nothing to do with what happens: its streams must not notice."""

    def __init__(self, site: Site, machines: list[Machine]) -> None:
        self.site = site
        self.machine = machine(machines, 2)
        site.register(self.machine.name, self.machine.incarnation, dp_size=2)
        self.streams = ((self.machine.name, 0), (self.machine.name, 1))
        site.wait_synchronized(*self.streams)

    def is_untouched(self) -> None:
        """One snapshot each since the stream was created, and it still follows."""
        for stream in self.streams:
            status = self.site.statuses()[StreamId(*stream)]
            assert status.state is StreamState.SYNCHRONIZED
            assert status.last_snapshot is not None
            assert status.last_snapshot.count == 1
            assert status.counters.get("resyncs:start") == 1
        assert self.machine.engine is not None
        last = self.machine.engine.ranks[0].publisher.last_sequence
        self.machine.engine.step(1)
        wait_until(lambda: self.site.statuses()[StreamId(*self.streams[0])].sequence == last + 1)


def test_an_instance_joins_is_refreshed_and_leaves(site: Site, machines: list[Machine]) -> None:
    bystander = Bystander(site, machines)
    one = machine(machines, 2)
    site.register(one.name, one.incarnation, dp_size=2)
    site.wait_synchronized(*bystander.streams, (one.name, 0), (one.name, 1))
    assert site.hits(one.prompts[1]) == {f"{one.name}/dp1": 160}
    since = site.statuses()[StreamId(one.name, 0)].since
    revision = site.register(one.name, one.incarnation, dp_size=2, something_new=1)
    wait_until(lambda: site.instances.registry.snapshot().by_name[one.name].revision == revision)
    assert site.statuses()[StreamId(one.name, 0)].since == since
    site.leave(one.name)
    site.wait_synchronized(*bystander.streams)
    assert {match.spec.instance_name for match in site.matches()} == {bystander.machine.name}
    bystander.is_untouched()


def test_a_new_process_at_the_same_address_serves_only_its_own_blocks(
    site: Site, machines: list[Machine]
) -> None:
    bystander = Bystander(site, machines)
    one = machine(machines)
    old = one.incarnation
    site.register(one.name, old)
    site.wait_synchronized(*bystander.streams, (one.name, 0))
    old_prompt = one.prompts[0]
    assert site.hits(old_prompt) == {f"{one.name}/dp0": 160}
    one.run()
    site.register(one.name, one.incarnation)

    def replaced() -> bool:
        for match in site.matches(old_prompt):
            if match.spec.instance_name == one.name and match.spec.incarnation == one.incarnation:
                assert match.reusable_prefix_tokens == 0, "blocks of the process that is gone"
        status = site.statuses().get(StreamId(one.name, 0))
        return (
            status is not None
            and status.spec.incarnation == one.incarnation
            and status.state is StreamState.SYNCHRONIZED
        )

    wait_until(replaced, 20)
    assert site.hits(one.prompts[0]) == {f"{one.name}/dp0": 160}
    assert site.hits(old_prompt) == {}
    assert old not in {status.spec.incarnation for status in site.statuses().values()}
    bystander.is_untouched()


@pytest.mark.parametrize("same_process", [False, True], ids=["new incarnation", "same incarnation"])
def test_another_number_of_ranks_starts_all_streams_over(
    site: Site, machines: list[Machine], same_process: bool
) -> None:
    bystander = Bystander(site, machines)
    one = machine(machines, 3)
    site.register(one.name, one.incarnation, dp_size=2)
    site.wait_synchronized(*bystander.streams, (one.name, 0), (one.name, 1))
    first = site.statuses()[StreamId(one.name, 0)].last_snapshot
    assert first is not None
    if not same_process:
        one.run(3)
    site.register(one.name, one.incarnation, dp_size=3)
    site.wait_synchronized(*bystander.streams, *((one.name, rank) for rank in range(3)))
    again = site.statuses()[StreamId(one.name, 0)].last_snapshot
    assert again is not None
    assert again.at > first.at
    site.register(one.name, one.incarnation, dp_size=1)
    site.wait_synchronized(*bystander.streams, (one.name, 0))
    bystander.is_untouched()


def test_roles_and_backends_decide_who_is_followed(site: Site, machines: list[Machine]) -> None:
    bystander = Bystander(site, machines)
    prefill, decode, mix, other = (machine(machines) for _ in range(4))
    site.register(prefill.name, prefill.incarnation, role=Role.PREFILL)
    site.register(decode.name, decode.incarnation, role=Role.DECODE)
    site.register(mix.name, mix.incarnation, role=Role.MIX)
    site.register(other.name, other.incarnation, backend="vllm")
    site.wait_synchronized(*bystander.streams, (prefill.name, 0), (mix.name, 0))
    wait_until(lambda: site.excluded() == {decode.name: "role", other.name: "backend"})
    site.instances.registry.set_current_role(mix.name, mix.incarnation, Role.DECODE)
    site.wait_synchronized(*bystander.streams, (prefill.name, 0))
    site.instances.registry.set_current_role(mix.name, mix.incarnation, Role.PREFILL)
    site.wait_synchronized(*bystander.streams, (prefill.name, 0), (mix.name, 0))
    bystander.is_untouched()


def test_port_conflicts_exclude_everybody_involved_until_they_are_gone(
    site: Site, machines: list[Machine]
) -> None:
    bystander = Bystander(site, machines)
    one = machine(machines, 2)
    port = int(one.name.rpartition(":")[2])
    site.register(one.name, one.incarnation, dp_size=2)
    site.wait_synchronized(*bystander.streams, (one.name, 0), (one.name, 1))
    intruders = {
        "event and event": f"127.0.0.1:{port + 1}",
        "event and replay": f"127.0.0.1:{port - REPLAY_OFFSET + EVENT_OFFSET}",
        "replay and event": f"127.0.0.1:{port + REPLAY_OFFSET - EVENT_OFFSET}",
    }
    for intruder in intruders.values():
        site.register(intruder, "intruder")
        site.wait_synchronized(*bystander.streams)
        assert site.excluded() == {one.name: "port_conflict", intruder: "port_conflict"}
        assert intruder in site.loop.exclusions()[one.name].sentence
        site.leave(intruder)
        site.wait_synchronized(*bystander.streams, (one.name, 0), (one.name, 1))
    site.register(f"localhost:{port + 1}", "another host as far as names tell")
    wait_until(lambda: StreamId(f"localhost:{port + 1}", 0) in site.statuses())
    assert site.excluded() == {}
    bystander.is_untouched()


def test_port_overflow_and_bad_addresses_exclude_one_instance_alone(
    site: Site, machines: list[Machine]
) -> None:
    bystander = Bystander(site, machines)
    one = machine(machines)
    site.register(one.name, one.incarnation)
    site.register("127.0.0.1:62535", "just fits")
    site.register("127.0.0.1:62536", "one too many")
    site.register(one.name.replace("127.0.0.1", "127.0.0.2"), "huge", dp_size=2**62)
    site.register("nonsense", "x")
    wait_until(lambda: StreamId("127.0.0.1:62535", 0) in site.statuses())
    expected = {
        "127.0.0.1:62536": "port_overflow",
        one.name.replace("127.0.0.1", "127.0.0.2"): "port_overflow",
        "nonsense": "bad_address",
    }
    wait_until(lambda: site.excluded() == expected, 10, lambda: f"{site.excluded()}")
    site.leave("127.0.0.1:62535")
    site.wait_synchronized(*bystander.streams, (one.name, 0))
    bystander.is_untouched()


def test_max_streams_takes_whole_instances_in_name_order(
    common_etcd: TestEtcd, machines: list[Machine]
) -> None:
    with portal(common_etcd, max_streams=4) as site:
        made = sorted((machine(machines, 2) for _ in range(3)), key=lambda machine: machine.name)
        first, second, third = made
        for each in (second, third):
            site.register(each.name, each.incarnation, dp_size=2)
        site.wait_synchronized(*((each.name, rank) for each in (second, third) for rank in (0, 1)))
        site.register(first.name, first.incarnation, dp_size=2)
        site.wait_synchronized(*((each.name, rank) for each in (first, second) for rank in (0, 1)))
        assert site.excluded() == {third.name: "max_streams"}
        stayed = site.statuses()[StreamId(second.name, 0)].last_snapshot
        assert stayed is not None
        assert stayed.count == 1
        # A single rank would still fit, but not this whole instance; a smaller one after it does.
        site.register(second.name, second.incarnation, dp_size=1)
        site.wait_synchronized((first.name, 0), (first.name, 1), (second.name, 0))
        assert site.excluded() == {third.name: "max_streams"}


def test_a_lost_lease_keeps_the_streams_and_suspicion_ends_them(
    common_etcd: TestEtcd, machines: list[Machine]
) -> None:
    with portal(common_etcd, health=HealthSettings(60.0, 60.0)) as site, ExitStack() as stack:
        # An engine whose HTTP port is real: its ranks lie at the offsets from it.
        for _ in range(100):
            http = stack.enter_context(Engine().serving())
            port = int(http.name.rpartition(":")[2])
            try:
                engine = SimulatedEngine(
                    seed=1, event_port=port + EVENT_OFFSET, replay_port=port + REPLAY_OFFSET, device_blocks=50
                )
            except (OSError, OverflowError):
                continue
            break
        stack.enter_context(engine)
        engine.step(5)
        site.register(http.name, "one")
        site.wait_synchronized((http.name, 0))
        site.leave(http.name)
        registry = site.instances.registry
        wait_until(lambda: registry.snapshot().by_name[http.name].state is HealthState.LEASE_LOST)
        engine.step(1)
        wait_until(lambda: site.statuses()[StreamId(http.name, 0)].sequence == 5)
        status = site.statuses()[StreamId(http.name, 0)]
        assert status.last_snapshot is not None
        assert status.last_snapshot.count == 1
        site.register(http.name, "one")
        wait_until(lambda: registry.snapshot().by_name[http.name].state is HealthState.ACTIVE)
        http.status = 500
        site.leave(http.name)
        site.wait_synchronized()
        assert site.matches() == []
        # The engine still talks; nobody listens any more.
        engine.step(20)
        assert site.matches() == []
        registry.heartbeat(http.name, "one")
        site.wait_synchronized((http.name, 0))


def test_events_still_queued_resurrect_nothing(site: Site, machines: list[Machine]) -> None:
    one = machine(machines)
    assert one.engine is not None
    for _ in range(5):
        site.register(one.name, one.incarnation)
        site.wait_synchronized((one.name, 0))
        one.engine.wait_for_subscribers()
        one.engine.flood(3000, wait=False)
        site.leave(one.name)
        wait_until(lambda: site.matches() == [])
        for _ in range(50):
            assert site.matches() == []
            assert site.directory.statuses() == ()
            time.sleep(0.002)
        one.run()


def test_128_instances_registered_at_once_are_all_followed(
    common_etcd: TestEtcd, machines: list[Machine]
) -> None:
    for _ in range(128):
        machine(machines)
    with portal(common_etcd) as site:
        started = time.monotonic()
        for each in machines:
            site.register(each.name, each.incarnation)
        site.wait_synchronized(*((each.name, 0) for each in machines))
        print(f"128 instances registered and synchronized in {time.monotonic() - started:.1f} s")  # noqa: T201
        assert site.excluded() == {}
        for each in machines[::16]:
            assert site.hits(each.prompts[0]) == {f"{each.name}/dp0": 160}

"""From instances to streams, and why some are left out."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.instances.model import HealthState, InstanceView, Registration, Role
from streams.discovery import (
    Discovery,
    DiscoverySettings,
    discover,
    retired_first,
    split_address,
)
from streams.spec import StreamSpec

SETTINGS = DiscoverySettings(enabled=True)


@dataclass(frozen=True)
class Instance:
    name: str
    dp_size: int = 1
    identity: str | None = "one"
    backend: str = "xllm"
    takes_prefill: bool = True
    schedulable: bool = True


def found(*instances: Instance, max_streams: int = 128, settings: DiscoverySettings = SETTINGS) -> Discovery:
    return discover(instances, settings, max_streams)


def followed(discovery: Discovery) -> list[str]:
    return [f"{spec.instance_name}/{spec.dp_rank}" for spec in discovery.specs]


def codes(discovery: Discovery) -> dict[str, str]:
    return {name: fault.code for name, fault in discovery.exclusions.items()}


def test_the_example_of_the_documentation() -> None:
    discovery = found(Instance("127.0.0.1:8000", dp_size=2))
    assert [(spec.endpoint, spec.replay_endpoint) for spec in discovery.specs] == [
        ("tcp://127.0.0.1:18000", "tcp://127.0.0.1:38000"),
        ("tcp://127.0.0.1:18001", "tcp://127.0.0.1:38001"),
    ]
    assert discovery.exclusions == {}


def test_a_spec_has_everything_that_the_settings_and_the_instance_say() -> None:
    settings = DiscoverySettings(True, 64, "kv", 1, 2)
    assert found(Instance("h:10", identity="x"), settings=settings).specs == (
        StreamSpec("h:10", 0, "tcp://h:11", "tcp://h:12", block_size=64, topic="kv", incarnation="x"),
    )
    assert found(Instance("h:10", identity=None)).specs[0].incarnation is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.7:8000", ("10.0.0.7", 8000)),
        ("engine-3.pool_b.example:1", ("engine-3.pool_b.example", 1)),
        ("localhost:65535", ("localhost", 65535)),
        ("[::1]:8000", ("[::1]", 8000)),
        ("[2001:db8::7]:8000", ("[2001:db8::7]", 8000)),
        ("[fe80::1%eth0]:8000", ("[fe80::1%eth0]", 8000)),
    ],
)
def test_addresses_with_names_ipv4_and_ipv6(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected
    if expected[1] == 8000:
        (spec,) = found(Instance(address)).specs
        assert spec.endpoint == f"tcp://{expected[0]}:18000"


@pytest.mark.parametrize(
    "address",
    [
        "", "nonsense", "host", "host:", ":8000", "host:0", "host:65536", "host:-1", "host:8000x", "host: 80",
        "::1:8000", "[::1]", "[::1:8000", "[host]:8000", "[]:8000", "*:8000", "0.0.0.0:8000", "[::]:8000",
        "http://host:8000", "ho st:1", "-host:1", "a..b:1", "x" * 300 + ":1", "host:٣٣",
    ],
)  # fmt: skip
def test_what_is_no_address_is_excluded(address: str) -> None:
    with pytest.raises(ValueError, match=r"the address|an IPv6 address"):
        split_address(address)
    assert codes(found(Instance(address))) == {address: "bad_address"}


def test_who_is_not_eligible() -> None:
    discovery = found(
        Instance("a:1", backend="vllm"),
        Instance("b:1", takes_prefill=False),
        Instance("c:1", schedulable=False),
        Instance("d:1", backend="vllm", takes_prefill=False, schedulable=False),
        Instance("e:1"),
    )
    assert followed(discovery) == ["e:1/0"]
    assert codes(discovery) == {"a:1": "backend", "b:1": "role", "d:1": "backend"}


@pytest.mark.parametrize(
    ("role", "state", "included"),
    [
        (Role.DEFAULT, HealthState.ACTIVE, True),
        (Role.DEFAULT, HealthState.LEASE_LOST, True),
        (Role.DEFAULT, HealthState.SUSPECT, False),
        (Role.PREFILL, HealthState.LEASE_LOST, True),
        (Role.DECODE, HealthState.ACTIVE, False),
    ],
)
def test_an_instance_view_is_discoverable(role: Role, state: HealthState, included: bool) -> None:
    view = InstanceView(Registration("a:1", role, "x"), 0, role, state, 0.0, "")
    mix = InstanceView(Registration("b:1", Role.MIX, "x"), 1, role, state, 0.0, "")
    assert followed(discover([view, mix], SETTINGS, 128)) == (["a:1/0", "b:1/0"] if included else [])


@pytest.mark.parametrize(
    ("port", "dp_size", "code"),
    [
        (35535, 1, None),
        (35536, 1, "port_overflow"),
        (35534, 2, None),
        (35535, 2, "port_overflow"),
        (35436, 100, None),
        (8000, 2**62, "port_overflow"),
    ],
)
def test_ports_end_at_65535(port: int, dp_size: int, code: str | None) -> None:
    discovery = found(Instance(f"h:{port}", dp_size=dp_size))
    assert codes(discovery) == ({f"h:{port}": code} if code else {})
    assert len(discovery.specs) == (0 if code else dp_size)


def test_the_event_port_may_be_the_higher_one() -> None:
    settings = DiscoverySettings(True, event_port_offset=60_000, replay_port_offset=1)
    assert codes(found(Instance("h:6000"), settings=settings)) == {"h:6000": "port_overflow"}
    assert (
        "event port would be 66000"
        in found(Instance("h:6000"), settings=settings).exclusions["h:6000"].sentence
    )


@pytest.mark.parametrize(
    "instances",
    [
        pytest.param([Instance("h:8000", 2), Instance("h:8001", 1)], id="event and event"),
        pytest.param([Instance("h:8000", 1), Instance("h:28000", 1)], id="replay and event"),
        pytest.param([Instance("h:8000", 5), Instance("h:8002", 1)], id="inside"),
        pytest.param([Instance("h:8000", 2), Instance("h:8001", 2), Instance("h:8002", 2)], id="a chain"),
        pytest.param(
            [Instance("h:8000", 9), Instance("h:8001", 1), Instance("h:8005", 1)], id="one over many"
        ),
        pytest.param([Instance("h:8000", 9), Instance("h:8001", 3), Instance("h:8002", 1)], id="nested"),
        pytest.param([Instance("[::1]:8000", 2), Instance("[::1]:8001", 1)], id="ipv6"),
    ],
)
def test_everybody_in_a_port_conflict_is_excluded(instances: list[Instance]) -> None:
    bystanders = [Instance("other:8000", 2), Instance("h:9000", 1)]
    discovery = found(*instances, *bystanders, max_streams=10**6)
    assert codes(discovery) == {instance.name: "port_conflict" for instance in instances}
    assert followed(discovery) == ["h:9000/0", "other:8000/0", "other:8000/1"]


def test_an_instance_can_be_in_conflict_with_itself() -> None:
    assert codes(found(Instance("h:8000", 20_001), max_streams=10**6)) == {"h:8000": "port_conflict"}
    settings = DiscoverySettings(True, event_port_offset=100, replay_port_offset=100)
    assert "its own" in found(Instance("h:1"), settings=settings).exclusions["h:1"].sentence


def test_the_reason_names_port_and_other_instance() -> None:
    faults = found(Instance("h:8000"), Instance("h:28000")).exclusions
    assert faults["h:8000"].sentence == "h:38000 is its replay port and h:28000's event port"
    assert faults["h:28000"].sentence == "h:38000 is its event port and h:8000's replay port"


def test_hosts_are_compared_as_written() -> None:
    assert found(Instance("127.0.0.1:8000", 2), Instance("localhost:8001", 2)).exclusions == {}


@pytest.mark.parametrize(
    "other",
    [
        Instance("h:8001", takes_prefill=False),
        Instance("h:8001", schedulable=False),
        Instance("h:8001", backend="vllm"),
        Instance("h:8001", dp_size=60_000),
    ],
    ids=["decode", "suspect", "other backend", "overflow"],
)
def test_who_is_not_followed_anyway_conflicts_with_nobody(other: Instance) -> None:
    discovery = found(Instance("h:8000", 2), other)
    assert followed(discovery) == ["h:8000/0", "h:8000/1"]
    assert codes(discovery).get("h:8001") != "port_conflict"


def test_an_instance_comes_back_when_the_conflict_is_gone() -> None:
    one, two = Instance("h:8000", 2), Instance("h:8001")
    assert followed(found(one, two)) == []
    assert followed(found(one)) == ["h:8000/0", "h:8000/1"]


def test_max_streams_takes_whole_instances_in_name_order() -> None:
    instances = [Instance("d:1", 1), Instance("a:1", 2), Instance("c:1", 1), Instance("b:1", 3)]
    discovery = found(*instances, max_streams=4)
    assert followed(discovery) == ["a:1/0", "a:1/1", "c:1/0", "d:1/0"]
    assert codes(discovery) == {"b:1": "max_streams"}
    assert "needs 3 stream(s) and 2 of max_streams=4 are left" in discovery.exclusions["b:1"].sentence


def test_conflicts_are_looked_for_before_max_streams() -> None:
    discovery = found(Instance("h:8000", 2), Instance("h:8001", 2), Instance("i:1", 1), max_streams=2)
    assert followed(discovery) == ["i:1/0"]
    assert codes(discovery) == {"h:8000": "port_conflict", "h:8001": "port_conflict"}


def test_a_huge_rank_count_is_refused_without_counting_it_out() -> None:
    settings = DiscoverySettings(True, event_port_offset=0, replay_port_offset=1)
    discovery = found(Instance("h:1", 2**62), Instance("i:1", 30_000), settings=settings)
    assert codes(discovery) == {"h:1": "port_overflow", "i:1": "port_conflict"}


def test_specs_are_in_instance_and_rank_order_whatever_came_first() -> None:
    instances = [Instance(f"h{n}:8000", dp_size=n % 3 + 1) for n in range(20)]
    expected = found(*instances)
    random.Random(1).shuffle(instances)
    assert found(*instances) == expected
    assert list(expected.specs) == sorted(expected.specs, key=lambda spec: spec.id)


instance_sets = st.lists(
    st.builds(
        Instance,
        name=st.builds("{}:{}".format, st.sampled_from(["h", "i"]), st.integers(1, 12)),
        dp_size=st.sampled_from([1, 1, 2, 3, 7, 70_000]),
        takes_prefill=st.sampled_from([True, True, True, False]),
    ),
    unique_by=lambda instance: instance.name,
    max_size=8,
)


@given(instance_sets, st.integers(0, 12))
def test_against_counting_every_port(instances: list[Instance], max_streams: int) -> None:
    settings = DiscoverySettings(True, event_port_offset=0, replay_port_offset=9)
    discovery = found(*instances, max_streams=max_streams, settings=settings)
    claims: dict[tuple[str, int], list[str]] = {}
    for instance in instances:
        host, port = split_address(instance.name)
        if instance.takes_prefill and port + 9 + instance.dp_size - 1 <= 65535:
            for rank in range(instance.dp_size):
                claims.setdefault((host, port + rank), []).append(instance.name)
                claims.setdefault((host, port + 9 + rank), []).append(instance.name)
    involved = {name for names in claims.values() if len(names) > 1 for name in names}
    assert {name for name, code in codes(discovery).items() if code == "port_conflict"} == involved
    assert len(discovery.specs) <= max_streams
    ports = [spec.endpoint for spec in discovery.specs] + [spec.replay_endpoint for spec in discovery.specs]
    assert len(ports) == len(set(ports))
    names = {spec.instance_name for spec in discovery.specs}
    assert names | set(discovery.exclusions) == {instance.name for instance in instances}
    assert names.isdisjoint(discovery.exclusions)
    for instance in instances:
        ranks = [spec.dp_rank for spec in discovery.specs if spec.instance_name == instance.name]
        assert ranks in ([], list(range(instance.dp_size)))


def test_a_change_of_ranks_retires_all_streams_of_the_instance_first() -> None:
    before = found(Instance("a:1", 2), Instance("b:1", 2), Instance("c:1", 1)).specs
    grown = found(Instance("a:1", 2), Instance("b:1", 3), Instance("d:1", 1)).specs
    assert [spec.instance_name for spec in retired_first(before, grown)] == ["a:1", "a:1"]
    assert retired_first(before, before) == before
    assert retired_first((), grown) == ()

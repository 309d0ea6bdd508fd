"""Instances to streams: what the directory should follow, and why an instance is left out. Pure.

Every data-parallel rank of an engine publishes its own stream. Where is derived from the instance's
HTTP address:

    events     tcp://host:(port + event_port_offset + rank)
    snapshots  tcp://host:(port + replay_port_offset + rank)

An instance takes part with all of its ranks or not at all. Events are never mixed up: where two
claims on one (host, port) meet, nobody involved is followed until the conflict is gone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from streams.spec import StreamSpec
from streams.status import Fault

MAX_PORT: Final = 65_535
BACKEND: Final = "xllm"
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """How the streams of a registered instance are found (`discovery` in the KV events file)."""

    enabled: bool = False
    block_size: int = 128
    """Tokens per block that every discovered engine must use."""
    topic: str = "xllm-kv"
    event_port_offset: int = 10_000
    """Added to the registered HTTP port, plus the rank: the port of the XPUB socket."""
    replay_port_offset: int = 30_000
    """Added to the registered HTTP port, plus the rank: the port of the ROUTER socket."""
    refresh_interval_ms: int = 1_000
    """Time between two looks at the registry; a change is looked at once."""


class DiscoverableInstance(Protocol):
    """What discovery needs to know of a registered instance."""

    @property
    def name(self) -> str:
        """Its HTTP address `host:port`, IPv6 in brackets."""

    @property
    def identity(self) -> str | None:
        """Tells two lives of the process apart; None when nothing does."""

    @property
    def dp_size(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def takes_prefill(self) -> bool:
        """Whether it has the prefill role now."""

    @property
    def schedulable(self) -> bool:
        """False once it is suspected to be dead."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The outcome for one set of instances."""

    specs: tuple[StreamSpec, ...]
    """Streams to follow, in (instance, rank) order."""
    exclusions: Mapping[str, Fault]
    """Why an instance is not followed. Nothing is said of those that are suspected to be dead."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An instance that can be followed as far as it alone is concerned."""

    instance: DiscoverableInstance
    host: str
    event_port: int
    """Of rank 0; rank r has the port r further on."""
    replay_port: int


@dataclass(frozen=True, slots=True, order=True)
class _Claim:
    """The ports first … last of a host, for one kind of socket of one instance."""

    first: int
    last: int
    instance_name: str
    kind: str


def discover(
    instances: Iterable[DiscoverableInstance], settings: DiscoverySettings, max_streams: int
) -> Discovery:
    """The streams of all instances that can be followed within `max_streams`."""
    exclusions: dict[str, Fault] = {}
    candidates: list[_Candidate] = []
    for instance in sorted(instances, key=lambda instance: instance.name):
        found = _candidate(instance, settings)
        if isinstance(found, Fault):
            exclusions[instance.name] = found
        elif found is not None:
            candidates.append(found)
    conflicts = _conflicts(candidates)
    exclusions |= conflicts
    specs: list[StreamSpec] = []
    for candidate in candidates:
        name, needed = candidate.instance.name, candidate.instance.dp_size
        if name in conflicts:
            continue
        if needed > max_streams - len(specs):
            exclusions[name] = _does_not_fit(needed, max_streams, max_streams - len(specs))
        else:
            specs += _specs(candidate, settings)
    return Discovery(tuple(specs), exclusions)


def split_address(address: str) -> tuple[str, int]:
    """(host as written, port) of `host:port`. Raises ValueError that says what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or not 1 <= int(port) <= MAX_PORT:
        raise ValueError("the address is not host:port with a port from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        literal = _ip_address(host[1:-1], version=6)
        if literal is None:
            raise ValueError("the address has no valid IPv6 address in its brackets")
    elif ":" in host:
        raise ValueError("an IPv6 address must stand in brackets, as in [::1]:8000")
    else:
        literal = _ip_address(host, version=4)
        if literal is None and (not _HOST_NAME.fullmatch(host) or len(host) > 253):
            raise ValueError("the address has no valid host name")
    if literal is not None and literal.is_unspecified:
        raise ValueError("the address is a wildcard; nothing can connect to it")
    return host, int(port)


def retired_first(current: Sequence[StreamSpec], wanted: Sequence[StreamSpec]) -> tuple[StreamSpec, ...]:
    """What of `current` may stay while the rest is taken down, before `wanted` is built up.

    An instance whose ranks changed is another topology: all of its streams start over, those included
    that look the same.
    """
    before, after = _by_instance(current), _by_instance(wanted)
    return tuple(spec for spec in current if before[spec.instance_name] == after.get(spec.instance_name, []))


def _by_instance(specs: Iterable[StreamSpec]) -> dict[str, list[StreamSpec]]:
    grouped: dict[str, list[StreamSpec]] = {}
    for spec in specs:
        grouped.setdefault(spec.instance_name, []).append(spec)
    return grouped


def _ip_address(text: str, version: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.IPv6Address(text) if version == 6 else ipaddress.IPv4Address(text)
    except ValueError:
        return None


def _candidate(instance: DiscoverableInstance, settings: DiscoverySettings) -> _Candidate | Fault | None:
    """What the instance claims, or why it cannot be followed; None when it is just not alive."""
    if instance.backend != BACKEND:
        return Fault("backend", f"its backend is {instance.backend}; only {BACKEND} publishes KV events")
    if not instance.takes_prefill:
        return Fault("role", "it has the decode role; blocks reserved for decoding are not reusable prefixes")
    if not instance.schedulable:
        return None
    try:
        host, port = split_address(instance.name)
    except ValueError as error:
        return Fault("bad_address", f"{error}; its ports cannot be derived")
    event, replay = port + settings.event_port_offset, port + settings.replay_port_offset
    last = max(event, replay) + instance.dp_size - 1
    if last > MAX_PORT:
        return Fault("port_overflow", _overflow(instance.dp_size, event, replay, last))
    return _Candidate(instance, host, event, replay)


def _overflow(dp_size: int, event: int, replay: int, last: int) -> str:
    kind = "replay" if replay >= event else "event"
    return f"with {dp_size} rank(s) its last {kind} port would be {last}; the highest port is {MAX_PORT}"


def _does_not_fit(needed: int, max_streams: int, left: int) -> Fault:
    return Fault(
        "max_streams",
        f"it needs {needed} stream(s) and {left} of max_streams={max_streams} are left after the instances "
        "before it in name order",
    )


def _conflicts(candidates: Sequence[_Candidate]) -> dict[str, Fault]:
    """Everybody involved in a double claim on one (host, port).

    Claims are intervals, so a huge rank count costs nothing. Going through them by their first port,
    it is enough to look at the claim that reaches furthest so far: whatever else overlaps has itself
    met an overlap by then.
    """
    claims: dict[str, list[_Claim]] = {}
    for candidate in candidates:
        name, ranks = candidate.instance.name, candidate.instance.dp_size
        for kind, first in (("event", candidate.event_port), ("replay", candidate.replay_port)):
            claims.setdefault(candidate.host, []).append(_Claim(first, first + ranks - 1, name, kind))
    faults: dict[str, Fault] = {}
    for host, of_host in claims.items():
        furthest: _Claim | None = None
        for claim in sorted(of_host):
            if furthest is not None and claim.first <= furthest.last:
                for one, other in ((claim, furthest), (furthest, claim)):
                    faults.setdefault(one.instance_name, _conflict(host, claim.first, one, other))
            if furthest is None or claim.last > furthest.last:
                furthest = claim
    return faults


def _conflict(host: str, port: int, own: _Claim, other: _Claim) -> Fault:
    whose = "its own" if own.instance_name == other.instance_name else f"{other.instance_name}'s"
    return Fault("port_conflict", f"{host}:{port} is its {own.kind} port and {whose} {other.kind} port")


def _specs(candidate: _Candidate, settings: DiscoverySettings) -> Iterable[StreamSpec]:
    instance = candidate.instance
    for rank in range(instance.dp_size):
        yield StreamSpec(
            instance_name=instance.name,
            dp_rank=rank,
            endpoint=f"tcp://{candidate.host}:{candidate.event_port + rank}",
            replay_endpoint=f"tcp://{candidate.host}:{candidate.replay_port + rank}",
            block_size=settings.block_size,
            topic=settings.topic,
            incarnation=instance.identity,
        )

"""The values of the instance model. Immutable, and without any decision in them.

An *instance* is one registered engine process, named by its HTTP address `host:port`; one life of
that process is an *incarnation*. Times are seconds of a monotonic clock that the caller passes in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

Rows = tuple[tuple[float, ...], ...]
"""Profiling data as the engine registered it: rows of numbers."""

XLLM: Final = "xllm"


class Role(StrEnum):
    """What an instance registered as. A MIX instance is PREFILL or DECODE at any one time."""

    DEFAULT = "DEFAULT"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    MIX = "MIX"


WIRE_ROLES: Final = (Role.DEFAULT, Role.PREFILL, Role.DECODE, Role.MIX)
"""The registration's `type` is an index into this."""


class HealthState(StrEnum):
    """ACTIVE → LEASE_LOST → SUSPECT → removed; all but SUSPECT can be scheduled."""

    ACTIVE = "ACTIVE"
    LEASE_LOST = "LEASE_LOST"
    SUSPECT = "SUSPECT"


class LoadSource(StrEnum):
    """Where a load came from."""

    HEARTBEAT = "heartbeat"
    """Posted to this replica."""
    ETCD = "etcd"
    """Written by another replica, or by the engine."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What an engine said of itself, checked."""

    name: str
    role: Role = Role.DEFAULT
    incarnation_id: str | None = None
    register_ts_ms: int | None = None
    dp_size: int = 1
    """Data-parallel ranks; at least 1, otherwise whatever the engine claims."""
    backend: str = XLLM
    rpc_address: str = ""
    ttft_profiling_data: Rows = ()
    """Rows (prompt tokens, ms)."""
    tpot_profiling_data: Rows = ()
    """Rows (average length, batch, ms)."""

    @property
    def identity(self) -> str | None:
        """Tells two lives of one process apart: the incarnation, or for an old engine the time of
        registration; None when the engine sends neither."""
        if self.incarnation_id is not None:
            return self.incarnation_id
        return None if self.register_ts_ms is None else f"register_ts_ms:{self.register_ts_ms}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load as reported. Its types were checked, its values may be nonsense."""

    waiting_requests_num: int
    gpu_cache_usage_perc: float
    """Share of the device cache in use, 0 to 1 when sane."""

    @property
    def valid(self) -> bool:
        """Whether routing may use it; False for NaN too."""
        usage = self.gpu_cache_usage_perc
        return self.waiting_requests_num >= 0 and math.isfinite(usage) and 0.0 <= usage <= 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """A report with where it came from and when it arrived here."""

    report: LoadReport
    source: LoadSource
    received_at: float

    @property
    def waiting_requests_num(self) -> int:
        return self.report.waiting_requests_num

    @property
    def gpu_cache_usage_perc(self) -> float:
        return self.report.gpu_cache_usage_perc

    @property
    def valid(self) -> bool:
        return self.report.valid


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency that a heartbeat reported, ms; shown, not used for routing."""

    recent_max_ttft: float | None = None
    recent_max_tbt: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One life of one instance at one moment."""

    registration: Registration
    order: int
    """Place in the order of registration. Grows and is never used twice, so it also tells lives
    apart when the engine sends no identity."""
    current_role: Role
    """Same as `role` except for MIX."""
    state: HealthState
    since: float
    """When it came into this state."""
    reason: str
    """Why it is in this state, in a few words."""
    heartbeat_at: float | None = None
    """Last heartbeat received by this replica."""
    load: Load | None = None
    """The load that counts now; None before the first report of this life."""
    latency: Latency | None = None
    revision: int = 0
    """etcd's mod_revision of the registration; 0 for the embedded registry."""
    key: str = ""
    """The registration's key in etcd."""
    registered: bool = True
    """Whether the registration still stands (its key or lease exists)."""

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def role(self) -> Role:
        return self.registration.role

    @property
    def incarnation_id(self) -> str | None:
        return self.registration.incarnation_id

    @property
    def identity(self) -> str | None:
        return self.registration.identity

    @property
    def dp_size(self) -> int:
        return self.registration.dp_size

    @property
    def backend(self) -> str:
        return self.registration.backend

    @property
    def schedulable(self) -> bool:
        return self.state is not HealthState.SUSPECT

    @property
    def takes_prefill(self) -> bool:
        """Prefill role: DEFAULT, PREFILL, or MIX that is PREFILL now."""
        return self.current_role is not Role.DECODE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All instances at one moment. Readers keep it as long as they like."""

    instances: tuple[InstanceView, ...] = ()
    """In registration order."""
    by_name: Mapping[str, InstanceView] = field(default_factory=lambda: MappingProxyType({}))
    version: int = 0
    """Grows with every change."""
    topology_version: int = 0
    """Grows with every change other than load, latency and heartbeats."""

    def serving(self) -> Counter[Role]:
        """How many instances can be scheduled, by the role that they have now."""
        return Counter(view.current_role for view in self.instances if view.schedulable)


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """A key whose value says nothing usable. It changed nothing; it is shown."""

    key: str
    reason: str
    revision: int


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The registry's source as operators see it."""

    kind: str
    """`etcd` or `embedded`."""
    connected: bool
    since: float
    """Wall clock of the last change of `connected`, seconds since the epoch."""
    error: str | None = None
    """Why it is not connected, or what failed last while it is."""
    endpoint: str = ""
    revision: int = 0
    """etcd's revision up to which everything is known."""
    relists: int = 0
    """Times that the keys had to be listed again because the watch could not be resumed."""
    reconnects: int = 0
    """Times that the watch was opened again."""
    invalid: tuple[InvalidValue, ...] = ()
    """Keys that are skipped now, at most a hundred of them."""
    invalid_total: int = 0
    """Values that were skipped since the start."""

    @property
    def trouble(self) -> str | None:
        """Why what is known of instances may be old, or nothing, in a sentence; None: it is up to date."""
        return None if self.connected else f"{self.kind} is not connected: {self.error or 'no answer'}"

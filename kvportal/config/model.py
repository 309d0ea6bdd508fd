"""The validated configuration of one portal process: frozen values, nothing left to check."""

from __future__ import annotations

from dataclasses import dataclass, field

from streams.discovery import DiscoverySettings
from streams.spec import Limits, StreamSpec


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """The KV events file: which streams to follow and within which limits."""

    limits: Limits = field(default_factory=Limits)
    streams: tuple[StreamSpec, ...] = ()
    """Streams named one by one; empty when discovery finds them."""
    discovery: DiscoverySettings | None = None
    """None when the file has no such section."""

    @property
    def follows_nothing(self) -> bool:
        """Neither does discovery look for streams, nor is one named."""
        return not self.streams and not (self.discovery and self.discovery.enabled)


@dataclass(frozen=True, slots=True)
class Config:
    """Flags and environment of `manage.py serve`; fields are named after the flags."""

    server_host: str = "127.0.0.1"
    """Address or name to listen on; IPv6 without brackets."""
    http_server_port: int = 8888
    """0 lets the system choose a free port."""
    server: str = "daphne"
    """`daphne` or `uvicorn`."""
    kv_events: KvEventsConfig | None = None
    """None: the index is off."""
    load_balance_policy: str = "RR"
    """`RR`, `CAR` or `SLO_AWARE`."""
    car_prefill_lambda: float = 0.5
    """Weight of the cache miss in the prefill score, in [0, 1]; the queue has the rest."""
    car_host_hit_weight: float = 0.5
    """What a token that only the Host holds is worth, against one on the Device, in [0, 1]."""
    target_ttft: float = 1000.0
    """Time to first token that SLO_AWARE aims at, ms."""
    target_tpot: float = 50.0
    """Time per output token that SLO_AWARE aims at, ms."""
    internal_api_tokens: tuple[str, ...] = field(default=(), repr=False)
    """Each of them is accepted; empty: no token is asked for."""
    allow_anonymous_api: bool = False
    """No token on an address that other machines reach was asked for explicitly."""
    instance_source: str = "embedded"
    """`embedded` or `etcd`."""
    etcd_addrs: tuple[str, ...] = ("127.0.0.1:2379",)
    """`host:port` of each etcd member, IPv6 in brackets."""
    etcd_namespace: str = ""
    """Without slashes around it; empty: none."""
    etcd_username: str = ""
    """Empty: etcd asks for no password."""
    etcd_password: str = field(default="", repr=False)
    etcd_ca: str = ""
    """File of the authority that signed etcd's certificate; empty: no TLS."""
    etcd_cert: str = ""
    """Our own certificate for etcd; empty: none."""
    etcd_key: str = ""
    instance_delete_probe_timeout_ms: int = 1000
    instance_delete_probe_attempts: int = 2
    lease_lost_heartbeat_timeout_ms: int = 3000
    detect_disconnected_instance_interval: float = 15.0
    """Seconds after which a SUSPECT instance is removed."""

    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body; a larger one is answered with 413."""
    max_query_tokens: int = 262_144
    """Most token IDs in one request; more are answered with 413."""
    ready_synchronized_share: float = 0.8
    """Share of the desired streams that `/readyz` waits for after a start, in [0, 1]."""
    ready_wait_seconds: float = 20.0
    """After this time `/readyz` no longer waits for streams."""
    drain_seconds: float = 0.0
    """How long `/readyz` answers 503 before the port closes, once the process is told to stop."""
    request_expiry_seconds: float = 600.0
    """A routed request that nobody reports on any more is undone after this time."""
    history_retention_days: float = 30.0
    """Age at which state changes are deleted, and streams that nobody follows any more leave the list."""
    history_retention_rows: int = 200_000
    """Most state changes kept."""
    audit_retention_days: float = 365.0
    """Age at which resync orders and their outcomes are deleted."""
    audit_retention_rows: int = 20_000
    """Most resync orders kept."""
    replica_retention_hours: float = 24.0
    """How long a replica that stopped writing is still shown, as gone."""
    decision_retention_days: float = 7.0
    """Age at which decisions are deleted from the database."""
    decision_retention_rows: int = 200_000
    """Most decisions kept in the database."""
    decision_explain_share: float = 0.05
    """Share of decisions whose full explanation is stored, in [0, 1]; the rest keep the five best."""
    record_prompts: bool = False
    """Token IDs of decisions are stored for the routing lab. They are prompts: off by default."""
    record_prompts_limit: int = 1000
    """Most prompts stored at once."""
    record_prompts_hours: float = 24.0
    """Age at which a stored prompt is deleted."""
    replica_name: str = ""
    """Name of this replica among others; empty: host name and port."""

    notices: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the start-up log: what was ignored, and what an operator should know."""

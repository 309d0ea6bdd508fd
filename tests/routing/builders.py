"""Short names for the values that routing decides on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routing.instances.model import (
    HealthState,
    InstanceView,
    Load,
    LoadReport,
    LoadSource,
    Registration,
    Role,
    Rows,
    Snapshot,
)
from routing.policies.decision import Rotation, Settings, Situation, Work
from streams.spec import StreamSpec
from streams.status import Match

IDENTITY = "life-1"


def load(waiting: int = 0, usage: float = 0.0) -> Load:
    return Load(LoadReport(waiting, usage), LoadSource.HEARTBEAT, received_at=0.0)


def instance(
    name: str,
    role: str = "DEFAULT",
    *,
    current: str | None = None,
    order: int = 0,
    waiting: int | None = 0,
    usage: float = 0.0,
    state: HealthState = HealthState.ACTIVE,
    dp_size: int = 1,
    incarnation: str | None = IDENTITY,
    registered_ms: int | None = None,
    ttft: Rows = (),
    tpot: Rows = (),
) -> InstanceView:
    """`waiting` None: no load was reported."""
    return InstanceView(
        registration=Registration(
            name=name,
            role=Role(role),
            incarnation_id=incarnation,
            register_ts_ms=registered_ms,
            dp_size=dp_size,
            ttft_profiling_data=ttft,
            tpot_profiling_data=tpot,
        ),
        order=order,
        current_role=Role(current or role),
        state=state,
        since=0.0,
        reason="",
        load=None if waiting is None else load(waiting, usage),
    )


def match(
    name: str,
    rank: int = 0,
    *,
    device: int = 0,
    host: int = 0,
    synchronized: bool = True,
    incarnation: str | None = IDENTITY,
) -> Match:
    return Match(
        spec=StreamSpec(name, rank, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", incarnation=incarnation),
        synchronized=synchronized,
        sequence=1 if synchronized else None,
        device_hit_tokens=device,
        host_only_hit_tokens=host,
        device_blocks=1,
        host_blocks=0,
        error=None,
    )


def situation(
    *instances: InstanceView,
    tokens: int = 1024,
    hits: Sequence[Match] = (),
    work: Mapping[str, Work] | None = None,
    rotation: Rotation | None = None,
    **settings: float,
) -> Situation:
    """Instances in registration order, whatever their `order` says, unless they were given one."""
    grouped: dict[str, list[Match]] = {}
    for item in hits:
        grouped.setdefault(item.spec.instance_name, []).append(item)
    return Situation(
        instances=instances,
        input_tokens=tokens,
        settings=Settings(**settings),  # type: ignore[arg-type]
        hits=grouped,
        work=work or {},
        rotation=rotation or Rotation(),
    )


def snapshot(*instances: InstanceView, topology: int = 1) -> Snapshot:
    return Snapshot(
        instances=instances,
        by_name={view.name: view for view in instances},
        version=topology,
        topology_version=topology,
    )

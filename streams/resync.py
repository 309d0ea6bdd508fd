"""Orders to resynchronise streams: the values that travel between a person and the replicas.

An order has a key of its own, so that it can reach a replica twice (as a channel message and as a
database row) and still be carried out once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from streams.spec import StreamId
from streams.status import StreamState, StreamStatus
from streams.wording import some_of

MAX_TARGETS = 1000
"""Targets in one order of the Operations page."""
NAMED_IN_SCOPE = 20
"""So many streams are named in the sentence about an order; the rest are counted."""


class ResyncSource(StrEnum):
    """The place where somebody ordered a resync."""

    PAGE = "page"
    ADMIN = "admin"
    API = "api"


class OutcomeState(StrEnum):
    """How far one replica got with one order."""

    STARTED = "started"
    DONE = "done"
    INCOMPLETE = "incomplete"
    NO_MATCH = "no_match"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResyncTarget:
    """Streams of one instance: one rank, or all of them (`dp_rank` None). No instance: every stream."""

    instance_name: str | None = None
    dp_rank: int | None = None

    def covers(self, stream: StreamId) -> bool:
        return self.instance_name in (None, stream.instance_name) and self.dp_rank in (None, stream.dp_rank)

    def __str__(self) -> str:
        if self.instance_name is None:
            return "all streams" if self.dp_rank is None else f"rank {self.dp_rank} of every instance"
        return self.instance_name if self.dp_rank is None else str(StreamId(self.instance_name, self.dp_rank))


EVERY_STREAM = (ResyncTarget(),)


@dataclass(frozen=True, slots=True)
class ResyncOrder:
    """Who wants which streams resynchronised, and how."""

    actor: str
    source: ResyncSource
    at: float
    """Wall clock, seconds since the epoch."""
    targets: tuple[ResyncTarget, ...] = EVERY_STREAM
    drop: bool = False
    """Forget what the index holds at once, rather than serve it until the snapshot is there."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def scope(self) -> str:
        """The targets in words, bounded in length."""
        return some_of(self.targets, NAMED_IN_SCOPE)

    def to_message(self) -> dict[str, Any]:
        """The order as plain values, for a channel message or a JSON column."""
        return {
            "key": self.key,
            "actor": self.actor,
            "source": str(self.source),
            "at": self.at,
            "targets": targets_to_json(self.targets),
            "drop": self.drop,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> ResyncOrder:
        return cls(
            key=message["key"],
            actor=message["actor"],
            source=ResyncSource(message["source"]),
            at=message["at"],
            targets=targets_from_json(message["targets"]),
            drop=message["drop"],
        )


@dataclass(frozen=True, slots=True)
class ResyncOutcome:
    """What became of an order on one replica."""

    order: ResyncOrder
    replica: str
    at: float
    state: OutcomeState
    reached: int
    """Streams that were told to resynchronise."""
    settled: int
    """Those of them that have a new snapshot in service."""
    detail: str


def targets_to_json(targets: Iterable[ResyncTarget]) -> list[dict[str, Any]]:
    return [{"instance_name": target.instance_name, "dp_rank": target.dp_rank} for target in targets]


def targets_from_json(value: Sequence[Mapping[str, Any]]) -> tuple[ResyncTarget, ...]:
    return tuple(ResyncTarget(item["instance_name"], item["dp_rank"]) for item in value)


def matching(targets: Sequence[ResyncTarget], streams: Iterable[StreamId]) -> tuple[StreamId, ...]:
    """The streams that the targets cover, each once, in the order given."""
    return tuple(stream for stream in streams if any(target.covers(stream) for target in targets))


def is_settled(status: StreamStatus, ordered_at: float) -> bool:
    """Whether a stream serves a snapshot that was put in service after the order."""
    snapshot = status.last_snapshot
    return status.state is StreamState.SYNCHRONIZED and snapshot is not None and snapshot.at >= ordered_at


def read_order(body: bytes) -> tuple[tuple[ResyncTarget, ...], bool]:
    """`{"targets": [{"instance_name", "dp_rank"}, ...] or null, "drop"?: bool}`; ValueError with a sentence
    when it is not that.

    No target list (null) stands for every stream; an empty one is a mistake, not everything.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("The order is not JSON.") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("drop", False), bool):
        raise ValueError("The order must be an object; `drop` is true or false.")
    if "targets" not in fields:
        raise ValueError("`targets` is missing: a list of streams, or null for all.")
    targets = fields["targets"]
    if targets is None:
        return EVERY_STREAM, fields.get("drop", False)
    if not isinstance(targets, list) or not 1 <= len(targets) <= MAX_TARGETS:
        raise ValueError(f"`targets` must be a list of 1 to {MAX_TARGETS} streams, or null for all.")
    return tuple(_target(item, index) for index, item in enumerate(targets)), fields.get("drop", False)


def _target(item: Any, index: int) -> ResyncTarget:
    name, rank = (item.get("instance_name"), item.get("dp_rank")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or isinstance(rank, bool) or not isinstance(rank, int):
        raise ValueError(f"`targets[{index}]` must have an `instance_name` and an integer `dp_rank`.")
    return ResyncTarget(name, rank)

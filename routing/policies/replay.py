"""Compute a recorded decision again, with other weights.

What another setting would have chosen is the same code over the same inputs, taken from a full
explanation. Nothing is chosen at random here: where the recorded choice is still among the best, it
stays, so that a tie never counts as a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routing.policies import car
from routing.policies.candidates import equals
from routing.policies.decision import Candidate, Settings, Side, Situation


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    waiting_requests_num: int
    gpu_cache_usage_perc: float
    valid: bool


@dataclass(frozen=True, slots=True)
class RecordedInstance:
    """An instance as an explanation tells of it (an `InstanceView`)."""

    name: str
    order: int
    incarnation_id: str | None
    identity: str | None
    role: str
    current_role: str
    state: str
    dp_size: int
    load: RecordedLoad | None
    schedulable: bool = True


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A rank's match and, as its own spec, the identity of its stream (a `RankMatch`)."""

    dp_rank: int
    incarnation: str | None
    synchronized: bool
    device_hit_tokens: int
    host_only_hit_tokens: int
    error: object | None = None

    @property
    def spec(self) -> RecordedRank:
        return self


@dataclass(frozen=True, slots=True)
class Rescored:
    """What CAR with some weights says about a recorded decision."""

    prefill: Candidate | None
    decode: Candidate | None
    moved: bool
    """Whether the prefill would have gone to another instance than it did."""


def rescore(explanation: Mapping[str, Any], settings: Settings) -> Rescored:
    """Decide again by CAR with the weights in `settings`. Needs a full explanation."""
    decision = car.decide(recorded_situation(explanation, settings))
    before = {row["side"]: row["instance_name"] for row in explanation["candidates"] if row["chosen"]}
    prefill = _loyal(decision.prefill_candidates, before.get(Side.PREFILL))
    decode = _loyal(decision.decode_candidates, before.get(Side.DECODE))
    after = prefill.instance.name if prefill else None
    return Rescored(prefill, decode, moved=after != before.get(Side.PREFILL))


def recorded_situation(explanation: Mapping[str, Any], settings: Settings) -> Situation:
    """The situation that a full explanation tells of, under other settings."""
    rows = {row["instance_name"]: row for row in explanation["candidates"] if row["side"] == Side.DECODE}
    prefill = {row["instance_name"]: row for row in explanation["candidates"] if row["side"] == Side.PREFILL}
    return Situation(
        instances=[_instance(order, row) for order, row in enumerate((prefill | rows).values())],
        input_tokens=explanation["input_tokens"],
        settings=settings,
        hits={name: [_rank(rank) for rank in row["ranks"]] for name, row in prefill.items()},
    )


def _loyal(candidates: Sequence[Candidate], before: str | None) -> Candidate | None:
    best = equals(candidates)
    loyal = [candidate for candidate in best if candidate.instance.name == before]
    return next(iter(loyal + best), None)


IDENTITY = "recorded"
"""Stands for the identity of every instance: a rank whose hits counted was of the same life."""


def _instance(order: int, row: Mapping[str, Any]) -> RecordedInstance:
    load = row["load"]
    return RecordedInstance(
        name=row["instance_name"],
        order=order,
        incarnation_id=row["incarnation_id"],
        identity=IDENTITY,
        role=row["role"],
        current_role=row["current_role"],
        state=row["state"],
        dp_size=row.get("dp_size", 1),
        load=load
        and RecordedLoad(
            int(load["waiting_requests_num"]), float(load["gpu_cache_usage_perc"]), load["valid"]
        ),
    )


def _rank(row: Mapping[str, Any]) -> RecordedRank:
    return RecordedRank(
        dp_rank=row["dp_rank"],
        incarnation=None if row["ignored"] else IDENTITY,
        synchronized=row["synchronized"],
        device_hit_tokens=row["device_hit_tokens"],
        host_only_hit_tokens=row["host_only_hit_tokens"],
    )

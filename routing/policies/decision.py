"""The values that routing policies take and give. All of them are frozen; nothing here decides.

A policy is a pure function from a `Situation` (who is there, how loaded, what of this prompt each
one holds, whose turn it is) to a `Decision`. A decision keeps what it was made from, so that it can
be explained later without having cost anything when nobody asks (`routing.policies.explanation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Protocol


class Policy(StrEnum):
    """Values of `load_balance_policy`."""

    RR = "RR"
    CAR = "CAR"
    SLO_AWARE = "SLO_AWARE"


class Side(StrEnum):
    """The two parts of serving a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class LoadView(Protocol):
    """Load as an instance reported it; it may be nonsense, `valid` says so."""

    @property
    def waiting_requests_num(self) -> int: ...
    @property
    def gpu_cache_usage_perc(self) -> float: ...
    @property
    def valid(self) -> bool: ...


class InstanceView(Protocol):
    """What a policy needs to know of a registered instance. Immutable."""

    @property
    def name(self) -> str: ...
    @property
    def order(self) -> int:
        """Place in the order of registration; never used twice, so it also tells lives apart."""

    @property
    def incarnation_id(self) -> str | None: ...
    @property
    def identity(self) -> str | None:
        """Tells two lives of a process apart, as `StreamSpec.incarnation` does; None: nothing does."""

    @property
    def role(self) -> str: ...
    @property
    def current_role(self) -> str:
        """Same as `role` except for MIX, which is PREFILL or DECODE at any one time."""

    @property
    def state(self) -> str: ...
    @property
    def schedulable(self) -> bool: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def load(self) -> LoadView | None: ...


class StreamIdentity(Protocol):
    """The part of a stream's spec that says whose it is."""

    @property
    def dp_rank(self) -> int: ...
    @property
    def incarnation(self) -> str | None: ...


class RankMatch(Protocol):
    """How much of the prompt one rank holds, in tokens (`streams.status.Match`)."""

    @property
    def spec(self) -> StreamIdentity: ...
    @property
    def synchronized(self) -> bool: ...
    @property
    def device_hit_tokens(self) -> int: ...
    @property
    def host_only_hit_tokens(self) -> int: ...
    @property
    def error(self) -> object | None: ...


Hits = Mapping[str, Sequence[RankMatch]]
"""Instance name to the matches of its ranks, each rank at most once; nothing for an unknown name."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Weights and targets. A value outside its range is a `ValueError` that names it."""

    policy: Policy = Policy.RR
    car_prefill_lambda: float = 0.5
    """0: only the queue counts; 1: only the cache counts."""
    car_host_hit_weight: float = 0.5
    """What a token in host memory is worth, measured in tokens on the device."""
    target_ttft: float = 1000.0
    """Milliseconds to the first token."""
    target_tpot: float = 50.0
    """Milliseconds per output token."""

    def __post_init__(self) -> None:
        for name in ("car_prefill_lambda", "car_host_hit_weight"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}; it must be a number from 0 to 1")
        for name in ("target_ttft", "target_tpot"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a number of milliseconds above 0")


@dataclass(frozen=True, slots=True)
class Turns:
    """Whose turn it is on one side."""

    last_order: int = -1
    """`order` of the instance that round robin chose last."""
    tie_winners: tuple[str, ...] = ()
    """Names of those that won a tie, the latest last."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The only memory that policies have: taken with the situation, given back with the decision."""

    prefill: Turns = Turns()
    decode: Turns = Turns()


@dataclass(frozen=True, slots=True)
class Work:
    """Requests under way on one instance and what its profile predicts for one more (SLO_AWARE)."""

    prefill_request_num: int = 0
    prefill_token_num: int = 0
    decode_request_num: int = 0
    decode_token_num: int = 0
    estimated_prefill_time: float = 0.0
    """Milliseconds of prefill that are predicted to lie before a new request."""
    predicted_ttft: float = 0.0
    """Milliseconds, of this prompt alone."""
    predicted_tpot: float = 0.0
    """Milliseconds, with this request added to those being decoded."""


NO_WORK: Final = Work()


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a decision may depend on."""

    instances: Sequence[InstanceView]
    """In registration order, those that cannot be chosen included."""
    input_tokens: int
    settings: Settings
    hits: Hits = field(default_factory=dict)
    work: Mapping[str, Work] = field(default_factory=dict)
    rotation: Rotation = Rotation()


class Candidate(NamedTuple):
    """An instance that could be chosen for one side, with what speaks for and against it."""

    instance: InstanceView
    score: float
    """What is compared; smallest wins. CAR: the formula's value. RR: steps until its turn.
    SLO_AWARE: milliseconds, of waiting prefill or per output token."""
    kv_hit_ratio: float | None = None
    """CAR, prefill side: share of the prompt that the instance holds, 0 to 1."""
    queue_cost: float | None = None
    """CAR: its queue in units of the longest queue on this side, 0 to 1."""


class Exclusion(StrEnum):
    """Why an instance was not a candidate."""

    SUSPECT = "suspect"
    NO_LOAD = "no_load"
    INVALID_LOAD = "invalid_load"
    NO_DECODE = "no_decode"
    DECODE_ROLE = "decode_role"


class Excluded(NamedTuple):
    instance: InstanceView
    code: Exclusion


@dataclass(frozen=True, slots=True)
class RoleFlip:
    """A MIX instance should change its current role."""

    instance_name: str
    identity: str | None
    """Of the life that is meant."""
    to: Side


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request, and everything that it follows from."""

    policy: Policy
    """The rule that was applied: RR for a SLO_AWARE decision about an empty prompt."""
    situation: Situation
    prefill_candidates: Sequence[Candidate]
    """In registration order."""
    decode_candidates: Sequence[Candidate]
    excluded: Sequence[Excluded]
    prefill: Candidate | None
    """None: nobody can take the request (`no_candidates`). Under SLO_AWARE it may come from the
    decode side, when that can relieve overloaded prefill instances."""
    decode: Candidate | None
    """None: the prefill instance serves the request alone."""
    rotation: Rotation
    """To be used for the next decision."""
    reason: str
    """The rule that chose, in a sentence."""
    flip: RoleFlip | None = None

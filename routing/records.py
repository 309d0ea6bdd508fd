"""A decision once it is made: with its name, its time, and what is worth remembering of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from routing.policies.decision import Candidate, Decision, Policy
from routing.policies.explanation import Digest, Explanation, digest, tell

ROUTED: Final = "routed"
NO_CANDIDATES: Final = "no_candidates"
BEST: Final = 5
"""Candidates of each side, and excluded instances, that a short explanation keeps. A full one has
19 KB at 128 instances."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One decision and what it was made for."""

    decision_id: str
    request_id: str
    at: float
    """Wall clock, seconds since the epoch."""
    decision: Decision
    predicted_hit_tokens: int | None
    """Tokens of the prompt that the prefill instance should have cached, device and host together;
    None: the directory cannot say (index off, static streams, empty prompt)."""
    seconds: float
    """Time it took, the query of the index included."""

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.decision.situation.settings.policy

    @property
    def outcome(self) -> str:
        return NO_CANDIDATES if self.decision.prefill is None else ROUTED


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """What is kept of a decision: plain values, fit for JSON and the database. Never a token ID."""

    decision_id: str
    request_id: str
    at: float
    policy: str
    outcome: str
    input_tokens: int
    prefill: dict[str, Any] | None
    """`instance_name`, `incarnation_id`, `score`, `kv_hit_ratio`, `queue_cost`; the last three are
    None outside CAR."""
    decode: dict[str, Any] | None
    """`instance_name`, `incarnation_id`, `score`; None: the prefill instance decodes itself."""
    predicted_hit_tokens: int | None
    cached_tokens: int | None
    """What the engine reported afterwards; None until it does."""
    seconds: float
    full: bool
    """Whether the explanation has all candidates, and not just the best."""
    explanation: Mapping[str, Any]


class LazyExplanation(Mapping[str, Any]):
    """An explanation that is put into words when somebody reads it, and then stays: the request that is
    being decided does not wait for it. May be read from any thread."""

    __slots__ = ("_digest", "_told")

    def __init__(self, of: Digest) -> None:
        self._digest: Digest | None = of
        self._told: Explanation | None = None

    def _all(self) -> Explanation:
        of, told = self._digest, self._told  # in this order: the digest goes when the words are there
        if told is None:
            if of is None:
                raise RuntimeError("an explanation without anything to explain")
            self._told = told = tell(of)
            self._digest = None
        return told

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def record_of(selection: Selection, *, full: bool) -> DecisionRecord:
    """The record of a selection."""
    decision = selection.decision
    return DecisionRecord(
        decision_id=selection.decision_id,
        request_id=selection.request_id,
        at=selection.at,
        policy=str(selection.policy),
        outcome=selection.outcome,
        input_tokens=decision.situation.input_tokens,
        prefill=prefill_json(decision),
        decode=decode_json(decision),
        predicted_hit_tokens=selection.predicted_hit_tokens,
        cached_tokens=None,
        seconds=selection.seconds,
        full=full,
        explanation=LazyExplanation(digest(decision, most=None if full else BEST)),
    )


def prefill_json(decision: Decision) -> dict[str, Any] | None:
    """The prefill choice as the API answers it."""
    chosen = decision.prefill
    if chosen is None:
        return None
    return {
        **_choice(decision, chosen),
        "kv_hit_ratio": chosen.kv_hit_ratio,
        "queue_cost": chosen.queue_cost,
    }


def decode_json(decision: Decision) -> dict[str, Any] | None:
    """The decode choice as the API answers it."""
    return None if decision.decode is None else _choice(decision, decision.decode)


def _choice(decision: Decision, chosen: Candidate) -> dict[str, Any]:
    return {
        "instance_name": chosen.instance.name,
        "incarnation_id": chosen.instance.incarnation_id,
        "score": chosen.score if decision.policy is Policy.CAR else None,
    }

"""The routing lab: what other weights would have made of decisions that were made. Pure.

Every decision is computed again by itself, with the loads and hits of its moment: the same code over
the same inputs (`routing.policies.replay`). What the changed choices would have done to later queues
and caches is not simulated, so small shifts can be trusted and large ones are an upper bound.

Hits and queues are told in units that do not depend on the weights: tokens of the prompt that the
chosen instance holds at its worst rank, and requests that wait there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from routing.policies.car import worst_rank
from routing.policies.decision import Settings, Side
from routing.policies.replay import IDENTITY, recorded_situation, rescore

SWEEP: Final = tuple(step / 10 for step in range(11))
"""Lambdas that are compared with each other."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A routed decision that kept its full explanation."""

    decision_id: str
    at: float
    """Wall clock, seconds since the epoch."""
    explanation: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and what is there for it."""

    prefill: str
    decode: str | None
    device_tokens: int
    """Of the prompt, held on the device by the instance's worst rank."""
    host_tokens: int
    """More that it holds in host memory alone."""
    waiting: int
    """Requests in its queue."""
    score: float | None = None
    """CAR's, as `select` answers it; None where another policy chose."""
    kv_hit_ratio: float | None = None
    queue_cost: float | None = None

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.host_tokens


@dataclass(frozen=True, slots=True)
class Rejudged:
    """One decision as it was made, and as it would have been."""

    kept: Kept
    before: Choice
    after: Choice

    @property
    def moved(self) -> bool:
        """Whether the prefill goes to another instance."""
        return self.before.prefill != self.after.prefill

    @property
    def decode_moved(self) -> bool:
        return self.before.decode != self.after.decode


@dataclass(frozen=True, slots=True)
class Effect:
    """Choices in sum."""

    decisions: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    waiting: int

    @property
    def hit_share(self) -> float:
        """Share of all prompt tokens that were held where the requests went."""
        return (self.device_tokens + self.host_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_waiting(self) -> float:
        """Requests that a request found in the queue, on average."""
        return self.waiting / self.decisions if self.decisions else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One lambda of a sweep."""

    car_prefill_lambda: float
    moved: int
    effect: Effect


def rejudge(kept: Kept, settings: Settings) -> Rejudged | None:
    """A decision under other weights; None when nobody could be chosen, then or now."""
    explanation = kept.explanation
    chosen = {row["side"]: row for row in explanation["candidates"] if row["chosen"]}
    again = rescore(explanation, settings)
    if Side.PREFILL not in chosen or again.prefill is None:
        return None
    row = chosen[Side.PREFILL]
    decode = chosen.get(Side.DECODE)
    before = _choice(explanation, row["instance_name"], decode and decode["instance_name"])
    after = _choice(
        explanation, again.prefill.instance.name, again.decode.instance.name if again.decode else None
    )
    return Rejudged(
        kept,
        replace(before, **{name: row[name] for name in ("score", "kv_hit_ratio", "queue_cost")}),
        replace(
            after,
            score=again.prefill.score,
            kv_hit_ratio=again.prefill.kv_hit_ratio,
            queue_cost=again.prefill.queue_cost,
        ),
    )


def effect(rejudged: Sequence[Rejudged], *, after: bool) -> Effect:
    """The sum of what was chosen, or (`after`) of what would have been."""
    choices = [one.after if after else one.before for one in rejudged]
    return Effect(
        decisions=len(choices),
        prompt_tokens=sum(one.kept.explanation["input_tokens"] for one in rejudged),
        device_tokens=sum(choice.device_tokens for choice in choices),
        host_tokens=sum(choice.host_tokens for choice in choices),
        waiting=sum(choice.waiting for choice in choices),
    )


def rejudge_all(kept: Sequence[Kept], settings: Settings) -> list[Rejudged]:
    """All that can be judged, in the same order."""
    return [found for one in kept if (found := rejudge(one, settings)) is not None]


def sweep(kept: Sequence[Kept], settings: Settings) -> list[Step]:
    """What each lambda would have done, with the host weight of `settings`."""
    steps = []
    for weight in SWEEP:
        rejudged = rejudge_all(kept, replace(settings, car_prefill_lambda=weight))
        moved = sum(one.moved for one in rejudged)
        steps.append(Step(weight, moved, effect(rejudged, after=True)))
    return steps


def per_instance(rejudged: Sequence[Rejudged]) -> list[tuple[str, int, int]]:
    """Name, prefills as decided, prefills with the other weights; the busiest first."""
    before = Counter(one.before.prefill for one in rejudged)
    after = Counter(one.after.prefill for one in rejudged)
    rows = [(name, before[name], after[name]) for name in before | after]
    return sorted(rows, key=lambda row: (-max(row[1:]), row[0]))


def _choice(explanation: Mapping[str, Any], prefill: str, decode: str | None) -> Choice:
    """What an explanation says of an instance, without a score."""
    row = next(
        row
        for row in explanation["candidates"]
        if row["instance_name"] == prefill and row["side"] == Side.PREFILL
    )
    situation = recorded_situation({**explanation, "candidates": [row]}, Settings())
    ranks = situation.hits[prefill]
    device = int(worst_rank(IDENTITY, row["dp_size"], ranks, 0.0))
    both = int(worst_rank(IDENTITY, row["dp_size"], ranks, 1.0))
    load = row["load"]
    return Choice(
        prefill=prefill,
        decode=decode,
        device_tokens=device,
        host_tokens=both - device,
        waiting=int(load["waiting_requests_num"]) if load else 0,
    )

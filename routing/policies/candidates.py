"""What all policies share: who can be chosen at all, and fair turns among equals.

Two kinds of turn: round robin walks the order of registration and is not disturbed by instances
that come and go. Ties of scores rotate to whoever has gone longest without winning one: the set of
tied instances differs from prompt to prompt, and a position in one set says nothing about another
(two prompts in alternation, each held by two instances, would always meet the same half).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from routing.policies.decision import (
    Candidate,
    Decision,
    Excluded,
    Exclusion,
    InstanceView,
    LoadView,
    Policy,
    Situation,
    Turns,
)

TIE: Final = 1e-9
"""Scores this close to the best are equal."""
REMEMBERED_WINNERS: Final = 1024
"""Tie winners kept on each side; one that is forgotten counts as one that never won."""


class Sides(NamedTuple):
    """Instances that could serve, in registration order, and the reasons for the others."""

    prefill: list[InstanceView]
    decode: list[InstanceView]
    excluded: list[Excluded]


def split(instances: Sequence[InstanceView], *, needs_load: bool) -> Sides:
    """Sort instances by their current role. Without any for decode, only DEFAULT ones can prefill:
    they alone can serve a whole request."""
    prefill, decode, excluded = sides = Sides([], [], [])
    for instance in instances:
        if not instance.schedulable:
            excluded.append(Excluded(instance, Exclusion.SUSPECT))
        elif needs_load and ((load := instance.load) is None or not load.valid):
            excluded.append(Excluded(instance, Exclusion.INVALID_LOAD if load else Exclusion.NO_LOAD))
        elif instance.current_role != "DECODE":
            prefill.append(instance)
        else:
            decode.append(instance)
    if decode:
        return sides
    alone = [instance for instance in prefill if instance.role == "DEFAULT"]
    unpaired = [Excluded(i, Exclusion.NO_DECODE) for i in prefill if i.role != "DEFAULT"]
    return Sides(alone, [], excluded + unpaired)


def takes_prefill(instance: InstanceView) -> bool:
    return instance.current_role != "DECODE"


def load_of(instance: InstanceView) -> LoadView:
    """The load of an instance that `split` let pass because of it."""
    load = instance.load
    if load is None:
        raise ValueError(f"{instance.name} has no load")
    return load


def best(candidates: Sequence[Candidate], turns: Turns) -> tuple[Candidate | None, Turns]:
    """The candidate with the smallest score. Among equals, the one that has gone longest without
    winning a tie (never: first, in registration order) wins, and the turns remember it."""
    if not candidates:
        return None, turns
    tied = equals(candidates)
    if len(tied) == 1:
        return tied[0], turns
    won_at = {name: turn for turn, name in enumerate(turns.tie_winners)}
    winner = min(tied, key=lambda candidate: won_at.get(candidate.instance.name, -1))
    others = tuple(name for name in turns.tie_winners if name != winner.instance.name)
    return winner, replace(turns, tie_winners=(*others, winner.instance.name)[-REMEMBERED_WINNERS:])


def equals(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that share the smallest score, within `TIE`."""
    limit = best_score(candidates) + TIE
    return [candidate for candidate in candidates if candidate.score <= limit]


def best_score(candidates: Iterable[Candidate]) -> float:
    """The smallest score; infinite without candidates."""
    return min([candidate.score for candidate in candidates], default=math.inf)


def in_turn(instances: Sequence[InstanceView], turns: Turns) -> tuple[list[Candidate], Turns]:
    """Round robin: every instance with the number of steps until its turn, and the turns after the
    one whose turn it is."""
    first = next((i for i, instance in enumerate(instances) if instance.order > turns.last_order), 0)
    count = len(instances)
    candidates = [Candidate(instance, float((i - first) % count)) for i, instance in enumerate(instances)]
    if not candidates:
        return candidates, turns
    return candidates, replace(turns, last_order=instances[first].order)


def nobody(situation: Situation, policy: Policy, sides: Sides, missing: Exclusion) -> Decision:
    """The decision that no instance can take the request; those that were left have a reason too."""
    excluded = [*sides.excluded, *(Excluded(i, missing) for i in (*sides.prefill, *sides.decode))]
    return Decision(
        policy=policy,
        situation=situation,
        prefill_candidates=(),
        decode_candidates=(),
        excluded=excluded,
        prefill=None,
        decode=None,
        rotation=situation.rotation,
        reason=what_is_missing(excluded),
    )


def what_is_missing(excluded: Sequence[Excluded]) -> str:
    """What would have to be there for a decision, told from why everybody is out."""
    codes = {item.code for item in excluded}
    if Exclusion.NO_DECODE in codes:
        return "no decode instance can be chosen"
    if Exclusion.DECODE_ROLE in codes:
        return "no prefill instance can be chosen"
    return "no instance can be chosen"

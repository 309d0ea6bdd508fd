"""CAR, cache-aware routing: weigh what an instance already holds of a prompt against its queue.

    kv_hit_ratio = clamp((device_hit_tokens + host_weight * host_only_hit_tokens) / input_tokens, 0, 1)
    queue_cost   = waiting_requests_num / max(waiting_requests_num over the candidates of the side)
    p_score      = lambda * (1 - kv_hit_ratio) + (1 - lambda) * queue_cost
    d_score      = gpu_cache_usage_perc + queue_cost

The smallest score wins. A request can be sent to an instance but not to one of its ranks, so the
ratio of an instance is the lowest over all its ranks, and 0 as soon as one of them is missing,
unsynchronized, or belongs to another life of the process. No prompt: 0. All queues empty: cost 0.
Decode does not look at the cache: the blocks it holds are reserved for its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from routing.policies.candidates import Sides, best, load_of, nobody, split
from routing.policies.decision import (
    Candidate,
    Decision,
    Exclusion,
    InstanceView,
    Policy,
    RankMatch,
    Rotation,
    Situation,
)


class Entrant(NamedTuple):
    """A prefill candidate before anything is known of the prompt."""

    instance: InstanceView
    name: str
    identity: str | None
    dp_size: int
    queue_cost: float


class Field(NamedTuple):
    """Everything that is the same for every prompt, as long as instances and loads stay the same."""

    sides: Sides
    prefill: Sequence[Entrant]
    decode: Sequence[Candidate]


def prepare(instances: Sequence[InstanceView]) -> Field:
    """The field of these instances. Pure, so it can be kept for as long as a snapshot lasts."""
    sides = split(instances, needs_load=True)
    costs = queue_costs(sides.prefill)
    prefill = [
        Entrant(instance, instance.name, instance.identity, instance.dp_size, cost)
        for instance, cost in zip(sides.prefill, costs, strict=True)
    ]
    return Field(sides, prefill, score_decode(sides.decode))


def decide(situation: Situation, field: Field | None = None) -> Decision:
    """Choose by score, prefill and decode each on its own. `field`: what `prepare` makes of the
    situation's instances, when it is at hand."""
    sides, entrants, decode_candidates = field or prepare(situation.instances)
    if not sides.prefill:
        return nobody(situation, Policy.CAR, sides, Exclusion.DECODE_ROLE)
    prefill_candidates = score_prefill(entrants, situation)
    prefill, prefill_turns = best(prefill_candidates, situation.rotation.prefill)
    decode, decode_turns = best(decode_candidates, situation.rotation.decode)
    return Decision(
        policy=Policy.CAR,
        situation=situation,
        prefill_candidates=prefill_candidates,
        decode_candidates=decode_candidates,
        excluded=sides.excluded,
        prefill=prefill,
        decode=decode,
        rotation=Rotation(prefill_turns, decode_turns),
        reason="smallest score on each side",
    )


def score_prefill(entrants: Sequence[Entrant], situation: Situation) -> list[Candidate]:
    """`p_score` of each entrant."""
    hits, tokens = situation.hits, situation.input_tokens
    cache, host_weight = situation.settings.car_prefill_lambda, situation.settings.car_host_hit_weight
    queue = 1.0 - cache
    candidates = []
    for instance, name, identity, dp_size, cost in entrants:
        held = worst_rank(identity, dp_size, hits.get(name, ()), host_weight)
        ratio = 0.0 if held <= 0.0 or not tokens else held / tokens if held < tokens else 1.0
        candidates.append(Candidate(instance, cache * (1.0 - ratio) + queue * cost, ratio, cost))
    return candidates


def score_decode(instances: Sequence[InstanceView]) -> list[Candidate]:
    """`d_score` of each instance."""
    return [
        Candidate(instance, load_of(instance).gpu_cache_usage_perc + cost, None, cost)
        for instance, cost in zip(instances, queue_costs(instances), strict=True)
    ]


def queue_costs(instances: Sequence[InstanceView]) -> list[float]:
    """Each queue in units of the longest."""
    waiting = [load_of(instance).waiting_requests_num for instance in instances]
    longest = max(waiting, default=0)
    return [number / longest for number in waiting] if longest else [0.0] * len(waiting)


def worst_rank(identity: str | None, dp_size: int, matches: Sequence[RankMatch], host_weight: float) -> float:
    """Tokens held by that rank of an instance that holds least, those in host memory counting
    `host_weight`; 0 when a rank has nothing to say (missing, unsynchronized, another incarnation).
    Ranks beyond `dp_size` are streams of a life that is over."""
    if identity is None or len(matches) < dp_size:
        return 0.0
    lowest, ranks = math.inf, 0
    for match in matches:
        spec = match.spec
        if spec.dp_rank < dp_size:
            if not match.synchronized or spec.incarnation != identity:
                return 0.0
            tokens = match.device_hit_tokens + host_weight * match.host_only_hit_tokens
            if tokens < lowest:
                lowest = tokens
            ranks += 1
    return lowest if ranks == dp_size else 0.0

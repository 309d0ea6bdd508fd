"""A decision in plain values: why this instance, with everything that it was computed from.

Built only when somebody asks, from what the decision kept. A full explanation holds every input,
so that it can be computed again (`routing.policies.replay`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Final

from routing.policies.candidates import TIE, load_of
from routing.policies.decision import (
    NO_WORK,
    Candidate,
    Decision,
    Excluded,
    Exclusion,
    Hits,
    InstanceView,
    Policy,
    RankMatch,
    RoleFlip,
    Settings,
    Side,
    Work,
)

SHOWN_MISSING_RANKS: Final = 16
"""Missing ranks are listed up to here; an absurd `dp_size` is not enumerated."""
LARGEST_JSON_INTEGER: Final = 2**53
"""What every JSON reader takes exactly. Engines can report more, and NaN; both become text."""

SCORE: Final = itemgetter(Candidate._fields.index("score"))
QUEUE_COST: Final = itemgetter(Candidate._fields.index("queue_cost"))

Explanation = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ranking:
    """What an explanation tells of one side."""

    shown: Sequence[Candidate]
    chosen: Candidate | None
    num: int
    """Candidates in all."""
    best_score: float
    longest_queue: int | None
    """What queue costs are relative to; None: no costs."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The part of a decision that an explanation is made of. Quickly made, and small when it is
    limited to the best candidates: the explanation itself can wait until somebody reads it."""

    policy: Policy
    reason: str
    flip: RoleFlip | None
    input_tokens: int
    settings: Settings
    sides: Mapping[Side, Ranking]
    hits: Hits
    work: Mapping[str, Work]
    excluded: Sequence[Excluded]
    excluded_num: Mapping[Exclusion, int]


def digest(decision: Decision, *, most: int | None = None) -> Digest:
    """What `tell` needs of a decision.

    `most`: only so many of the best candidates of each side (and the chosen ones), and so many of the
    excluded instances; the numbers of all of them stay known.
    """
    situation = decision.situation
    sides = {
        Side.PREFILL: _ranking(decision.prefill_candidates, decision.prefill, most),
        Side.DECODE: _ranking(decision.decode_candidates, decision.decode, most),
    }
    hits, work = situation.hits, situation.work
    if most is not None:
        names = [candidate.instance.name for ranking in sides.values() for candidate in ranking.shown]
        hits = {name: hits[name] for name in names if name in hits}
        work = {name: work[name] for name in names if name in work}
    return Digest(
        policy=decision.policy,
        reason=decision.reason,
        flip=decision.flip,
        input_tokens=situation.input_tokens,
        settings=situation.settings,
        sides=sides,
        hits=hits,
        work=work,
        excluded=decision.excluded[:most],
        excluded_num=Counter([item.code for item in decision.excluded]) if decision.excluded else {},
    )


def explain(decision: Decision, *, most: int | None = None) -> Explanation:
    """The decision as JSON values; see `digest` for `most`."""
    return tell(digest(decision, most=most))


def tell(of: Digest) -> Explanation:
    """A digest as JSON values."""
    sides = of.sides.items()
    return {
        "policy": str(of.policy),
        "reason": of.reason,
        "input_tokens": of.input_tokens,
        "settings": {**asdict(of.settings), "policy": str(of.settings.policy)},
        "longest_queue": {str(side): _json_integer(ranking.longest_queue) for side, ranking in sides},
        "candidates": [_row(of, side, candidate) for side, ranking in sides for candidate in ranking.shown],
        "candidates_num": {str(side): ranking.num for side, ranking in sides},
        "excluded": [_excluded_row(item) for item in of.excluded],
        "excluded_num": {str(code): number for code, number in of.excluded_num.items()},
        "flip": of.flip and {"instance_name": of.flip.instance_name, "to": str(of.flip.to)},
    }


def why_excluded(item: Excluded) -> str:
    """The reason in a sentence."""
    load = item.instance.load
    if item.code is Exclusion.INVALID_LOAD and load is not None:
        return (
            f"its load report is invalid (waiting_requests_num {load.waiting_requests_num},"
            f" gpu_cache_usage_perc {load.gpu_cache_usage_perc}): a count of at least 0 and a share from"
            " 0 to 1 are needed"
        )
    return {
        Exclusion.SUSPECT: f"it is {item.instance.state}: its registration is gone, nothing is heard of it",
        Exclusion.NO_LOAD: "it has not reported its load yet",
        Exclusion.INVALID_LOAD: "its load report is invalid",
        Exclusion.NO_DECODE: f"it is {item.instance.role} and needs a decode instance; none can be chosen",
        Exclusion.DECODE_ROLE: "it decodes, and no instance can be chosen for the prefill",
    }[item.code]


def _ranking(candidates: Sequence[Candidate], chosen: Candidate | None, most: int | None) -> Ranking:
    """The best candidates, and in any case the chosen one, which may even come from the other side."""
    if not candidates:
        return Ranking((), None, 0, math.inf, None)
    ranked = sorted(candidates, key=SCORE)
    shown = candidates if most is None else ranked[:most]
    if chosen is not None and not any(candidate is chosen for candidate in shown):
        shown = [*shown[: None if most is None else most - 1], chosen]
    return Ranking(shown, chosen, len(candidates), ranked[0].score, _longest_queue(candidates))


def _longest_queue(candidates: Sequence[Candidate]) -> int | None:
    """The queue whose cost is the highest."""
    if candidates[0].queue_cost is None:
        return None
    return load_of(max(candidates, key=QUEUE_COST).instance).waiting_requests_num


def _row(of: Digest, side: Side, candidate: Candidate) -> Explanation:
    instance, policy, ranking = candidate.instance, of.policy, of.sides[side]
    row: Explanation = {
        "side": str(side),
        "instance_name": instance.name,
        "incarnation_id": instance.incarnation_id,
        "role": str(instance.role),
        "current_role": str(instance.current_role),
        "state": str(instance.state),
        "load": _load_row(instance),
        "chosen": candidate is ranking.chosen,
        "equal_to_best": candidate.score <= ranking.best_score + TIE,
        "score": candidate.score if policy is Policy.CAR else None,
        "kv_hit_ratio": candidate.kv_hit_ratio,
        "queue_cost": candidate.queue_cost,
    }
    if side is Side.PREFILL:
        row |= _hit_rows(instance, of.hits.get(instance.name, ()))
    if policy is Policy.RR:
        row["steps_until_turn"] = int(candidate.score)
    if policy is Policy.SLO_AWARE:
        row["work"] = asdict(of.work.get(instance.name, NO_WORK))
    return row


def _load_row(instance: InstanceView) -> Explanation | None:
    load = instance.load
    if load is None:
        return None
    waiting, usage = load.waiting_requests_num, load.gpu_cache_usage_perc
    return {
        "waiting_requests_num": _json_integer(waiting),
        "gpu_cache_usage_perc": usage if math.isfinite(usage) else str(usage),
        "valid": load.valid,
    }


def _hit_rows(instance: InstanceView, matches: Sequence[RankMatch]) -> Explanation:
    present = {match.spec.dp_rank for match in matches}
    listed = range(min(instance.dp_size, len(present) + SHOWN_MISSING_RANKS))
    return {
        "dp_size": instance.dp_size,
        "ranks": [_rank_row(match, instance) for match in matches if match.spec.dp_rank < instance.dp_size],
        "missing_ranks": [rank for rank in listed if rank not in present][:SHOWN_MISSING_RANKS],
    }


def _rank_row(match: RankMatch, instance: InstanceView) -> Explanation:
    return {
        "dp_rank": match.spec.dp_rank,
        "synchronized": match.synchronized,
        "device_hit_tokens": match.device_hit_tokens,
        "host_only_hit_tokens": match.host_only_hit_tokens,
        "ignored": _why_ignored(match, instance),
    }


def _why_ignored(match: RankMatch, instance: InstanceView) -> str | None:
    """Why the hits of a rank do not count; None when they do."""
    if not match.synchronized:
        return f"unsynchronized: {match.error}" if match.error else "unsynchronized"
    if instance.identity is None:
        return "the instance has neither incarnation nor registration time"
    if match.spec.incarnation is None:
        return "static stream: it does not say which process it belongs to"
    if match.spec.incarnation != instance.identity:
        return "the stream belongs to another incarnation"
    return None


def _excluded_row(item: Excluded) -> Explanation:
    return {
        "instance_name": item.instance.name,
        "incarnation_id": item.instance.incarnation_id,
        "code": str(item.code),
        "message": why_excluded(item),
    }


def _json_integer(value: int | None) -> int | str | None:
    return value if value is None or abs(value) <= LARGEST_JSON_INTEGER else str(value)

"""SLO_AWARE: keep the time per output token and the time to the first token within their targets.

Decode first: the first instance whose predicted time per output token, with this request added, is
within `target_tpot`, else the one with the lowest. Then prefill: the instance with the least
prefill time before it. If even that is more than `target_ttft`, a decode instance that is far from
its own target may prefill this one request. When no decode instance met the target, a MIX instance
may change sides, and it changes back when it has nothing left to decode. These are the rules of
xLLM's service; its predictors are in `routing.predictors`.
"""

from __future__ import annotations

from collections.abc import Sequence

from routing.policies import round_robin
from routing.policies.candidates import Sides, best, nobody, split, takes_prefill
from routing.policies.decision import (
    NO_WORK,
    Candidate,
    Decision,
    Exclusion,
    InstanceView,
    Policy,
    RoleFlip,
    Rotation,
    Side,
    Situation,
)

DECODE_REASONS = (
    "no decode instance within target_tpot: the fastest",
    "first decode instance within target_tpot",
)
PREFILL_REASONS = ("least prefill time", "prefill instances beyond target_ttft: the fastest decode instance")


def decide(situation: Situation) -> Decision:
    """Choose by predicted times. An empty prompt predicts nothing: round robin."""
    if not situation.input_tokens:
        return round_robin.decide(situation)
    sides = split(situation.instances, needs_load=False)
    if not sides.decode:
        return nobody(situation, Policy.SLO_AWARE, sides, Exclusion.NO_DECODE)
    if not sides.prefill:
        return nobody(situation, Policy.SLO_AWARE, sides, Exclusion.DECODE_ROLE)
    return _decide(situation, sides)


def _decide(situation: Situation, sides: Sides) -> Decision:
    work, settings, rotation = situation.work, situation.settings, situation.rotation
    waits = [Candidate(i, work.get(i.name, NO_WORK).estimated_prefill_time) for i in sides.prefill]
    paces = [Candidate(i, work.get(i.name, NO_WORK).predicted_tpot) for i in sides.decode]

    decode = on_target = next((pace for pace in paces if pace.score <= settings.target_tpot), None)
    decode_turns = rotation.decode
    if decode is None:
        decode, decode_turns = best(paces, decode_turns)
    prefill, prefill_turns = best(waits, rotation.prefill)
    relief = _relief(situation, waits, paces, on_target)
    if relief is not None:
        prefill, prefill_turns = relief, rotation.prefill

    flip = None
    if on_target is None and prefill is not None:
        flip = _flip_to_decode(prefill.instance, waits, paces, settings.target_ttft)
    return Decision(
        policy=Policy.SLO_AWARE,
        situation=situation,
        prefill_candidates=waits,
        decode_candidates=paces,
        excluded=sides.excluded,
        prefill=prefill,
        decode=decode,
        rotation=Rotation(prefill_turns, decode_turns),
        reason=f"{DECODE_REASONS[on_target is not None]}; {PREFILL_REASONS[relief is not None]}",
        flip=flip,
    )


def _relief(
    situation: Situation, waits: Sequence[Candidate], paces: Sequence[Candidate], on_target: Candidate | None
) -> Candidate | None:
    """The decode instance that prefills this request because every prefill instance is late."""
    settings = situation.settings
    wait = min(candidate.score for candidate in waits)
    fastest = min(paces, key=lambda pace: pace.score)
    own = situation.work.get(fastest.instance.name, NO_WORK).estimated_prefill_time
    takes_it = (
        wait > settings.target_ttft
        and on_target is not None
        and fastest.instance is not on_target.instance
        and fastest.score < _all_but_one(settings.target_tpot, len(paces))
        and own < wait
    )
    return Candidate(fastest.instance, own) if takes_it else None


def _flip_to_decode(
    instance: InstanceView, waits: Sequence[Candidate], paces: Sequence[Candidate], target_ttft: float
) -> RoleFlip | None:
    """Whether the chosen prefill instance should decode from now on, as no decode instance keeps up."""
    mean_wait = sum(candidate.score for candidate in waits) / len(waits)
    can_spare = mean_wait < _all_but_one(target_ttft, len(waits)) or len(paces) < len(waits)
    if instance.role != "MIX" or len(waits) == 1 or not can_spare:
        return None
    return RoleFlip(instance.name, instance.identity, Side.DECODE)


def _all_but_one(target: float, count: int) -> float:
    """The target if one of `count` equal instances were taken away."""
    return target * (count - 1) / count


def flip_to_prefill(instances: Sequence[InstanceView], order: int) -> RoleFlip | None:
    """What to do with an instance that has nothing left to decode: a MIX that decodes goes back to
    prefill, unless nobody else would decode."""
    decoding = [i for i in instances if i.schedulable and not takes_prefill(i)]
    idle = next((i for i in instances if i.order == order), None)
    if idle is None or idle.role != "MIX" or takes_prefill(idle):
        return None
    others = any(instance is not idle for instance in decoding)
    return RoleFlip(idle.name, idle.identity, Side.PREFILL) if others else None

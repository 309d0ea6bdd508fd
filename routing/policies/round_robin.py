"""RR, round robin: everybody in turn, in registration order, prefill and decode each on its own.

Load and cache do not matter. While some instance decodes for others, every request gets one,
also when its prefill goes to a DEFAULT instance.
"""

from __future__ import annotations

from routing.policies.candidates import best, in_turn, nobody, split
from routing.policies.decision import Decision, Exclusion, Policy, Rotation, Situation


def decide(situation: Situation) -> Decision:
    """Choose those whose turn it is. A candidate's score is the number of steps until its turn."""
    sides = split(situation.instances, needs_load=False)
    if not sides.prefill:
        return nobody(situation, Policy.RR, sides, Exclusion.DECODE_ROLE)
    prefill_candidates, prefill_turns = in_turn(sides.prefill, situation.rotation.prefill)
    decode_candidates, decode_turns = in_turn(sides.decode, situation.rotation.decode)
    return Decision(
        policy=Policy.RR,
        situation=situation,
        prefill_candidates=prefill_candidates,
        decode_candidates=decode_candidates,
        excluded=sides.excluded,
        prefill=best(prefill_candidates, prefill_turns)[0],
        decode=best(decode_candidates, decode_turns)[0],
        rotation=Rotation(prefill_turns, decode_turns),
        reason="next in registration order on each side",
    )

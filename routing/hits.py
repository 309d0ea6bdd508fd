"""From what streams hold of a prompt to what instances hold of it."""

from __future__ import annotations

from collections.abc import Iterable

from routing.policies.car import worst_rank
from routing.policies.decision import Decision, Hits
from streams.status import Match


def by_instance(matches: Iterable[Match]) -> Hits:
    """Matches grouped by the instance whose ranks they are."""
    hits: dict[str, list[Match]] = {}
    for match in matches:
        name = match.spec.instance_name
        ranks = hits.get(name)
        if ranks is None:
            hits[name] = [match]
        else:
            ranks.append(match)
    return hits


def predicted_hit_tokens(decision: Decision) -> int | None:
    """Tokens of the prompt that the chosen prefill instance holds at its worst rank, in whichever
    tier: what its engine should report as cached. None when nothing can be predicted: nobody was
    chosen, the prompt is empty, or the streams do not say whose they are."""
    chosen, situation = decision.prefill, decision.situation
    if chosen is None or not situation.input_tokens or chosen.instance.identity is None:
        return None
    instance = chosen.instance
    matches = situation.hits.get(instance.name, ())
    if any(match.spec.incarnation is None for match in matches):
        return None
    return int(worst_rank(instance.identity, instance.dp_size, matches, 1.0))

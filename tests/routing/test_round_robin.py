"""RR: everybody in turn, in registration order, whoever comes and goes."""

from __future__ import annotations

from dataclasses import replace

from routing.instances.model import HealthState, InstanceView
from routing.policies import round_robin
from routing.policies.decision import Exclusion, Rotation
from tests.routing.builders import instance, situation


def turns(groups: list[list[InstanceView]]) -> list[tuple[str, str | None]]:
    """Choices over these groups of instances, one decision each."""
    rotation, chosen = Rotation(), []
    for group in groups:
        decision = round_robin.decide(replace(situation(*group), rotation=rotation))
        rotation = decision.rotation
        assert decision.prefill is not None
        decode = decision.decode and decision.decode.instance.name
        chosen.append((decision.prefill.instance.name, decode))
    return chosen


def names(groups: list[list[InstanceView]]) -> str:
    return "".join(prefill for prefill, _ in turns(groups))


def alone(*letters: str) -> list[InstanceView]:
    """DEFAULT instances whose registration order is the alphabet."""
    return [instance(letter, order=ord(letter)) for letter in letters]


def test_rotates_in_registration_order():
    assert names([alone("a", "b", "c")] * 7) == "abcabca"


def test_prefill_and_decode_rotate_separately():
    group = [
        instance("p", "PREFILL", order=1),
        instance("d", "DECODE", order=2),
        instance("q", "PREFILL", order=3),
        instance("e", "DECODE", order=4),
        instance("f", "DECODE", order=5),
    ]
    assert turns([group] * 6) == [("p", "d"), ("q", "e"), ("p", "f"), ("q", "d"), ("p", "e"), ("q", "f")]


def test_newcomer_waits_for_its_turn():
    assert names([alone("a", "b", "c"), *[alone("a", "b", "c", "d")] * 5]) == "abcdab"


def test_leaving_instance_neither_skips_nor_repeats_others():
    whole, without_b, without_c = alone("a", "b", "c", "d"), alone("a", "c", "d"), alone("a", "b", "d")
    assert names([whole, without_b, whole]) == "acd"
    assert names([whole, whole, without_b, whole]) == "abcd"  # the last chosen itself left
    assert names([whole, whole, without_c, without_c]) == "abda"


def test_load_is_not_needed():
    assert names([[instance("a", waiting=None, order=1), instance("b", usage=7.0, order=2)]] * 4) == "abab"


def test_suspect_instances_are_passed_over():
    group = [
        instance("a", order=1),
        instance("b", order=2, state=HealthState.SUSPECT),
        instance("c", order=3),
    ]
    assert names([group] * 4) == "acac"


def test_lease_lost_instances_take_part():
    group = [instance("a", order=1), instance("b", order=2, state=HealthState.LEASE_LOST)]
    assert names([group] * 4) == "abab"


def test_without_decode_role_only_default_instances_rotate():
    group = [instance("p", "PREFILL", order=1), *alone("x", "y"), instance("m", "MIX", current="PREFILL")]
    assert turns([group] * 3) == [("x", None), ("y", None), ("x", None)]


def test_only_prefill_instances_cannot_serve():
    decision = round_robin.decide(
        situation(instance("p", "PREFILL"), instance("m", "MIX", current="PREFILL"))
    )
    assert decision.prefill is None
    assert {item.instance.name: item.code for item in decision.excluded} == {
        "p": Exclusion.NO_DECODE,
        "m": Exclusion.NO_DECODE,
    }


def test_a_suspect_decode_instance_is_no_decode_instance():
    group = [instance("p", "PREFILL"), instance("d", "DECODE", state=HealthState.SUSPECT)]
    assert round_robin.decide(situation(*group)).prefill is None


def test_default_is_paired_while_a_decode_instance_exists():
    group = [instance("x", order=1), instance("p", "PREFILL", order=2), instance("d", "DECODE", order=3)]
    assert turns([group] * 3) == [("x", "d"), ("p", "d"), ("x", "d")]


def test_mix_rotates_on_the_side_of_its_current_role():
    group = [
        instance("m", "MIX", current="PREFILL", order=1),
        instance("n", "MIX", current="DECODE", order=2),
    ]
    assert turns([group] * 2) == [("m", "n"), ("m", "n")]


def test_scores_are_the_steps_until_ones_turn():
    rotation = round_robin.decide(situation(*alone("a", "b", "c"))).rotation
    decision = round_robin.decide(replace(situation(*alone("a", "b", "c")), rotation=rotation))
    assert [candidate.score for candidate in decision.prefill_candidates] == [2.0, 0.0, 1.0]

"""SLO_AWARE: both sides of each of its boundaries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from routing.instances.model import HealthState, InstanceView
from routing.policies import slo_aware
from routing.policies.decision import Decision, Exclusion, Policy, RoleFlip, Rotation, Side, Work
from tests.routing.builders import IDENTITY, instance, situation


def decide(
    prefill: dict[str, float], decode: dict[str, float], *, own: dict[str, float] | None = None, mix: str = ""
) -> Decision:
    """`prefill`: waiting prefill time by name; `decode`: predicted tpot by name; `own`: the prefill
    time of decode instances; `mix`: names that are MIX in that role."""
    views = [_view(name, "PREFILL", mix) for name in prefill] + [
        _view(name, "DECODE", mix) for name in decode
    ]
    work = {name: Work(estimated_prefill_time=ms) for name, ms in prefill.items()}
    work |= {
        name: Work(predicted_tpot=ms, estimated_prefill_time=(own or {}).get(name, 0.0))
        for name, ms in decode.items()
    }
    return slo_aware.decide(situation(*views, work=work))


def _view(name: str, role: str, mix: str) -> InstanceView:
    return instance(name, "MIX" if name in mix else role, current=role)


def pair(decision: Decision) -> tuple[str | None, str | None]:
    return (
        decision.prefill and decision.prefill.instance.name,
        decision.decode and decision.decode.instance.name,
    )


# Decode


@pytest.mark.parametrize(
    ("tpot", "chosen"),
    [
        ({"c": 50.0, "d": 1.0}, "c"),  # the first within the target, not the fastest
        ({"c": 50.001, "d": 1.0}, "d"),
        ({"c": 50.001, "d": 50.0}, "d"),
        ({"c": 60.0, "d": 55.0, "e": 70.0}, "d"),  # none within: the fastest
        ({"c": 0.0, "d": 0.0}, "c"),
    ],
)
def test_decode_is_the_first_within_target_else_the_fastest(tpot, chosen):
    assert pair(decide({"p": 0.0}, tpot))[1] == chosen


# Prefill


def test_prefill_is_the_one_with_least_prefill_time_before_it():
    assert pair(decide({"p": 30.0, "q": 20.0, "r": 25.0}, {"d": 10.0}))[0] == "q"


def relief(
    wait: float = 1001.0, first: float = 50.0, fastest: float = 24.0, own: float = 1000.0
) -> str | None:
    """Two decode instances: c is the target, d the fastest; at 2 the limit is 50 * 1/2 = 25."""
    return pair(decide({"p": wait, "q": wait + 5}, {"c": first, "d": fastest}, own={"d": own}))[0]


def test_idle_decode_instance_takes_the_prefill_when_all_are_late():
    assert relief() == "d"


@pytest.mark.parametrize(("wait", "who"), [(1000.0, "p"), (1000.001, "d")])
def test_relief_only_beyond_target_ttft(wait, who):
    assert relief(wait=wait, own=0.0) == who


@pytest.mark.parametrize(("fastest", "who"), [(25.0, "p"), (24.999, "d")])
def test_relief_only_from_an_instance_far_from_its_own_target(fastest, who):
    assert relief(fastest=fastest) == who


@pytest.mark.parametrize(("own", "who"), [(1001.0, "p"), (1000.999, "d")])
def test_relief_only_from_an_instance_with_less_prefill_of_its_own(own, who):
    assert relief(own=own) == who


def test_no_relief_from_the_chosen_target_itself():
    assert relief(first=20.0, fastest=24.0) == "p"
    assert relief(first=24.0, fastest=24.0) == "p"


def test_no_relief_with_a_single_decode_instance():
    assert pair(decide({"p": 5000.0}, {"d": 1.0}))[0] == "p"


def test_no_relief_when_no_decode_instance_meets_the_target():
    assert pair(decide({"p": 5000.0}, {"c": 60.0, "d": 55.0}))[0] == "p"


# Flips


def flip(prefill: dict[str, float], decode: dict[str, float], mix: str) -> str | None:
    found = decide(prefill, decode, mix=mix).flip
    if found is not None:
        assert found.to is Side.DECODE
        assert found.identity == IDENTITY
    return None if found is None else found.instance_name


def test_chosen_mix_flips_to_decode_when_none_meets_the_target():
    assert flip({"m": 0.0, "p": 1.0}, {"d": 51.0}, mix="m") == "m"


def test_no_flip_while_some_decode_instance_meets_the_target():
    assert flip({"m": 0.0, "p": 1.0}, {"d": 51.0, "e": 50.0}, mix="m") is None


def test_only_mix_flips_and_only_the_chosen_one():
    assert flip({"p": 0.0, "m": 1.0}, {"d": 51.0}, mix="m") is None
    assert flip({"p": 0.0, "q": 1.0}, {"d": 51.0}, mix="") is None


def test_last_prefill_instance_never_flips():
    assert flip({"m": 0.0}, {"d": 51.0}, mix="m") is None


@pytest.mark.parametrize(("mean", "flips"), [(499.9, True), (500.0, False)])
def test_flip_needs_spare_prefill_time_when_decode_is_not_outnumbered(mean, flips):
    # two of each: nD < nP is false, the limit is 1000 * 1/2
    found = flip({"m": mean - 10, "p": mean + 10}, {"d": 51.0, "e": 52.0}, mix="m")
    assert (found == "m") == flips


def test_flip_without_spare_prefill_time_when_decode_is_outnumbered():
    assert flip({"m": 9000.0, "p": 9001.0}, {"d": 51.0}, mix="m") == "m"


def idle_flip(*views: InstanceView, order: int = 7) -> RoleFlip | None:
    return slo_aware.flip_to_prefill(views, order)


def test_idle_mix_flips_back_to_prefill():
    mix, other = instance("m", "MIX", current="DECODE", order=7), instance("d", "DECODE", order=8)
    assert idle_flip(mix, other) == RoleFlip("m", IDENTITY, Side.PREFILL)


def test_last_decode_instance_never_flips():
    mix = instance("m", "MIX", current="DECODE", order=7)
    assert idle_flip(mix) is None
    assert idle_flip(mix, instance("p", "PREFILL", order=8)) is None
    assert idle_flip(mix, instance("d", "DECODE", order=8, state=HealthState.SUSPECT)) is None


def test_no_flip_of_others_than_a_decoding_mix():
    other = instance("d", "DECODE", order=8)
    assert idle_flip(instance("c", "DECODE", order=7), other) is None
    assert idle_flip(instance("m", "MIX", current="PREFILL", order=7), other) is None
    assert idle_flip(instance("m", "MIX", current="DECODE", order=6), other) is None  # another life


# Candidates


def test_empty_prompt_goes_round_robin():
    group = [instance("p", "PREFILL", order=1), instance("q", "PREFILL", order=2), instance("d", "DECODE")]
    rotation, chosen = Rotation(), []
    for _ in range(3):
        decision = slo_aware.decide(replace(situation(*group, tokens=0), rotation=rotation))
        rotation = decision.rotation
        chosen.append(pair(decision))
    assert chosen == [("p", "d"), ("q", "d"), ("p", "d")]
    assert decision.policy is Policy.RR


def test_empty_prompt_with_default_alone_is_served():
    assert pair(slo_aware.decide(situation(instance("x"), tokens=0))) == ("x", None)


def test_without_decode_instance_nobody_serves_not_even_default():
    decision = slo_aware.decide(situation(instance("x"), instance("p", "PREFILL")))
    assert decision.prefill is None
    assert {item.code for item in decision.excluded} == {Exclusion.NO_DECODE}
    assert len(decision.excluded) == 2


def test_without_prefill_instance_nobody_serves():
    decision = slo_aware.decide(situation(instance("d", "DECODE")))
    assert decision.prefill is None
    assert [item.code for item in decision.excluded] == [Exclusion.DECODE_ROLE]


def test_suspect_instances_do_not_count_anywhere():
    suspect = HealthState.SUSPECT
    decision = slo_aware.decide(
        situation(
            instance("p", "PREFILL", state=suspect),
            instance("x"),
            instance("d", "DECODE", state=suspect),
            instance("e", "DECODE"),
        )
    )
    assert pair(decision) == ("x", "e")


def test_load_is_not_needed():
    group = [instance("p", "PREFILL", waiting=None), instance("d", "DECODE", waiting=None)]
    assert pair(slo_aware.decide(situation(*group))) == ("p", "d")


def test_equal_prefill_times_rotate():
    group = [instance("p", "PREFILL"), instance("q", "PREFILL"), instance("d", "DECODE")]
    rotation, chosen = Rotation(), []
    for _ in range(4):
        decision = slo_aware.decide(replace(situation(*group), rotation=rotation))
        rotation = decision.rotation
        chosen.append(pair(decision)[0])
    assert chosen == ["p", "q", "p", "q"]

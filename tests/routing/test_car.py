"""CAR by its formulas: worked numbers, and both sides of every boundary."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from routing.instances.model import HealthState, InstanceView
from routing.policies import car
from routing.policies.decision import Decision, Exclusion, Rotation, Settings, Situation
from streams.status import Match
from tests.routing.builders import instance, match, situation


def scores(decision: Decision) -> dict[str, float]:
    return {candidate.instance.name: candidate.score for candidate in decision.prefill_candidates}


def ratio(
    *hits: tuple[int, int], tokens: int = 1024, dp_size: int | None = None, host_weight: float = 0.5
) -> float | None:
    """kv_hit_ratio of one instance whose ranks hold (device, host-only) tokens."""
    view = instance("a", dp_size=dp_size or len(hits) or 1)
    matches = [match("a", rank, device=device, host=host) for rank, (device, host) in enumerate(hits)]
    found = situation(view, tokens=tokens, hits=matches, car_host_hit_weight=host_weight)
    chosen = car.decide(found).prefill
    assert chosen is not None
    return chosen.kv_hit_ratio


def share(view: InstanceView, hits: list[Match]) -> float | None:
    """kv_hit_ratio of this instance for a prompt of 1,024 tokens."""
    chosen = car.decide(situation(view, hits=hits)).prefill
    assert chosen is not None
    return chosen.kv_hit_ratio


@pytest.mark.parametrize(
    ("device", "host", "host_weight", "expected"),
    [
        (0, 0, 0.5, 0.0),
        (512, 0, 0.5, 0.5),
        (0, 512, 0.5, 0.25),
        (512, 256, 0.5, 0.625),
        (512, 256, 0.0, 0.5),
        (512, 256, 1.0, 0.75),
        (512, 256, 0.25, 0.5625),
        (1024, 0, 0.5, 1.0),
        (0, 1024, 1.0, 1.0),
        (0, 1024, 0.0, 0.0),
        (2048, 0, 0.5, 1.0),  # more than the prompt has: clamped
        (1, 0, 0.5, 1 / 1024),
    ],
)
def test_hit_ratio_counts_device_tokens_fully_and_host_tokens_by_weight(device, host, host_weight, expected):
    assert ratio((device, host), host_weight=host_weight) == expected


def test_empty_prompt_has_no_hits():
    assert ratio((0, 0), tokens=0) == 0.0
    assert ratio((128, 128), tokens=0) == 0.0


def test_prompt_shorter_than_a_block_has_no_hits():
    assert ratio((0, 0), tokens=100) == 0.0


def test_instance_is_as_good_as_its_worst_rank():
    assert ratio((1024, 0), (512, 0), (768, 0)) == 0.5
    assert ratio((1024, 0), (0, 512)) == 0.25
    assert ratio((1024, 0), (0, 0)) == 0.0


def test_worst_rank_is_the_one_with_least_value_not_least_device_tokens():
    # (400 + 0.5*800) = 800 beats (600 + 0) although it has fewer tokens on the device
    assert ratio((400, 800), (600, 0), tokens=1000) == 0.6


def test_missing_rank_makes_the_ratio_zero():
    assert ratio((1024, 0), dp_size=1) == 1.0
    assert ratio((1024, 0), dp_size=2) == 0.0
    assert ratio(dp_size=1) == 0.0


def test_a_duplicate_does_not_stand_in_for_a_missing_rank():
    view = instance("a", dp_size=2)
    hits = [match("a", 0, device=1024), match("a", 2, device=1024)]
    assert share(view, hits) == 0.0


def test_streams_beyond_dp_size_do_not_count():
    view = instance("a", dp_size=1)
    hits = [match("a", 0, device=1024), match("a", 1, device=0)]
    assert share(view, hits) == 1.0


def test_unsynchronized_rank_makes_the_ratio_zero():
    view = instance("a", dp_size=2)
    both = [match("a", 0, device=1024), match("a", 1, device=1024)]
    one = [both[0], match("a", 1, device=1024, synchronized=False)]
    assert share(view, both) == 1.0
    assert share(view, one) == 0.0


def test_absurd_dp_size_is_not_enumerated():
    assert share(instance("a", dp_size=2**62), [match("a", device=1024)]) == 0.0


@pytest.mark.parametrize(
    ("incarnation", "registered_ms", "stream", "counts"),
    [
        ("life-1", None, "life-1", True),
        ("life-2", None, "life-1", False),
        ("life-1", 5, "life-1", True),
        (None, 5, "register_ts_ms:5", True),
        (None, 6, "register_ts_ms:5", False),
        ("life-1", None, None, False),  # a static stream
        (None, None, None, False),
        (None, None, "life-1", False),
        ("", None, "", True),  # an identity is whatever registry and discovery agree on
    ],
)
def test_hits_count_only_for_the_same_life_of_the_process(incarnation, registered_ms, stream, counts):
    view = instance("a", incarnation=incarnation, registered_ms=registered_ms)
    hits = [match("a", device=1024, incarnation=stream)]
    assert share(view, hits) == (1.0 if counts else 0.0)


# Scores


@pytest.mark.parametrize(
    ("prefill_lambda", "expected"),
    # a: ratio 0.75, queue 4 of 8; b: ratio 0.25, queue 8 of 8
    [
        (0.0, {"a": 0.5, "b": 1.0}),
        (0.5, {"a": 0.375, "b": 0.875}),
        (0.25, {"a": 0.4375, "b": 0.9375}),
        (1.0, {"a": 0.25, "b": 0.75}),
    ],
)
def test_prefill_score_weighs_cache_miss_against_queue(prefill_lambda, expected):
    decision = car.decide(
        situation(
            instance("a", waiting=4),
            instance("b", waiting=8),
            hits=[match("a", device=768), match("b", device=256)],
            car_prefill_lambda=prefill_lambda,
        )
    )
    assert scores(decision) == expected
    assert decision.prefill is not None
    assert decision.prefill.instance.name == "a"


def test_lambda_moves_the_choice_between_cache_and_queue():
    # a: ratio 1, queue 10/10 -> 1-lambda; b: ratio 0, queue 0 -> lambda. They meet at 0.5.
    def chosen(prefill_lambda: float) -> str:
        decision = car.decide(
            situation(
                instance("a", waiting=10),
                instance("b", waiting=0),
                hits=[match("a", device=1024), match("b")],
                car_prefill_lambda=prefill_lambda,
            )
        )
        assert decision.prefill is not None
        return decision.prefill.instance.name

    assert [chosen(value) for value in (0.0, 0.49, 0.51, 1.0)] == ["b", "b", "a", "a"]


def test_queue_cost_is_relative_to_the_longest_queue_of_prefill_candidates():
    decision = car.decide(
        situation(
            instance("a", "PREFILL", waiting=1),
            instance("b", "PREFILL", waiting=4),
            instance("d", "DECODE", waiting=100),
            instance("x", "PREFILL", waiting=1000, state=HealthState.SUSPECT),
            instance("y", "PREFILL", waiting=1000, usage=1.5),
        )
    )
    assert [candidate.queue_cost for candidate in decision.prefill_candidates] == [0.25, 1.0]


def test_empty_queues_cost_nothing():
    decision = car.decide(situation(instance("a"), instance("b")))
    assert [candidate.queue_cost for candidate in decision.prefill_candidates] == [0.0, 0.0]
    assert scores(decision) == {"a": 0.5, "b": 0.5}


def test_single_candidate_with_a_queue_costs_one():
    decision = car.decide(situation(instance("a", waiting=3)))
    assert scores(decision) == {"a": 1.0}
    assert decision.prefill is not None


def test_prefill_score_ignores_cache_usage():
    decision = car.decide(situation(instance("a", usage=0.0), instance("b", usage=1.0)))
    assert scores(decision) == {"a": 0.5, "b": 0.5}


def test_decode_score_adds_cache_usage_and_relative_queue():
    decision = car.decide(
        situation(
            instance("p", "PREFILL", waiting=50),
            instance("c", "DECODE", waiting=2, usage=0.5),
            instance("d", "DECODE", waiting=8, usage=0.25),
            instance("e", "DECODE", waiting=0, usage=0.8),
            hits=[match("c", device=1024)],
        )
    )
    found = {candidate.instance.name: candidate.score for candidate in decision.decode_candidates}
    assert found == {"c": 0.75, "d": 1.25, "e": 0.8}
    assert decision.decode is not None
    assert decision.decode.instance.name == "c"
    assert decision.decode.kv_hit_ratio is None


def test_decode_queues_all_empty_leave_usage_alone():
    decision = car.decide(
        situation(instance("p", "PREFILL"), instance("c", "DECODE", usage=0.2), instance("d", "DECODE"))
    )
    assert [candidate.score for candidate in decision.decode_candidates] == [0.2, 0.0]


# Candidates


@pytest.mark.parametrize(
    ("waiting", "usage", "is_candidate"),
    [
        (0, 0.0, True),
        (0, 1.0, True),
        (-1, 0.5, False),
        (0, -0.0001, False),
        (0, 1.0001, False),
        (0, float("nan"), False),
        (0, float("inf"), False),
        (2**70, 0.5, True),
        (None, 0.0, False),
    ],
)
def test_only_instances_with_valid_load_are_candidates(waiting, usage, is_candidate):
    decision = car.decide(situation(instance("a", waiting=waiting, usage=usage)))
    assert (decision.prefill is not None) == is_candidate
    if not is_candidate:
        code = Exclusion.NO_LOAD if waiting is None else Exclusion.INVALID_LOAD
        assert [item.code for item in decision.excluded] == [code]


@pytest.mark.parametrize(
    ("state", "is_candidate"),
    [(HealthState.ACTIVE, True), (HealthState.LEASE_LOST, True), (HealthState.SUSPECT, False)],
)
def test_suspect_instances_are_not_candidates(state, is_candidate):
    decision = car.decide(situation(instance("a", state=state)))
    assert (decision.prefill is not None) == is_candidate
    assert [item.code for item in decision.excluded] == ([] if is_candidate else [Exclusion.SUSPECT])


def test_mix_is_a_candidate_of_its_current_role():
    decision = car.decide(
        situation(instance("a", "MIX", current="PREFILL"), instance("b", "MIX", current="DECODE"))
    )
    assert [candidate.instance.name for candidate in decision.prefill_candidates] == ["a"]
    assert [candidate.instance.name for candidate in decision.decode_candidates] == ["b"]


def test_without_decode_candidate_only_default_instances_prefill():
    p, mix, alone = instance("p", "PREFILL"), instance("m", "MIX", current="PREFILL"), instance("x")
    decision = car.decide(situation(p, mix, alone, hits=[match("p", device=1024)]))
    assert decision.prefill is not None
    assert decision.prefill.instance is alone
    assert decision.decode is None
    assert {item.instance.name: item.code for item in decision.excluded} == {
        "p": Exclusion.NO_DECODE,
        "m": Exclusion.NO_DECODE,
    }


def test_a_decode_instance_without_valid_load_is_no_decode_candidate():
    with_load = situation(instance("p", "PREFILL"), instance("d", "DECODE"))
    without = situation(instance("p", "PREFILL"), instance("d", "DECODE", waiting=None))
    assert car.decide(with_load).prefill is not None
    refused = car.decide(without)
    assert refused.prefill is None
    assert refused.decode is None
    assert {item.instance.name: item.code for item in refused.excluded} == {
        "d": Exclusion.NO_LOAD,
        "p": Exclusion.NO_DECODE,
    }


def test_default_is_paired_while_decode_candidates_exist():
    decision = car.decide(situation(instance("x"), instance("d", "DECODE")))
    assert decision.prefill is not None
    assert decision.prefill.instance.name == "x"
    assert decision.decode is not None
    assert decision.decode.instance.name == "d"


def test_only_decode_instances_cannot_serve():
    decision = car.decide(situation(instance("d", "DECODE"), instance("e", "DECODE")))
    assert decision.prefill is None
    assert {item.code for item in decision.excluded} == {Exclusion.DECODE_ROLE}
    assert len(decision.excluded) == 2


def test_no_instances_at_all():
    decision = car.decide(situation())
    assert decision.prefill is None
    assert decision.excluded == []


def test_unsynchronized_best_instance_can_still_win_by_its_queue():
    decision = car.decide(
        situation(
            instance("a", waiting=0),
            instance("b", waiting=9),
            hits=[match("a", synchronized=False), match("b", device=512)],
        )
    )
    assert decision.prefill is not None
    assert decision.prefill.instance.name == "a"  # 0.5 against 0.75


# Ties


def choices(make: list[Situation], count: int) -> Counter[str]:
    """Choices of `count` decisions over the situations in turn, the rotation carried along."""
    found: Counter[str] = Counter()
    rotation = Rotation()
    for number in range(count):
        decision = car.decide(replace(make[number % len(make)], rotation=rotation))
        rotation = decision.rotation
        assert decision.prefill is not None
        found[decision.prefill.instance.name] += 1
        if decision.decode is not None:
            found[decision.decode.instance.name] += 1
    return found


def test_ties_are_spread_evenly():
    views = [instance(name) for name in "abcdefg"]
    assert choices([situation(*views)], 700) == Counter(dict.fromkeys("abcdefg", 100))


def test_ties_of_prefill_and_decode_rotate_separately():
    views = [instance(name, "PREFILL") for name in "abc"] + [instance(name, "DECODE") for name in "de"]
    expected = {**dict.fromkeys("abc", 100), **dict.fromkeys("de", 150)}
    assert choices([situation(*views)], 300) == Counter(expected)


def test_alternating_prompts_do_not_lock_ties_to_one_half():
    views = [instance(name) for name in "abcd"]
    first = situation(*views, hits=[match("a", device=1024), match("b", device=1024)])
    second = situation(*views, hits=[match("c", device=1024), match("d", device=1024)])
    assert choices([first, second], 400) == Counter(dict.fromkeys("abcd", 100))
    overlapping = situation(*views, hits=[match(name, device=1024) for name in "bc"])
    found = choices([first, overlapping], 300)
    assert min(found[name] for name in "abc") >= 75


def test_a_clear_winner_does_not_disturb_the_turns():
    views = [instance(name) for name in "ab"]
    clear = situation(*views, hits=[match("a", device=1024)])
    decision = car.decide(clear)
    assert decision.rotation == clear.rotation


@pytest.mark.parametrize(
    ("difference", "is_tie"), [(0.0, True), (0.9e-9, True), (1.1e-9, False), (1e-6, False)]
)
def test_scores_within_a_billionth_are_a_tie(difference, is_tie):
    # d_score is the usage here: all queues are empty
    better, worse = instance("c", "DECODE", usage=0.5), instance("d", "DECODE", usage=0.5 + difference)
    found = choices([situation(instance("p", "PREFILL"), better, worse)], 10)
    assert found["d"] == (5 if is_tie else 0)


def test_an_instance_that_leaves_and_returns_keeps_ties_even():
    a, b, c = instance("a"), instance("b"), instance("c")
    found = choices([situation(a, b, c), situation(a, c), situation(a, b, c)], 300)
    assert max(found.values()) - min(found.values()) <= 100


@pytest.mark.parametrize("name", ["car_prefill_lambda", "car_host_hit_weight"])
@pytest.mark.parametrize(
    ("value", "allowed"),
    [(0.0, True), (1.0, True), (0.5, True), (-0.001, False), (1.001, False), (float("nan"), False)],
)
def test_weights_outside_zero_to_one_are_refused(name, value, allowed):
    if allowed:
        assert getattr(Settings(**{name: value}), name) == value
    else:
        with pytest.raises(ValueError, match=name):
            Settings(**{name: value})

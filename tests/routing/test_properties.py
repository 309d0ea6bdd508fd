"""What must hold for any situation, found out with random ones. A naive reference scores along."""

from __future__ import annotations

from dataclasses import replace

import orjson
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from routing.instances.model import HealthState, InstanceView
from routing.policies import car, round_robin, slo_aware
from routing.policies.decision import Candidate, Decision, Rotation, Settings, Situation, Turns, Work
from routing.policies.explanation import explain
from routing.policies.replay import rescore
from streams.status import Match
from tests.routing.builders import IDENTITY, instance, load, match

ROLES = [
    ("DEFAULT", "DEFAULT"),
    ("PREFILL", "PREFILL"),
    ("DECODE", "DECODE"),
    ("MIX", "PREFILL"),
    ("MIX", "DECODE"),
]
NAMES = "abcdef"
share = st.floats(0, 1)
thorough = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@st.composite
def views(draw: st.DrawFn, order: int) -> InstanceView:
    role, current = draw(st.sampled_from(ROLES))
    return instance(
        NAMES[order],
        role,
        current=current,
        order=order,
        waiting=draw(st.one_of(st.none(), st.integers(-1, 3), st.integers(0, 2**65))),
        usage=draw(st.one_of(share, st.sampled_from([0.0, 0.5, 1.0, -0.1, 1.1, float("nan")]))),
        state=draw(st.sampled_from([HealthState.ACTIVE, HealthState.LEASE_LOST, HealthState.SUSPECT])),
        dp_size=draw(st.integers(1, 3)),
        incarnation=draw(st.sampled_from([IDENTITY, IDENTITY, "other", None])),
    )


@st.composite
def ranks(draw: st.DrawFn, name: str, tokens: int) -> list[Match]:
    return [
        match(
            name,
            rank,
            device=device,
            host=draw(st.integers(0, tokens - device)),
            synchronized=draw(st.sampled_from([True, True, True, False])),
            incarnation=draw(st.sampled_from([IDENTITY, IDENTITY, IDENTITY, None])),
        )
        for rank in range(draw(st.integers(0, 3)))
        for device in [draw(st.integers(0, tokens))]
    ]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    tokens = draw(st.sampled_from([0, 1, 100, 4096]))
    found = [draw(views(order)) for order in range(draw(st.integers(0, len(NAMES))))]
    ms = st.sampled_from([0.0, 20.0, 24.9, 50.0, 50.1, 400.0, 1000.0, 1000.1, 3000.0])
    return Situation(
        instances=found,
        input_tokens=tokens,
        settings=Settings(car_prefill_lambda=draw(share), car_host_hit_weight=draw(share)),
        hits={view.name: draw(ranks(view.name, tokens)) for view in found},
        work={
            view.name: Work(estimated_prefill_time=draw(ms), predicted_tpot=draw(ms))
            for view in found
            if draw(st.booleans())
        },
        rotation=Rotation(
            Turns(draw(st.integers(-1, 6)), tuple(draw(st.permutations(NAMES))[:3])),
            Turns(draw(st.integers(-1, 6)), tuple(draw(st.permutations(NAMES))[:3])),
        ),
    )


def score_of(decision: Decision, name: str) -> float:
    return next(c.score for c in decision.prefill_candidates if c.instance.name == name)


def naive_ratio(view: InstanceView, situation: Situation) -> float:
    """The rule, word by word."""
    if situation.input_tokens == 0 or view.identity is None:
        return 0.0
    by_rank = {match.spec.dp_rank: match for match in situation.hits.get(view.name, ())}
    ratios = []
    for rank in range(view.dp_size):
        match = by_rank.get(rank)
        if match is None or not match.synchronized or match.spec.incarnation != view.identity:
            return 0.0
        host = situation.settings.car_host_hit_weight * match.host_only_hit_tokens
        ratios.append(min(max((match.device_hit_tokens + host) / situation.input_tokens, 0.0), 1.0))
    return min(ratios)


@thorough
@given(situations())
def test_car_agrees_with_the_formulas_word_by_word(situation):
    decision = car.decide(situation)
    usable = [i for i in situation.instances if i.schedulable and i.load is not None and i.load.valid]
    decode = [i for i in usable if i.current_role == "DECODE"]
    prefill = [i for i in usable if i.current_role != "DECODE" and (decode or i.role == "DEFAULT")]
    if not prefill:
        assert decision.prefill is None
        assert {item.instance.name for item in decision.excluded} == {i.name for i in situation.instances}
        return
    weight = situation.settings.car_prefill_lambda
    longest = max(i.load.waiting_requests_num for i in prefill)
    expected = {
        i.name: weight * (1 - naive_ratio(i, situation))
        + (1 - weight) * (i.load.waiting_requests_num / longest if longest else 0)
        for i in prefill
    }
    found = {candidate.instance.name: candidate.score for candidate in decision.prefill_candidates}
    assert found.keys() == expected.keys()
    assert all(abs(found[name] - expected[name]) < 1e-12 for name in expected)
    assert [c.instance for c in decision.decode_candidates] == decode
    assert decision.prefill.score <= min(found.values()) + 1e-9


@thorough
@given(situations())
def test_chosen_has_the_smallest_score_and_values_are_in_range(situation):
    decision = car.decide(situation)
    for candidates, chosen in (
        (decision.prefill_candidates, decision.prefill),
        (decision.decode_candidates, decision.decode),
    ):
        assert (chosen is None) == (not candidates)
        assert chosen is None or chosen.score <= min(c.score for c in candidates) + 1e-9
    for candidate in decision.prefill_candidates:
        assert 0.0 <= candidate.kv_hit_ratio <= 1.0
        assert 0.0 <= candidate.queue_cost <= 1.0
        assert 0.0 <= candidate.score <= 1.0
    for candidate in decision.decode_candidates:
        assert 0.0 <= candidate.queue_cost <= 1.0
        assert 0.0 <= candidate.score <= 2.0


@thorough
@given(situations(), st.data())
def test_more_hits_never_make_a_score_worse(situation, data):
    before = car.decide(situation)
    assume(before.prefill_candidates)
    name = data.draw(st.sampled_from([c.instance.name for c in before.prefill_candidates]))
    more = [
        match(
            name,
            old.spec.dp_rank,
            device=old.device_hit_tokens + data.draw(st.integers(0, 500)),
            host=old.host_only_hit_tokens + data.draw(st.integers(0, 500)),
            synchronized=True,
            incarnation=old.spec.incarnation,
        )
        for old in situation.hits[name]
    ]
    after = car.decide(replace(situation, hits={**situation.hits, name: more}))
    assert score_of(after, name) <= score_of(before, name)


@thorough
@given(situations(), st.data())
def test_a_longer_queue_never_makes_a_score_better(situation, data):
    before = car.decide(situation)
    assume(before.prefill_candidates)
    chosen = data.draw(st.sampled_from(list(before.prefill_candidates)))
    old = chosen.instance
    longer = replace(
        old,
        load=load(
            old.load.waiting_requests_num + data.draw(st.integers(1, 50)), old.load.gpu_cache_usage_perc
        ),
    )
    instances = [longer if i is old else i for i in situation.instances]
    after = car.decide(replace(situation, instances=instances))
    assert score_of(after, old.name) >= score_of(before, old.name)


@thorough
@given(situations())
def test_nobody_unfit_is_chosen_by_any_policy(situation):
    for policy in (car, round_robin, slo_aware):
        decision = policy.decide(situation)
        served: list[Candidate] = [c for c in (decision.prefill, decision.decode) if c is not None]
        assert all(c.instance.schedulable for c in served)
        if decision.decode is not None:
            assert decision.decode.instance.current_role == "DECODE"
        if decision.prefill is not None and decision.decode is None:
            assert decision.prefill.instance.role == "DEFAULT"
        listed = [c.instance.name for c in (*decision.prefill_candidates, *decision.decode_candidates)]
        listed += [item.instance.name for item in decision.excluded]
        assert sorted(listed) == sorted(i.name for i in situation.instances)


@thorough
@given(situations())
def test_decisions_are_a_function_of_the_situation(situation):
    for policy in (car, round_robin, slo_aware):
        assert repr(policy.decide(situation)) == repr(policy.decide(situation))


@thorough
@given(situations())
def test_car_explanation_computes_to_the_decision(situation):
    decision = car.decide(situation)
    explanation = orjson.loads(orjson.dumps(explain(decision)))
    again = rescore(explanation, situation.settings)
    assert not again.moved
    for found, expected in ((again.prefill, decision.prefill), (again.decode, decision.decode)):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.instance.name == expected.instance.name
            assert (found.score, found.kv_hit_ratio, found.queue_cost) == expected[1:]
    for row in explanation["candidates"]:
        chosen = decision.prefill if row["side"] == "prefill" else decision.decode
        assert row["chosen"] == (chosen is not None and chosen.instance.name == row["instance_name"])


@thorough
@given(situations())
def test_explanations_of_other_policies_tell_the_choice_too(situation):
    turn = explain(round_robin.decide(situation))
    for row in turn["candidates"]:
        assert row["chosen"] == (row["steps_until_turn"] == 0)
        assert row["score"] is None
    assume(situation.input_tokens)
    decision = slo_aware.decide(situation)
    paces = [row for row in explain(decision)["candidates"] if row["side"] == "decode"]
    assume(paces)
    target = situation.settings.target_tpot
    within = [row for row in paces if row["work"]["predicted_tpot"] <= target]
    chosen = next(row for row in paces if row["chosen"])
    if within:
        assert chosen is within[0]
    else:
        assert chosen["work"]["predicted_tpot"] == min(row["work"]["predicted_tpot"] for row in paces)


@thorough
@given(situations(), st.integers(1, 3))
def test_short_explanations_keep_the_best_and_the_chosen(situation, most):
    for policy in (car, round_robin, slo_aware):
        decision = policy.decide(situation)
        short, full = explain(decision, most=most), explain(decision)
        assert short["candidates_num"] == full["candidates_num"]
        assert short["excluded_num"] == full["excluded_num"]
        for side, chosen in (("prefill", decision.prefill), ("decode", decision.decode)):
            rows = [row for row in short["candidates"] if row["side"] == side]
            assert len(rows) <= most
            assert chosen is None or [r["instance_name"] for r in rows if r["chosen"]] == [
                chosen.instance.name
            ]
        assert len(short["excluded"]) <= most
        assert orjson.dumps(short)

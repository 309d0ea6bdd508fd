"""The shell around the policies: what it reads, counts and remembers."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from routing.instances.core import Registered
from routing.instances.model import InstanceView, LoadReport, Registration, Role
from routing.instances.registry import InstanceRegistry
from routing.policies.decision import Policy, Settings
from routing.predictors import fit_predictor
from routing.request_metrics import Action, Counts, Report, RequestOpenError, UnknownRequestError
from routing.selector import NoCandidatesError, Selector
from tests.routing.builders import instance, match
from tests.routing.fakes import Clock, CountingMetrics, FixedIndex, FixedRegistry

TTFT = ((100, 10.0), (200, 20.0), (300, 30.0), (400, 40.0))  # 0.1 ms per token
# 9.9 ms per request in the batch, whatever its length
TPOT = tuple((length, b, 9.9 * b) for length, b in ((1001, 1), (1001, 2), (1001, 3), (2001, 2), (501, 4)))


def prompt(tokens: int) -> bytes:
    return bytes(4 * tokens)


def selector(
    *instances: InstanceView, policy: Policy = Policy.CAR, index: FixedIndex | None = None
) -> Selector:
    return Selector(
        Settings(policy=policy),
        FixedRegistry(*instances),
        index,
        metrics=CountingMetrics(),
        clock=Clock(),
        wall_clock=Clock(1.7e9),
    )


def numbered(*views: InstanceView) -> list[InstanceView]:
    return [replace(view, order=order) for order, view in enumerate(views)]


# Hits


def test_hits_of_the_index_decide():
    index = FixedIndex([match("a"), match("b", device=512)])
    selection = selector(*numbered(instance("a"), instance("b")), index=index).select(prompt(1024))
    assert selection.decision.prefill is not None
    assert selection.decision.prefill.instance.name == "b"
    assert selection.decision.prefill.kv_hit_ratio == 0.5
    assert selection.predicted_hit_tokens == 512
    assert index.prompts == [prompt(1024)]


def test_index_off_means_ratio_zero_and_no_prediction():
    selection = selector(*numbered(instance("a"), instance("b"))).select(prompt(1024))
    assert [c.kv_hit_ratio for c in selection.decision.prefill_candidates] == [0.0, 0.0]
    assert selection.predicted_hit_tokens is None


def test_a_failing_index_costs_hits_and_not_the_decision(caplog):
    index = FixedIndex(failure=RuntimeError("broken"))
    chosen = selector(instance("a"), index=index)
    for _ in range(3):
        assert chosen.select(prompt(10)).decision.prefill is not None
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "the index failed on a query; deciding without it"
    ]


def test_empty_prompt_does_not_ask_the_index():
    index = FixedIndex([match("a")])
    assert selector(instance("a"), index=index).select(b"").predicted_hit_tokens is None
    assert index.prompts == []


@pytest.mark.parametrize("policy", [Policy.RR, Policy.SLO_AWARE])
def test_other_policies_predict_too_so_that_the_index_can_be_judged(policy):
    index = FixedIndex([match("p", device=300, host=100)])
    group = numbered(instance("p", "PREFILL"), instance("d", "DECODE"))
    selection = selector(*group, policy=policy, index=index).select(prompt(1000))
    assert selection.predicted_hit_tokens == 400  # both tiers count as cached
    assert selection.decision.prefill is not None
    assert selection.decision.prefill.kv_hit_ratio is None


def test_prediction_is_that_of_the_worst_rank():
    view = instance("a", dp_size=2)
    matches = [match("a", 0, device=900), match("a", 1, device=100, host=200)]
    assert selector(view, index=FixedIndex(matches)).select(prompt(1000)).predicted_hit_tokens == 300
    missing = FixedIndex(matches[:1])
    assert selector(view, index=missing).select(prompt(1000)).predicted_hit_tokens == 0


def test_static_streams_predict_nothing():
    index = FixedIndex([match("a", device=900, incarnation=None)])
    assert selector(instance("a"), index=index).select(prompt(1000)).predicted_hit_tokens is None


# Counting


def test_each_decision_is_counted_where_it_went():
    chosen = selector(*numbered(instance("p", "PREFILL", ttft=TTFT), instance("d", "DECODE")))
    chosen.select(prompt(200), "r1")
    assert chosen.counts() == {"p": Counts(1, 200, 0, 0, 20.0), "d": Counts(0, 0, 1, 200, 0.0)}
    chosen.report("r1", Report(Action.FINISH_PREFILL))
    chosen.report("r1", Report(Action.FINISH_DECODE))
    assert set(chosen.counts().values()) == {Counts()}
    assert chosen.open_request_num() == 0


def test_request_id_is_made_up_when_none_is_given():
    chosen = selector(instance("a"))
    first, second = chosen.select(b""), chosen.select(b"")
    assert first.request_id != second.request_id
    chosen.report(first.request_id, Report(Action.CANCEL))
    assert chosen.open_request_num() == 1


def test_open_request_is_refused_and_leaves_everything_as_it_was():
    chosen = selector(instance("a"))
    chosen.select(prompt(5), "r")
    before = (chosen.counts(), chosen.totals())
    with pytest.raises(RequestOpenError):
        chosen.select(prompt(7), "r")
    assert (chosen.counts(), chosen.totals()) == before
    chosen.report("r", Report(Action.CANCEL))
    chosen.select(prompt(7), "r")
    assert chosen.counts()["a"].prefill_token_num == 7


def test_silent_requests_expire_also_when_only_looked_at():
    chosen = selector(instance("a"))
    chosen.select(prompt(5), "r")
    chosen.clock.now += 599.0  # type: ignore[attr-defined]
    assert chosen.open_request_num() == 1
    chosen.clock.now += 1.0  # type: ignore[attr-defined]
    assert chosen.counts() == {"a": Counts()}
    with pytest.raises(UnknownRequestError):
        chosen.report("r", Report(Action.FINISH_DECODE))


def test_replaced_instance_starts_from_zero():
    chosen = selector(instance("a", order=1))
    chosen.select(prompt(5), "old")
    chosen.registry.set(instance("a", order=2, incarnation="life-2"))  # type: ignore[attr-defined]
    chosen.select(prompt(7), "new")
    assert chosen.counts()["a"] == Counts(1, 7, 1, 7, 0.0)
    chosen.report("old", Report(Action.FINISH_DECODE))
    assert chosen.counts()["a"] == Counts(1, 7, 1, 7, 0.0)


def test_nobody_can_serve():
    chosen = selector(instance("a", waiting=None))
    with pytest.raises(NoCandidatesError) as caught:
        chosen.select(prompt(5), "r")
    assert [item.code for item in caught.value.selection.decision.excluded] == ["no_load"]
    assert chosen.open_request_num() == 0
    assert chosen.metrics.decisions == [("CAR", "no_candidates")]  # type: ignore[attr-defined]
    assert chosen.decisions.recent()[0].outcome == "no_candidates"


def test_decisions_and_mean_hit_ratio_are_summed_up():
    index = FixedIndex([match("a", device=512)])
    chosen = selector(instance("a"), index=index)
    chosen.select(prompt(1024))
    chosen.select(prompt(2048))
    chosen.select(b"")
    totals = chosen.totals()
    assert (totals.decisions, totals.hit_ratio_sum, totals.hit_ratio_num) == (3, 0.75, 2)
    assert chosen.metrics.decisions == [("CAR", "routed")] * 3  # type: ignore[attr-defined]


# What engines report


def test_reported_hits_are_compared_with_the_prediction_once():
    chosen = selector(instance("a"), index=FixedIndex([match("a", device=512)]))
    selection = chosen.select(prompt(1024), "r")
    chosen.report("r", Report(Action.FINISH_PREFILL), cached_tokens=384)
    chosen.report("r", Report(Action.FINISH_PREFILL), cached_tokens=384)
    chosen.report("r", Report(Action.FINISH_DECODE), cached_tokens=0)
    (errors,) = chosen.errors.read()
    assert (errors.instance_name, errors.count, errors.error_sum, errors.absolute_sum) == ("a", 1, 128, 128)
    assert [(c.predicted_tokens, c.cached_tokens) for c in errors.recent] == [(512, 384)]
    assert chosen.metrics.errors == [("a", 128)]  # type: ignore[attr-defined]
    record = chosen.decisions.find(selection.decision_id)
    assert record is not None
    assert record.cached_tokens == 384


def test_hits_reported_after_the_end_still_count():
    chosen = selector(instance("a"), index=FixedIndex([match("a", device=512)]))
    chosen.select(prompt(1024), "r")
    chosen.report("r", Report(Action.FINISH_DECODE))
    chosen.report("r", Report(Action.FINISH_DECODE), cached_tokens=600)
    assert chosen.metrics.errors == [("a", -88)]  # type: ignore[attr-defined]


def test_without_prediction_there_is_no_error():
    chosen = selector(instance("a"))
    chosen.select(prompt(1024), "r")
    chosen.report("r", Report(Action.FINISH_DECODE), cached_tokens=600)
    assert chosen.errors.read() == ()
    assert chosen.decisions.recent()[0].cached_tokens == 600


def test_errors_of_an_instance_that_is_gone_are_forgotten():
    chosen = selector(instance("a"), index=FixedIndex([match("a", device=512)]))
    chosen.select(prompt(1024), "r")
    chosen.report("r", Report(Action.FINISH_DECODE), cached_tokens=1)
    chosen.registry.set(instance("b"))  # type: ignore[attr-defined]
    chosen.counts()
    assert chosen.errors.read() == ()


def test_a_late_report_does_not_bring_back_an_instance_that_is_gone():
    chosen = selector(instance("a"), index=FixedIndex([match("a", device=512)]))
    selection = chosen.select(prompt(1024), "r")
    chosen.registry.set(instance("b"))  # type: ignore[attr-defined]
    chosen.report("r", Report(Action.FINISH_DECODE), cached_tokens=1)
    assert chosen.errors.read() == ()
    assert chosen.metrics.errors == []  # type: ignore[attr-defined]
    record = chosen.decisions.find(selection.decision_id)
    assert record is not None
    assert record.cached_tokens == 1


# SLO_AWARE with real predictors


def test_prefill_goes_where_the_work_before_it_is_shortest():
    group = numbered(
        instance("p", "PREFILL", ttft=TTFT), instance("q", "PREFILL", ttft=TTFT), instance("d", "DECODE")
    )
    chosen = selector(*group, policy=Policy.SLO_AWARE)

    def went_to(tokens: int) -> str:
        decision = chosen.select(prompt(tokens)).decision
        assert decision.prefill is not None
        return decision.prefill.instance.name

    # 100 ms on p, then 30 + 30 + 30 + 30 on q until it has more
    assert [went_to(1000), *(went_to(300) for _ in range(4))] == ["p", "q", "q", "q", "q"]
    assert went_to(1) == "p"
    assert chosen.counts()["p"].estimated_prefill_time == pytest.approx(100.1)


def test_decode_fills_the_first_instance_up_to_its_target():
    group = numbered(
        instance("p", "PREFILL"), instance("c", "DECODE", tpot=TPOT), instance("d", "DECODE", tpot=TPOT)
    )
    chosen = selector(*group, policy=Policy.SLO_AWARE)
    went_to = []
    for _ in range(12):
        decision = chosen.select(prompt(10)).decision
        assert decision.decode is not None
        went_to.append(decision.decode.instance.name)
    # 9.9 ms per request: five meet 50 ms; beyond, the least loaded, in turn
    assert went_to[:10] == ["c"] * 5 + ["d"] * 5
    assert sorted(went_to[10:]) == ["c", "d"]


def flipping() -> Selector:
    group = numbered(
        instance("p", "PREFILL"),
        instance("m", "MIX", current="PREFILL", tpot=TPOT),
        instance("d", "DECODE", tpot=TPOT),
    )
    chosen = selector(*group, policy=Policy.SLO_AWARE)
    for number in range(6):  # the sixth finds d over its target; p has had its turn: m is chosen
        chosen.select(prompt(10), f"r{number}")
    return chosen


def test_mix_flips_to_decode_under_load_and_back_when_idle():
    chosen = flipping()
    registry = chosen.registry
    assert registry.role("m") == "DECODE"  # type: ignore[attr-defined]
    decision = chosen.select(prompt(10), "on-m").decision
    assert decision.decode is not None
    assert decision.decode.instance.name == "m"
    chosen.report("on-m", Report(Action.FINISH_PREFILL))
    assert registry.role("m") == "DECODE"  # type: ignore[attr-defined]
    chosen.report("on-m", Report(Action.FINISH_DECODE))
    assert registry.role("m") == "PREFILL"  # type: ignore[attr-defined]


def test_mix_flips_back_when_its_requests_expire():
    chosen = flipping()
    chosen.select(prompt(10), "on-m")
    chosen.clock.now += 601.0  # type: ignore[attr-defined]
    chosen.open_request_num()
    assert chosen.registry.role("m") == "PREFILL"  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [Policy.RR, Policy.CAR])
def test_roles_flip_under_slo_aware_alone(policy):
    group = numbered(
        instance("p", "PREFILL"), instance("m", "MIX", current="DECODE"), instance("d", "DECODE")
    )
    chosen = selector(*group, policy=policy)
    for number in range(4):
        chosen.select(prompt(10), str(number))
        chosen.report(str(number), Report(Action.FINISH_DECODE))
    assert chosen.registry.role("m") == "DECODE"  # type: ignore[attr-defined]


def test_a_new_profile_is_fitted_again():
    chosen = selector(*numbered(instance("p", "PREFILL", ttft=TTFT), instance("d", "DECODE")))
    chosen.select(prompt(100), "a")
    faster = tuple((n, ms / 10) for n, ms in TTFT)
    chosen.registry.set(*numbered(instance("p", "PREFILL", ttft=faster), instance("d", "DECODE")))  # type: ignore[attr-defined]
    chosen.report("a", Report(Action.CANCEL))
    chosen.select(prompt(100), "b")
    assert chosen.counts()["p"].estimated_prefill_time == pytest.approx(1.0)


def test_the_same_profile_registered_again_is_not_fitted_again(monkeypatch):
    fitted: list[object] = []
    monkeypatch.setattr(
        "routing.selector.fit_predictor", lambda *rows: fitted.append(rows) or fit_predictor(*rows)
    )
    chosen = selector(instance("a", ttft=TTFT))
    for _ in range(3):
        chosen.select(prompt(100))
        again = tuple((n, ms) for n, ms in TTFT)
        chosen.registry.set(instance("a", ttft=again))  # type: ignore[attr-defined]
    assert len(fitted) == 1


# A look without a decision


def test_preview_decides_like_the_policy_asked_for_and_changes_nothing():
    group = numbered(instance("a", waiting=3), instance("b"), instance("c"))
    chosen = selector(*group, policy=Policy.RR, index=FixedIndex([match("b", device=512)]))
    for _ in range(3):
        by_car = chosen.preview(prompt(1024), Policy.CAR).prefill
        assert by_car is not None
        assert (by_car.instance.name, by_car.kv_hit_ratio) == ("b", 0.5)
        in_turn = chosen.preview(prompt(1024)).prefill
        assert in_turn is not None
        assert in_turn.instance.name == "a"
    assert chosen.totals().decisions == chosen.open_request_num() == 0
    assert chosen.decisions.recent() == ()
    assert chosen.preview(b"", Policy.SLO_AWARE).prefill is not None


# The real registry


def test_new_incarnation_takes_part_in_car_once_it_reports_its_load():
    registry = InstanceRegistry()
    chosen = Selector(Settings(policy=Policy.CAR), registry)
    registry.apply([Registered(Registration("a:1", incarnation_id="one"))])
    registry.heartbeat("a:1", "one", LoadReport(0, 0.5))
    chosen.select(prompt(5), "old")
    registry.apply([Registered(Registration("a:1", incarnation_id="two"))])
    with pytest.raises(NoCandidatesError):
        chosen.select(prompt(5))
    assert chosen.counts() == {"a:1": Counts()}
    registry.heartbeat("a:1", "two", LoadReport(0, 2.0))  # out of range: invalid
    with pytest.raises(NoCandidatesError):
        chosen.select(prompt(5))
    registry.heartbeat("a:1", "two", LoadReport(0, 0.5))
    assert chosen.select(prompt(5)).decision.prefill is not None


def test_role_flip_is_seen_at_once_by_everybody_who_follows_the_registry():
    registry = InstanceRegistry()
    chosen = Selector(Settings(policy=Policy.SLO_AWARE), registry)
    mix = Registration("m:1", Role.MIX, incarnation_id="one", tpot_profiling_data=TPOT)
    decode = Registration("d:1", Role.DECODE, incarnation_id="one", tpot_profiling_data=TPOT)
    registry.apply([Registered(decode), Registered(Registration("p:1", Role.PREFILL)), Registered(mix)])
    seen: list[str] = []
    registry.subscribe(lambda: seen.append(registry.snapshot().by_name["m:1"].current_role))
    for number in range(6):
        chosen.select(prompt(10), str(number))
    assert seen == ["DECODE"]
    chosen.select(prompt(10), "on-m")
    chosen.report("on-m", Report(Action.FINISH_DECODE))
    assert seen == ["DECODE", "PREFILL"]


# Log lines


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy.RR, "routing policy RR (in turn, without weights)"),
        (Policy.CAR, "routing policy CAR (car_prefill_lambda 0.5, car_host_hit_weight 0.5)"),
        (Policy.SLO_AWARE, "routing policy SLO_AWARE (target_ttft 1000 ms, target_tpot 50 ms)"),
    ],
)
def test_start_says_policy_and_weights(policy, says, caplog):
    caplog.set_level(logging.INFO)
    selector(instance("a"), policy=policy, index=FixedIndex()).announce()
    assert [record.message for record in caplog.records] == [says]


def test_start_says_once_that_the_index_is_off(caplog):
    caplog.set_level(logging.INFO)
    chosen = selector(instance("a"))
    chosen.announce()
    chosen.select(prompt(3))
    assert sum("index is off" in record.message for record in caplog.records) == 1

"""Counters of requests under way: what each report does, and that nothing ever leaks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from routing.request_metrics import (
    Action,
    Counts,
    Opening,
    Report,
    RequestMetrics,
    RequestOpenError,
    UnknownRequestError,
)

P, D = 1, 2


def opening(
    request_id: str = "r",
    *,
    tokens: int = 1000,
    prefill: int = P,
    decode: int | None = D,
    ttft: float = 31.5,
) -> Opening:
    return Opening(request_id, f"decision-{request_id}", tokens, prefill, decode, ttft)


@pytest.fixture
def metrics() -> RequestMetrics:
    found = RequestMetrics(expiry_seconds=600.0)
    found.schedule(opening(), now=0.0)
    return found


def done(metrics: RequestMetrics) -> bool:
    return all(metrics.counts(order) == Counts() for order in (P, D)) and not metrics.open_request_num


def test_schedule_counts_the_request_on_both_sides(metrics):
    assert metrics.counts(P) == Counts(1, 1000, 0, 0, 31.5)
    assert metrics.counts(D) == Counts(0, 0, 1, 1000, 0.0)


def test_finish_prefill_moves_on_to_decode(metrics):
    assert metrics.report("r", Report(Action.FINISH_PREFILL), 1.0) == []
    assert metrics.counts(P) == Counts()
    assert metrics.counts(D) == Counts(0, 0, 1, 1001, 0.0)


def test_generate_adds_a_token(metrics):
    for _ in range(3):
        metrics.report("r", Report(Action.GENERATE), 1.0)
    assert metrics.counts(D).decode_token_num == 1003


def test_generate_with_a_number_sets_the_total(metrics):
    metrics.report("r", Report(Action.FINISH_PREFILL), 1.0)
    metrics.report("r", Report(Action.GENERATE, 10), 1.0)
    assert metrics.counts(D).decode_token_num == 1010
    metrics.report("r", Report(Action.GENERATE, 10), 1.0)
    assert metrics.counts(D).decode_token_num == 1010
    metrics.report("r", Report(Action.GENERATE, 4), 1.0)
    assert metrics.counts(D).decode_token_num == 1004
    metrics.report("r", Report(Action.GENERATE), 1.0)
    assert metrics.counts(D).decode_token_num == 1005
    metrics.report("r", Report(Action.GENERATE, 0), 1.0)
    assert metrics.counts(D).decode_token_num == 1000
    assert metrics.report("r", Report(Action.FINISH_DECODE), 1.0) == [D]
    assert done(metrics)


@pytest.mark.parametrize("total", [0, 1, 10])
def test_finish_prefill_after_a_total_does_not_change_the_total(metrics, total):
    metrics.report("r", Report(Action.GENERATE, total), 1.0)
    metrics.report("r", Report(Action.FINISH_PREFILL), 1.0)
    assert metrics.counts(P) == Counts()
    assert metrics.counts(D) == Counts(0, 0, 1, 1000 + total, 0.0)
    metrics.report("r", Report(Action.FINISH_DECODE), 1.0)
    assert done(metrics)


def test_finish_prefill_after_a_token_without_a_total_still_counts_its_own(metrics):
    metrics.report("r", Report(Action.GENERATE), 1.0)
    metrics.report("r", Report(Action.FINISH_PREFILL), 1.0)
    assert metrics.counts(D).decode_token_num == 1002


def test_finish_decode_takes_off_exactly_what_was_counted(metrics):
    metrics.schedule(opening("other", tokens=7, ttft=1.0), 0.0)
    metrics.report("r", Report(Action.FINISH_PREFILL), 1.0)
    metrics.report("r", Report(Action.GENERATE, 20), 1.0)
    # the number it comes with was never counted
    assert metrics.report("r", Report(Action.FINISH_DECODE, 999), 1.0) == []
    assert metrics.counts(P) == Counts(1, 7, 0, 0, 1.0)
    assert metrics.counts(D) == Counts(0, 0, 1, 7, 0.0)


def test_finish_decode_without_finish_prefill_leaves_nothing(metrics):
    assert metrics.report("r", Report(Action.FINISH_DECODE), 1.0) == [D]
    assert done(metrics)


@pytest.mark.parametrize("before", [[], [Action.FINISH_PREFILL], [Action.FINISH_PREFILL, Action.GENERATE]])
def test_cancel_undoes_what_is_still_counted(metrics, before):
    for action in before:
        metrics.report("r", Report(action), 1.0)
    assert metrics.report("r", Report(Action.CANCEL), 2.0) == [D]
    assert done(metrics)


@pytest.mark.parametrize(
    "action", [Action.FINISH_PREFILL, Action.FINISH_DECODE, Action.CANCEL, Action.SCHEDULE]
)
def test_repeated_reports_change_nothing(metrics, action):
    metrics.schedule(opening("other"), 0.0)
    metrics.report("r", Report(action), 1.0)
    after = (metrics.counts(P), metrics.counts(D))
    assert metrics.report("r", Report(action), 1.0) == []
    assert (metrics.counts(P), metrics.counts(D)) == after


@pytest.mark.parametrize("late", list(Action))
@pytest.mark.parametrize("end", [Action.FINISH_DECODE, Action.CANCEL])
def test_reports_after_the_end_change_nothing(metrics, end, late):
    metrics.report("r", Report(end), 1.0)
    assert metrics.report("r", Report(late, 50), 2.0) == []
    assert done(metrics)


def test_unknown_request_is_an_error(metrics):
    with pytest.raises(UnknownRequestError):
        metrics.report("nobody", Report(Action.GENERATE), 1.0)


def test_open_request_cannot_be_opened_again_but_an_ended_one_can(metrics):
    with pytest.raises(RequestOpenError):
        metrics.schedule(opening(tokens=5), 1.0)
    assert metrics.counts(P).prefill_token_num == 1000
    metrics.report("r", Report(Action.CANCEL), 1.0)
    metrics.schedule(opening(tokens=5), 1.0)
    assert metrics.counts(P).prefill_token_num == 5
    metrics.report("r", Report(Action.FINISH_DECODE), 1.0)
    assert done(metrics)


def test_silent_request_expires_and_is_undone(metrics):
    metrics.report("r", Report(Action.FINISH_PREFILL), 1.0)
    assert metrics.expire(600.9) == []
    assert metrics.open_request_num == 1
    assert metrics.expire(601.0) == [D]
    assert done(metrics)
    assert metrics.expired_num == 1
    with pytest.raises(UnknownRequestError):
        metrics.report("r", Report(Action.FINISH_DECODE), 602.0)


def test_each_report_postpones_the_expiry(metrics):
    for now in (500.0, 1000.0, 1500.0):
        metrics.report("r", Report(Action.GENERATE), now)
        metrics.expire(now)
    assert metrics.open_request_num == 1
    metrics.expire(2100.0)
    assert done(metrics)


def test_silent_requests_do_not_hide_behind_a_busy_one(metrics):
    metrics.schedule(opening("silent"), 1.0)
    metrics.report("r", Report(Action.GENERATE), 500.0)
    metrics.expire(601.0)
    assert metrics.is_open("r")
    assert not metrics.is_open("silent")


def test_ended_requests_are_forgotten_in_time(metrics):
    metrics.report("r", Report(Action.FINISH_DECODE), 10.0)
    metrics.expire(609.0)
    assert not metrics.get("r").open
    metrics.expire(610.0)
    with pytest.raises(UnknownRequestError):
        metrics.get("r")


def test_number_of_open_requests_is_bounded():
    metrics = RequestMetrics(max_open=3)
    for number in range(5):
        metrics.schedule(opening(str(number)), now=float(number))
    assert metrics.open_request_num == 3
    assert metrics.counts(P).prefill_request_num == 3
    assert not metrics.is_open("1")
    assert metrics.is_open("2")


def test_instance_that_serves_alone_counts_both_sides_itself():
    metrics = RequestMetrics()
    metrics.schedule(opening(decode=None), 0.0)
    assert metrics.counts(P) == Counts(1, 1000, 1, 1000, 31.5)
    assert metrics.report("r", Report(Action.FINISH_PREFILL), 0.0) == []
    assert metrics.counts(P) == Counts(0, 0, 1, 1001, 0.0)
    assert metrics.report("r", Report(Action.FINISH_DECODE), 0.0) == [P]
    assert done(metrics)


def test_replaced_instance_starts_from_zero_and_is_not_touched_by_old_requests(metrics):
    metrics.retain([P])  # D is gone; its successor is another life
    successor = 3
    metrics.schedule(opening("new", decode=successor), 1.0)
    metrics.report("r", Report(Action.FINISH_DECODE), 2.0)
    assert metrics.counts(successor) == Counts(0, 0, 1, 1000, 0.0)
    assert metrics.counts(D) == Counts()


def test_instance_that_comes_back_under_the_same_number_is_not_touched_either(metrics):
    metrics.retain([])
    metrics.schedule(opening("new"), 1.0)
    metrics.report("r", Report(Action.CANCEL), 2.0)
    assert metrics.counts(P) == Counts(1, 1000, 0, 0, 31.5)
    metrics.report("new", Report(Action.CANCEL), 2.0)
    assert done(metrics)


def test_estimates_come_back_to_exactly_zero():
    metrics = RequestMetrics()
    for number in range(1000):
        metrics.schedule(opening(str(number), ttft=0.1 * number + 1 / 3), 0.0)
    for number in reversed(range(1000)):
        metrics.report(str(number), Report(Action.FINISH_PREFILL), 0.0)
    assert metrics.counts(P).estimated_prefill_time == 0.0


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens: counters are sums over open requests, hence never negative, and end at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = RequestMetrics(expiry_seconds=50.0, max_open=6)
        self.now = 0.0

    @rule(
        name=st.sampled_from("abcdefgh"),
        tokens=st.integers(0, 5000),
        prefill=st.integers(0, 3),
        decode=st.one_of(st.none(), st.integers(0, 3)),
        ttft=st.floats(0, 1e6),
    )
    def schedule(self, name, tokens, prefill, decode, ttft):
        chosen = opening(name, tokens=tokens, prefill=prefill, decode=decode, ttft=ttft)
        if self.metrics.is_open(name):
            with pytest.raises(RequestOpenError):
                self.metrics.schedule(chosen, self.now)
        else:
            self.metrics.schedule(chosen, self.now)

    @rule(
        name=st.sampled_from("abcdefgh"),
        action=st.sampled_from(Action),
        number=st.one_of(st.none(), st.integers(0, 10_000)),
    )
    def report(self, name, action, number):
        try:
            self.metrics.report(name, Report(action, number), self.now)
        except UnknownRequestError:
            assert not self.metrics.is_open(name)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds):
        self.now += seconds
        self.metrics.expire(self.now)

    @rule(orders=st.sets(st.integers(0, 3)))
    def leave(self, orders):
        self.metrics.retain(orders)

    @invariant()
    def nothing_is_negative_and_bounds_hold(self):
        for order in range(4):
            counts = self.metrics.counts(order)
            assert min(counts.prefill_request_num, counts.prefill_token_num, counts.decode_request_num) >= 0
            assert min(counts.decode_token_num, counts.estimated_prefill_time) >= 0
            if not counts.prefill_request_num:
                assert counts.prefill_token_num == counts.estimated_prefill_time == 0
            if not counts.decode_request_num:
                assert counts.decode_token_num == 0
        assert self.metrics.open_request_num <= 6

    def teardown(self):
        self.metrics.expire(self.now + 100.0)
        assert self.metrics.open_request_num == 0
        assert all(self.metrics.counts(order) == Counts() for order in range(4))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)

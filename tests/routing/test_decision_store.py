"""Decisions in the database: what is written, what is pruned, and what people see of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

import routing.decision_log as log_module
from routing.decision_log import DecisionLog, Feedback, RefusedError, Written
from routing.decision_models import Decision, RecordedPrompt
from routing.decision_store import DecisionStore, Retention
from routing.instances.model import HealthState
from routing.policies import car, round_robin, slo_aware
from routing.policies.decision import Decision as Decided
from routing.policies.decision import Policy, Settings, Work
from routing.records import DecisionRecord, Selection, record_of
from tests.routing.builders import instance, match, situation
from tests.support.waiting import wait_until

NOW = 1_760_000_000.0
GROUP = situation(
    instance("10.0.0.1:8000", "PREFILL", order=0, waiting=2, dp_size=2),
    instance("10.0.0.2:8000", "PREFILL", order=1, waiting=4),
    instance("10.0.0.3:8000", "DECODE", order=2, usage=0.25),
    instance("<script>alert(1)</script>", state=HealthState.SUSPECT),
    hits=[match("10.0.0.2:8000", device=512, host=256), match("10.0.0.1:8000", device=1024)],
    work={"10.0.0.3:8000": Work(predicted_tpot=12.5, decode_request_num=3)},
)


def select(
    name: str, *, decision: Decided | None = None, at: float = NOW, policy: Policy = Policy.CAR
) -> Selection:
    found = decision or car.decide(replace(GROUP, settings=Settings(policy=policy)))
    return Selection(f"{name:0>32}", f"request-{name}", at, found, 512, 0.00125)


def record(name: str, *, full: bool = True, **changes: float) -> DecisionRecord:
    return record_of(select(name, **changes), full=full)  # type: ignore[arg-type]


@pytest.mark.django_db
def test_a_decision_becomes_a_row():
    DecisionStore("replica-1").write([Written(record("a"))])
    row = Decision.objects.get()
    assert row.decision_id == "0" * 31 + "a"
    assert (row.request_id, row.replica, row.policy, row.outcome) == (
        "request-a",
        "replica-1",
        "CAR",
        "routed",
    )
    assert row.at.timestamp() == NOW
    assert row.prefill_instance == "10.0.0.2:8000"
    assert row.prefill_incarnation == "life-1"
    assert (row.kv_hit_ratio, row.queue_cost, row.prefill_score) == (0.625, 1.0, 0.6875)
    assert (row.decode_instance, row.decode_score) == ("10.0.0.3:8000", 0.25)
    assert (row.input_tokens, row.predicted_hit_tokens, row.cached_tokens) == (1024, 512, None)
    assert len(row.explanation["candidates"]) == 3
    assert row.prediction_error is None


@pytest.mark.django_db
def test_refused_requests_and_scores_that_do_not_exist_are_null():
    nobody = car.decide(situation(instance("a", waiting=None)))
    turn = round_robin.decide(situation(instance("a", incarnation=None)))
    entries = [
        Written(record_of(select("a", decision=nobody), full=True)),
        Written(record_of(select("b", decision=turn), full=True)),
    ]
    DecisionStore().write(entries)
    first, second = Decision.objects.order_by("id")
    assert (first.outcome, first.prefill_instance, first.prefill_score) == ("no_candidates", "", None)
    assert first.excluded[0]["code"] == "no_load"
    assert (second.prefill_instance, second.prefill_incarnation, second.decode_instance) == ("a", "", "")
    assert (second.prefill_score, second.kv_hit_ratio, second.queue_cost) == (None, None, None)


@pytest.mark.django_db
def test_feedback_completes_the_row_whether_it_comes_with_it_or_later():
    store = DecisionStore()
    store.write([Written(record("a")), Feedback("0" * 31 + "a", 384), Written(record("b"))])
    store.write([Feedback("0" * 31 + "b", 2**40), Feedback("unknown", 1)])
    first, second = Decision.objects.order_by("id")
    assert (first.cached_tokens, first.prediction_error) == (384, 128)
    assert second.cached_tokens == 2**31 - 1


@pytest.mark.django_db
def test_a_batch_is_written_whole_or_refused():
    store = DecisionStore()
    store.write([Written(record("a"))])
    with pytest.raises(RefusedError):
        store.write([Written(record("b")), Written(record("a"))])
    assert Decision.objects.count() == 1


@pytest.mark.django_db
def test_rows_are_pruned_by_age_and_by_number(monkeypatch):
    monkeypatch.setattr("routing.decision_store.PRUNE_CHUNK", 3)
    store = DecisionStore(retention=Retention(days=1.0, rows=5, prompt_hours=1.0, prompt_rows=2))
    day, hour = 86_400.0, 3_600.0
    ages = [3 * day, 2 * day, 1.01 * day, *[2 * hour] * 4, 60.0, 50.0, 40.0]
    store.write([Written(record(str(n), at=NOW - age), b"1234") for n, age in enumerate(ages)])
    store.prune(NOW)
    assert [row.decision_id[-1] for row in Decision.objects.order_by("id")] == list("56789")
    assert [row.decision_id[-1] for row in RecordedPrompt.objects.order_by("id")] == list("89")
    assert bytes(RecordedPrompt.objects.latest("id").token_ids) == b"1234"
    store.prune(NOW + 30 * day)
    assert Decision.objects.count() == RecordedPrompt.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_the_writer_thread_brings_decisions_to_the_database(monkeypatch):
    monkeypatch.setattr(log_module, "FLUSH_SECONDS", 0.005)
    log = DecisionLog(DecisionStore(), explain_share=0.5, wall_clock=lambda: NOW)
    log.start()
    for name in "abcd":
        log.record(select(name))
    log.feedback("0" * 31 + "c", 500)
    wait_until(lambda: log.health().queued == 0)
    log.stop()
    assert log.health().dropped == 0
    rows = list(Decision.objects.order_by("id"))
    assert [row.request_id for row in rows] == [f"request-{name}" for name in "abcd"]
    assert [row.full for row in rows] == [False, True, False, True]
    assert [row.cached_tokens for row in rows] == [None, None, 500, None]


# What people see


@pytest.fixture
def staff(client: Client, db: None) -> Client:
    user = User.objects.create_user("ann", password="x", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_decision"))
    client.force_login(user)
    return client


LIST = "admin:routing_decision_changelist"


def page(client: Client, url: str) -> str:
    answer = client.get(url)
    assert answer.status_code == 200
    return answer.content.decode()


def test_list_shows_decisions_with_a_constant_number_of_queries(staff, django_assert_num_queries):
    def queries(count: int) -> int:
        Decision.objects.all().delete()
        DecisionStore().write([Written(record(str(number))) for number in range(count)])
        with django_assert_num_queries(6) as captured:
            assert page(staff, reverse(LIST)).count("10.0.0.2:8000") >= count
        return len(captured)

    assert queries(1) == queries(50)


def test_list_can_be_searched_and_filtered(staff):
    DecisionStore().write([Written(record("a")), Written(record("b"))])
    assert "request-a" not in page(staff, reverse(LIST))
    for query, found in (
        ("q=request-a", 1),
        ("q=10.0.0.3", 2),
        ("q=nobody", 0),
        ("outcome=no_candidates", 0),
    ):
        assert f"{found} decision" in page(staff, f"{reverse(LIST)}?{query}")


def explained(client: Client, decision: Decided, policy: Policy) -> str:
    DecisionStore().write([Written(record_of(select(policy, decision=decision), full=True))])
    row = Decision.objects.latest("id")
    return page(client, reverse("admin:routing_decision_change", args=[row.pk]))


def test_explanation_of_car_shows_the_sum_of_each_candidate(staff):
    html = explained(staff, car.decide(GROUP), Policy.CAR)
    assert "0.5 * (1 - hit ratio 0.625) + 0.5 * queue 1.000 (4 of 4 waiting) = 0.6875" in html
    assert "cache usage 0.250 + queue 0.000 (0 of 0 waiting) = 0.2500" in html
    assert "rank 0: 512 tokens on the device, 256 more on the host" in html
    assert "rank 1: no stream" in html
    assert "it is SUSPECT" in html
    assert "(chosen)" in html


def test_explanation_of_other_policies_shows_what_they_look_at(staff):
    html = explained(staff, round_robin.decide(GROUP), Policy.RR)
    assert "its turn in 1 more" in html
    html = explained(staff, slo_aware.decide(GROUP), Policy.SLO_AWARE)
    assert "12.50 ms per token with this request (3 requests, 0 tokens now)" in html


def test_explanation_escapes_what_engines_call_themselves(staff):
    html = explained(staff, car.decide(GROUP), Policy.CAR)
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_nobody_can_change_or_delete_decisions(staff):
    user = User.objects.get(username="ann")
    user.is_superuser = True
    user.save()
    DecisionStore().write([Written(record("a"))])
    row = Decision.objects.get()
    assert staff.get(reverse("admin:routing_decision_add")).status_code == 403
    assert staff.post(reverse("admin:routing_decision_delete", args=[row.pk])).status_code == 403
    assert staff.post(reverse("admin:routing_decision_change", args=[row.pk]), {}).status_code == 403


def test_decisions_are_hidden_from_staff_without_the_permission(client, db):
    client.force_login(User.objects.create_user("bob", password="x", is_staff=True))
    assert client.get(reverse(LIST)).status_code == 403

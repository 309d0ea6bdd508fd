"""Live, able to serve, ready: over plain facts, and over HTTP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvportal.health import Facts, Readiness, Roles, WarmUp, count_roles, why_cold, why_not_able
from routing.instances.model import HealthState, InstanceView, Registration, Role
from tests.http import shells

UP = Facts(running=True, seconds_up=60.0)
WARM_UP = WarmUp(share=0.8, seconds=20.0)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(UP, instances=1, default=1), None),
        (replace(UP, instances=2, prefill=1, decode=1), None),
        (replace(UP, static_streams=True), None),
        (replace(UP, instances=3, default=1, prefill=1), None),
        (Facts(running=False, instances=1, default=1), "the portal is starting or stopping"),
        (UP, "no instance is registered"),
        (replace(UP, follows_nothing=True), "the KV events file neither enables discovery nor names streams"),
        (replace(UP, follows_nothing=True, instances=1, default=1), None),
        (replace(UP, source_trouble="etcd is not connected: refused"), "etcd is not connected: refused"),
        (replace(UP, source_trouble="etcd is not connected: refused", static_streams=True), None),
        (replace(UP, source_trouble="etcd is not connected: refused", instances=1, default=1), None),
        (replace(UP, instances=1, prefill=1), "there are 1 PREFILL"),
        (replace(UP, instances=2, decode=2), "there are 2 DECODE"),
        (replace(UP, instances=1), "there are none"),
        (replace(UP, instances=1, static_streams=True), "there are none"),
    ],
)
def test_a_group_is_a_default_or_a_prefill_and_a_decode(facts, reason):
    found = why_not_able(facts)
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("desired", "synchronized", "seconds", "cold"),
    [
        (10, 7, 5.0, True),
        (10, 8, 5.0, False),
        (10, 0, 19.9, True),
        (10, 0, 20.0, False),
        (0, 0, 5.0, True),
        (0, 0, 20.0, False),
        (1, 0, 0.0, True),
        (1, 1, 0.0, False),
        (3, 2, 0.0, True),  # 80 % of three is three
    ],
)
def test_after_a_start_most_streams_must_be_synchronized_or_time_be_up(desired, synchronized, seconds, cold):
    facts = replace(UP, desired_streams=desired, synchronized_streams=synchronized, seconds_up=seconds)
    assert (why_cold(facts, WARM_UP) is not None) is cold


def test_instances_count_under_their_current_role_while_they_can_be_scheduled():
    def instance(role: Role, current: Role, state: HealthState = HealthState.ACTIVE) -> InstanceView:
        return InstanceView(Registration("a:1", role), 0, current, state, 0.0, "")

    instances = [
        instance(Role.DEFAULT, Role.DEFAULT),
        instance(Role.DEFAULT, Role.DEFAULT, HealthState.LEASE_LOST),
        instance(Role.DEFAULT, Role.DEFAULT, HealthState.SUSPECT),
        instance(Role.MIX, Role.PREFILL),
        instance(Role.MIX, Role.DECODE),
        instance(Role.DECODE, Role.DECODE),
    ]
    assert count_roles(instances) == Roles(instances=6, default=2, prefill=1, decode=2)
    assert count_roles(()) == Roles(0, 0, 0, 0)


def test_without_the_index_there_is_nothing_to_wait_for():
    assert why_cold(replace(UP, kv_events=False, seconds_up=0.0), WARM_UP) is None


def test_streams_that_are_lost_later_do_not_make_it_cold_again():
    now = [replace(UP, instances=1, default=1, seconds_up=1.0, desired_streams=5, synchronized_streams=3)]
    readiness = Readiness(lambda: now[0], WARM_UP)
    for _ in range(2):
        assert "3 of 5 streams are synchronized" in readiness.missing()[0]
    now[0] = replace(now[0], synchronized_streams=4)
    assert readiness.missing() == ()
    now[0] = replace(now[0], synchronized_streams=0)
    assert readiness.missing() == ()


def test_a_runtime_that_is_not_up_is_not_taken_for_a_warm_one():
    now = [Facts(running=False, kv_events=False)]
    readiness = Readiness(lambda: now[0], WARM_UP)
    assert readiness.missing() == ("the portal is starting or stopping",)
    now[0] = Facts(running=True, instances=1, default=1, desired_streams=5)
    assert readiness.missing() != ()


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        (replace(UP, static_streams=True), []),
        (replace(UP, static_streams=True, draining=True), ["draining"]),
        (UP, ["no instance"]),
        (
            replace(UP, follows_nothing=True, seconds_up=1.0),
            ["no instance is registered; the KV events file"],
        ),
        (replace(UP, seconds_up=1.0), ["no instance", "no stream is known yet"]),
        (replace(UP, static_streams=True, broken=("the history writer has ended",)), ["the history writer"]),
    ],
)
def test_readyz_names_all_that_is_missing(ask, facts, missing):
    with shells.portal(facts=facts):
        answer = ask("GET", "/readyz", token=None)
    assert answer.status == (503 if missing else 200)
    told = answer.json.get("missing", [])
    assert len(told) == len(missing)
    assert all(expected in found for expected, found in zip(missing, told, strict=True))


def test_livez_is_not_readyz(ask):
    with shells.portal(facts=replace(UP, draining=True)):
        assert ask("GET", "/livez", token=None).json == {"status": "alive"}
    with shells.portal(facts=replace(UP, broken=("the history writer has ended",))):
        answer = ask("GET", "/livez", token=None)
        assert (answer.status, answer.json["missing"]) == (503, ["the history writer has ended"])


def test_requests_are_served_while_cold_or_draining(ask):
    facts = replace(UP, instances=1, default=1, draining=True, seconds_up=0.0, desired_streams=9)
    with shells.portal(facts=facts):
        assert ask("GET", "/readyz").status == 503
        assert ask("POST", "/v1/internal/kv-cache/query", b'{"token_ids":[]}', shells.JSON).status == 200

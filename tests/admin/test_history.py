from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from kvportal import history as history_module
from kvportal import parts, records
from kvportal.config import load_config
from kvportal.history import FlapFilter, History
from kvportal.models import Replica
from kvportal.records import ReplicaView, Retention
from streams.models import ResyncRequest, ResyncResult, Stream, StreamStateChange
from streams.resync import OutcomeState, ResyncOrder, ResyncOutcome, ResyncSource, ResyncTarget
from streams.spec import StreamSpec
from streams.status import StreamState
from tests.admin.values import NOW, Clock, change, spec
from tests.support.waiting import wait_until

DAY = 86_400.0


def order(at: float = NOW, actor: str = "ann") -> ResyncOrder:
    return ResyncOrder(actor, ResyncSource.PAGE, at, (ResyncTarget("10.0.0.1:8000", 0),), drop=True)


def outcome(of: ResyncOrder, replica: str = "here", **changes: Any) -> ResyncOutcome:
    values = {"state": OutcomeState.STARTED, "reached": 1, "settled": 0, "detail": "waiting", **changes}
    return ResyncOutcome(of, replica, NOW, **values)


@pytest.fixture
def broken_database(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A switch that makes every write of the history fail as an unreachable database does."""
    writers = {"write_changes": records.write_changes, "write_outcome": records.write_outcome}

    def fail(*_: object) -> None:
        raise OperationalError("no route to the database")

    def switch(broken: bool) -> None:
        for name, write in writers.items():
            monkeypatch.setattr(records, name, fail if broken else write)

    return switch


@pytest.mark.django_db
def test_state_change_is_written_with_its_reason() -> None:
    history = History("here")
    history.record_change(change())
    history.record_change(change(fault=None, new=StreamState.SYNCHRONIZED, detail="snapshot at watermark 7"))
    assert history.step()
    newest, oldest = StreamStateChange.objects.all()
    assert (oldest.instance_name, oldest.dp_rank, oldest.replica) == ("10.0.0.1:8000", 0, "here")
    assert (oldest.old_state, oldest.new_state) == ("synchronized", "unsynchronized")
    assert (oldest.code, oldest.sentence) == ("sequence_gap", "message 12 followed 9: 2 missing")
    assert oldest.at.timestamp() == NOW
    assert (newest.code, newest.detail) == ("", "snapshot at watermark 7")
    assert history.health().queued == 0


@pytest.mark.django_db
def test_order_and_outcome_make_one_audit_row_however_often_they_are_recorded() -> None:
    history, placed = History("here"), order()
    history.record_order(placed)
    history.record_outcome(outcome(placed))
    history.record_order(placed)
    history.record_outcome(outcome(placed, state=OutcomeState.DONE, settled=1, detail="1 of 1"))
    history.record_outcome(outcome(placed, "there"))
    assert history.step()
    request = ResyncRequest.objects.get()
    assert (request.actor, request.source, request.scope, request.drop) == (
        "ann",
        "page",
        "10.0.0.1:8000/dp0",
        True,
    )
    assert request.order == placed
    assert [(r.replica, r.state, r.settled) for r in request.results.all()] == [
        ("here", "done", 1),
        ("there", "started", 0),
    ]


@pytest.mark.django_db
def test_an_order_is_in_the_audit_before_anything_came_of_it() -> None:
    history, placed = History("here"), order()
    history.record_order(placed)
    assert history.step()
    assert ResyncRequest.objects.get().order == placed


@pytest.mark.django_db
def test_outcome_alone_brings_its_order_along() -> None:
    history = History("here")
    history.record_outcome(outcome(order()))
    assert history.step()
    assert ResyncResult.objects.get().request.actor == "ann"


@pytest.mark.django_db
def test_failing_database_keeps_records_for_later(broken_database: Callable[[bool], None]) -> None:
    history = History("here")
    broken_database(True)
    for number in range(3):
        history.record_change(change(detail=str(number)))
    history.record_outcome(outcome(order()))
    assert not history.step()
    health = history.health()
    assert health.queued == 4
    assert health.error is not None
    assert "no route" in health.error
    broken_database(False)
    assert history.step()
    assert [row.detail for row in StreamStateChange.objects.order_by("id")] == ["0", "1", "2"]
    assert ResyncResult.objects.count() == 1
    assert history.health() == history_module.HistoryHealth(0, 0, 0, None)


@pytest.mark.django_db
def test_failing_database_is_logged_once_a_minute(
    broken_database: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    history = History("here", monotonic=clock)
    broken_database(True)
    history.record_change(change())
    for _ in range(30):
        history.step()
        clock.now += 1
    assert len([r for r in caplog.records if "database fails" in r.message]) == 1
    clock.now += 60
    history.step()
    assert len([r for r in caplog.records if "database fails" in r.message]) == 2


def test_full_queue_drops_and_counts_without_blocking() -> None:
    history = History("here", change_capacity=5, audit_capacity=5)
    for _ in range(8):
        history.record_change(change())
    history.record_order(order())
    assert history.health().queued == 6
    assert history.health().dropped == 3


@pytest.mark.django_db
def test_record_that_the_database_refuses_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = records.write_changes

    def picky(replica: str, changes: Any) -> None:
        if any(one.detail == "poison" for one in changes):
            raise ValueError("A string literal cannot contain NUL (0x00) characters.")
        write(replica, changes)

    monkeypatch.setattr(records, "write_changes", picky)
    history = History("here")
    for detail in ("a", "poison", "b"):
        history.record_change(change(detail=detail))
    assert history.step()
    assert [row.detail for row in StreamStateChange.objects.order_by("id")] == ["a", "b"]
    assert history.health().dropped == 1
    assert history.health().queued == 0


@pytest.mark.django_db
def test_outage_in_the_middle_of_single_writes_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = records.write_changes, []

    def moody(replica: str, changes: Any) -> None:
        calls.append(len(changes))
        if len(calls) == 1:
            raise ValueError("something in here is wrong")
        if len(calls) == 3:
            raise OperationalError("gone")
        write(replica, changes)

    monkeypatch.setattr(records, "write_changes", moody)
    history = History("here")
    for detail in "abcd":
        history.record_change(change(detail=detail))
    assert not history.step()
    assert history.step()
    assert sorted(row.detail for row in StreamStateChange.objects.all()) == ["a", "b", "c", "d"]


def test_flapping_stream_leaves_room_for_the_others_and_says_so() -> None:
    flaps = FlapFilter(per_minute=3)
    kept = [flaps.admit(change(1, at=NOW + n / 10)) for n in range(10)]
    assert [one is not None for one in kept] == [True] * 3 + [False] * 7
    assert kept[2] is not None
    assert "rest of this minute is not recorded" in kept[2].detail
    assert flaps.admit(change(2, at=NOW + 1)) == change(2, at=NOW + 1)
    assert flaps.admit(change(1, at=NOW + 60)) == change(1, at=NOW + 60)


@pytest.mark.django_db
def test_a_change_that_waits_for_the_database_counts_once_however_often_it_is_tried(
    broken_database: Callable[[bool], None],
) -> None:
    history = History("here")
    broken_database(True)
    for number in range(5):
        history.record_change(change(at=NOW + number))
    for _ in range(history_module.CHANGES_PER_MINUTE):
        assert not history.step()
    broken_database(False)
    assert history.step()
    assert StreamStateChange.objects.count() == 5
    assert history.health() == history_module.HistoryHealth(0, 0, 0, None)


@pytest.mark.django_db
def test_a_flapping_stream_does_not_fill_the_queue_and_is_counted() -> None:
    most = history_module.CHANGES_PER_MINUTE
    history = History("here", change_capacity=most)
    for number in range(3 * most):
        history.record_change(change(at=NOW + number / 1000))
    assert history.health() == history_module.HistoryHealth(most, 0, 2 * most, None)
    assert history.step()
    assert StreamStateChange.objects.count() == most


def test_chores_run_when_they_are_due_and_survive_their_own_mistakes() -> None:
    clock, runs = Clock(), []
    history = History("here", clock=Clock(5.0), monotonic=clock)

    def faulty(now: float) -> None:
        runs.append(now)
        raise RuntimeError("a mistake")

    history.add_chore("faulty", 10.0, faulty)
    for _ in range(3):
        assert history.step()
    assert runs == [5.0]
    clock.now += 10
    history.step()
    assert runs == [5.0, 5.0]


def test_chore_can_be_hurried() -> None:
    runs: list[str] = []
    history = History("here", monotonic=Clock())
    history.add_chore("slow", 3600.0, lambda now: runs.append("slow"))
    history.add_chore("other", 3600.0, lambda now: runs.append("other"))
    history.step()
    history.hurry("slow")
    history.step()
    assert runs == ["slow", "other", "slow"]


@pytest.mark.django_db
def test_pauses_grow_while_the_database_fails_and_begin_anew(
    broken_database: Callable[[bool], None],
) -> None:
    history, pauses = History("here"), []
    history.record_change(change())
    for broken in [True] * 7 + [False, True]:
        broken_database(broken)
        history.record_change(change())
        history.step()
        pauses.append(history._retry_in)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 0, 1]


@pytest.mark.django_db(transaction=True)
def test_a_quiet_thread_wakes_when_it_is_hurried_and_when_it_is_stopped() -> None:
    runs: list[float] = []
    history = History("here")
    history.add_chore("slow", 3600.0, runs.append)
    history.start()
    wait_until(lambda: len(runs) == 1)
    history.hurry("slow")
    wait_until(lambda: len(runs) == 2)
    history.stop(60)
    assert not history.running


@pytest.mark.django_db(transaction=True)
def test_new_records_do_not_hurry_the_next_try_and_a_stop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "RETRY_SECONDS", (600.0, 600.0))
    tries = []

    def fail(*_: object) -> None:
        tries.append(1)
        raise OperationalError("no route to the database")

    monkeypatch.setattr(records, "write_changes", fail)
    history = History("here")
    history.start()
    history.record_change(change())
    wait_until(lambda: history.health().error is not None)
    for _ in range(20):
        history.record_change(change())
        history.hurry("nothing")
    history.stop(60)
    assert not history.running
    assert len(tries) <= 3  # the first, one round that the stop cuts short, and the last


@pytest.mark.django_db(transaction=True)
def test_a_thread_tries_again_by_itself(
    broken_database: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "RETRY_SECONDS", (0.01, 0.02))
    broken_database(True)
    history = History("here")
    history.start()
    try:
        history.record_change(change())
        wait_until(lambda: history.health().error is not None)
        broken_database(False)
        wait_until(lambda: history.health() == history_module.HistoryHealth(0, 0, 0, None))
    finally:
        history.stop(60)
    assert StreamStateChange.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_thread_writes_and_stop_writes_what_is_left() -> None:
    history, said = History("here"), []
    history.add_chore("tick", 3600.0, lambda now: None)
    history.start()
    history.record_change(change(detail="first"))
    wait_until(lambda: history.health().queued == 0)
    history.record_change(change(detail="last"))
    history.stop(farewell=lambda: said.append(threading.current_thread().name))
    assert said == ["history"]
    assert not history.running
    assert {row.detail for row in StreamStateChange.objects.all()} == {"first", "last"}


# ---- rows


@pytest.mark.django_db
def test_streams_get_one_row_each_that_follows_their_endpoints() -> None:
    records.touch_streams([spec(1), spec(1, 1), spec(2)], NOW)
    moved = replace(spec(2), endpoint="tcp://10.9.9.9:1")
    records.touch_streams([spec(1), moved], NOW + 30)
    rows = {str(row): row for row in Stream.objects.all()}
    assert len(rows) == 3
    assert rows["10.0.0.2:8000/dp0"].endpoint == "tcp://10.9.9.9:1"
    assert rows["10.0.0.2:8000/dp0"].last_seen.timestamp() == NOW + 30
    assert rows["10.0.0.1:8000/dp0"].last_seen.timestamp() == NOW
    assert rows["10.0.0.1:8000/dp0"].first_seen.timestamp() == NOW


@pytest.mark.django_db
@pytest.mark.parametrize("number", [1, 100])
def test_unchanged_streams_cost_one_query(number: int) -> None:
    specs = [spec(n) for n in range(number)]
    records.touch_streams(specs, NOW)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        records.touch_streams(specs, NOW + 3)
    assert len(queries) == 1


@pytest.mark.django_db
def test_row_of_another_replica_that_was_faster_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream.objects, "all", Stream.objects.none)
    records.touch_streams([spec(1)], NOW)
    records.touch_streams([spec(1)], NOW)
    monkeypatch.undo()
    assert Stream.objects.count() == 1


@pytest.mark.django_db
def test_overlong_names_are_cut_rather_than_refused() -> None:
    long = StreamSpec("x" * 400, 0, "tcp://h:1", "tcp://h:2")
    records.touch_streams([long], NOW)
    records.touch_streams([long], NOW + 1)
    assert Stream.objects.get().instance_name == "x" * 255


@pytest.mark.django_db
def test_orders_are_open_until_this_replica_has_an_outcome_and_while_they_are_young() -> None:
    old, fresh = order(NOW - 3600), order(NOW - 10)
    ResyncRequest.record(old)
    row = ResyncRequest.record(fresh)
    assert records.latest_order_id() == row.pk
    assert records.open_orders("here", 0, NOW) == [fresh]
    assert records.open_orders("here", row.pk, NOW) == []
    records.write_outcome(outcome(fresh, "there"))
    assert records.open_orders("here", 0, NOW) == [fresh]
    records.write_outcome(outcome(fresh, "here"))
    assert records.open_orders("here", 0, NOW) == []


@pytest.mark.django_db
def test_replicas_are_rewritten_and_forgotten() -> None:
    records.write_replica(ReplicaView("here", NOW - 9, NOW, {"streams": {}}))
    records.write_replica(ReplicaView("here", NOW - 9, NOW + 3, {"streams": {"a": {}}}))
    assert records.read_replicas() == (ReplicaView("here", NOW - 9, NOW + 3, {"streams": {"a": {}}}),)
    records.forget_replica("here")
    assert records.read_replicas() == ()


@pytest.mark.django_db
def test_history_is_bounded_in_age_and_number() -> None:
    records.write_changes("here", [change(at=NOW - n * DAY) for n in range(10)])
    for n in range(6):
        ResyncRequest.record(order(NOW - (6 - n) * DAY))
    records.touch_streams([spec(1)], NOW - 40 * DAY)
    records.touch_streams([spec(2)], NOW)
    records.write_replica(ReplicaView("gone", NOW - 9 * DAY, NOW - 2 * DAY, {}))
    gone = records.prune(Retention(change_days=7, resync_rows=2), NOW)
    assert StreamStateChange.objects.count() == 8
    assert [row.at.timestamp() for row in ResyncRequest.objects.all()] == [NOW - DAY, NOW - 2 * DAY]
    assert [str(row) for row in Stream.objects.all()] == ["10.0.0.2:8000/dp0"]
    assert not Replica.objects.exists()
    assert gone == 2 + 4 + 1 + 1
    assert records.prune(Retention(change_days=7, resync_rows=2), NOW) == 0


def test_retention_is_what_the_variables_say() -> None:
    variables = {
        "KVPORTAL_HISTORY_RETENTION_DAYS": "0.5",
        "KVPORTAL_HISTORY_RETENTION_ROWS": "1000",
        "KVPORTAL_AUDIT_RETENTION_DAYS": "90",
        "KVPORTAL_AUDIT_RETENTION_ROWS": "500",
        "KVPORTAL_REPLICA_RETENTION_HOURS": "2",
        "KVPORTAL_DECISION_RETENTION_DAYS": "1",
        "KVPORTAL_DECISION_RETENTION_ROWS": "7",
    }
    config = load_config([], variables)
    assert parts.history_retention(config) == Retention(0.5, 1000, 90.0, 500, 0.5, 2.0)
    assert (parts.decision_retention(config).days, parts.decision_retention(config).rows) == (1.0, 7)


@pytest.mark.django_db
def test_pruning_an_order_takes_its_outcomes_along() -> None:
    records.write_outcome(outcome(order(NOW - 400 * DAY)))
    records.prune(Retention(), NOW)
    assert not ResyncResult.objects.exists()


@pytest.mark.django_db
def test_a_database_answers_again_only_once_it_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    clock, failing = Clock(), [True]

    def chore(_now: float) -> None:
        if failing[0]:
            raise OperationalError("file is not a database")
        records.read_replicas()

    history = History("here", clock=clock, monotonic=clock)
    history.add_chore("replica", 3.0, chore)
    history.add_chore("needs no database", 0.5, lambda now: None)
    with caplog.at_level("INFO", "kvportal.history"):
        history.step()
        for _ in range(5):
            clock.now += 0.5
            history.step()
        clock.now += 1.0
        history.step()
        assert history.health().error is not None
        assert "answers again" not in caplog.text
        failing[0] = False
        clock.now += 3.0
        history.step()
    assert history.health().error is None
    assert caplog.text.count("answers again") == 1


@pytest.mark.django_db(transaction=True)
def test_a_database_that_says_nothing_counts_as_failing() -> None:
    clock, asked, answers = Clock(0.0), threading.Event(), threading.Event()

    def chore(_now: float) -> None:
        asked.set()
        assert answers.wait(60)

    history = History("here", monotonic=clock)
    history.add_chore("replica", 3.0, chore)
    history.start()
    try:
        assert asked.wait(60)
        clock.now += history_module.SILENT_SECONDS
        assert history.health().error is None
        clock.now += 1
        assert history.health().error == "no answer for more than 10 s"
    finally:
        answers.set()
        history.stop(60)
    clock.now += 3600
    assert history.health().error is None

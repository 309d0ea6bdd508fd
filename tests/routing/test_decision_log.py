"""The decision log: what it remembers, and that writing never gets in the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

import routing.decision_log as module
from routing.decision_log import DecisionLog, Entry, Feedback, RefusedError, Written
from routing.policies import car
from routing.records import BEST, Selection
from tests.routing.builders import instance, match, situation
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.005)
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01, 0.02))


class MemorySink:
    """Keeps what it is given, nothing twice; fails or blocks on demand."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.batches: list[int] = []
        self.failure: Exception | None = None
        self.fail_once_at: str | None = None
        self.bad: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.prunes = 0
        self.prune_gate = threading.Event()
        self.prune_gate.set()
        self.closed = False

    def write(self, entries: Sequence[Entry]) -> None:
        self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        names = {entry.record.request_id for entry in entries if isinstance(entry, Written)}
        if names & self.bad or names & set(self.requests()):
            raise RefusedError("bad value")
        if self.fail_once_at in names:
            self.fail_once_at = None
            raise RuntimeError("away for a moment")
        self.entries += entries
        self.batches.append(len(entries))

    def prune(self, now: float) -> None:
        self.prunes += 1
        self.prune_gate.wait(10)

    def close(self) -> None:
        self.closed = True

    def requests(self) -> list[str]:
        return [entry.record.request_id for entry in self.entries if isinstance(entry, Written)]


VIEWS = [instance(f"10.0.0.{number}:8000", order=number, waiting=number) for number in range(128)]
DECISION = car.decide(situation(*VIEWS, hits=[match(view.name, device=512) for view in VIEWS]))


def selection(name: str) -> Selection:
    return Selection(f"decision-{name}", name, 1.7e9, DECISION, 512, 0.001)


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


def started(sink: MemorySink, **options: Any) -> DecisionLog:
    log = DecisionLog(sink, **options)
    log.start()
    return log


def test_latest_decisions_are_in_memory_newest_first():
    log = DecisionLog(remembered=3)
    for name in "abcde":
        log.record(selection(name))
    assert [record.request_id for record in log.recent()] == ["e", "d", "c"]
    assert [record.request_id for record in log.recent(1)] == ["e"]
    assert log.recent(0) == ()
    assert log.find("decision-a") is None
    found = log.find("decision-e")
    assert found is not None
    assert found.prefill is not None
    assert found.prefill["kv_hit_ratio"] == 0.5


def test_a_thousand_are_remembered_by_default():
    log = DecisionLog()
    for number in range(1010):
        log.record(selection(str(number)))
    assert len(log.recent(2000)) == 1000


@pytest.mark.parametrize(("share", "full"), [(0.0, 0), (0.05, 5), (0.5, 50), (1.0, 100)])
def test_a_share_of_decisions_keeps_the_full_explanation(share, full):
    log = DecisionLog(explain_share=share)
    for number in range(100):
        log.record(selection(str(number)))
    records = log.recent()
    assert sum(record.full for record in records) == full
    for record in records:
        assert len(record.explanation["candidates"]) == (128 if record.full else BEST)
        assert record.explanation["candidates_num"]["prefill"] == 128


def test_short_records_are_small():
    log = DecisionLog(explain_share=0.0)
    log.record(selection("a"))
    assert len(orjson.dumps(dict(log.recent()[0].explanation))) < 4000


def test_feedback_completes_the_decision_in_memory():
    log = DecisionLog()
    log.record(selection("a"))
    log.feedback("decision-a", 384)
    log.feedback("decision-unknown", 1)
    assert [record.cached_tokens for record in log.recent()] == [384]


def test_everything_reaches_the_sink_in_order_and_in_batches(sink):
    log = started(sink)
    for number in range(1200):
        log.record(selection(str(number)))
    log.feedback("decision-7", 1)
    wait_until(lambda: len(sink.entries) == 1201)
    log.stop()
    assert sink.requests() == [str(number) for number in range(1200)]
    assert sink.entries[-1] == Feedback("decision-7", 1)
    assert max(sink.batches) <= module.BATCH
    assert sink.closed
    assert log.health() == module.LogHealth(0, 1201, 0, None)


def test_stop_writes_what_is_queued(sink):
    log = started(sink)
    log.record(selection("last"))
    log.stop()
    assert sink.requests() == ["last"]


def test_stop_writes_what_came_while_the_sink_was_pruning(sink):
    sink.prune_gate.clear()
    log = started(sink)
    log.record(selection("first"))
    wait_until(lambda: sink.prunes)
    log.record(selection("late"))
    stopping = threading.Thread(target=log.stop, args=(10.0,))
    stopping.start()
    wait_until(log._stopping.is_set)
    sink.prune_gate.set()
    stopping.join(10)
    assert sink.requests() == ["first", "late"]
    assert log.health() == module.LogHealth(0, 2, 0, None)


def test_without_a_sink_nothing_is_queued_or_dropped():
    log = DecisionLog(queued=1)
    log.start()
    for name in "abc":
        log.record(selection(name))
    log.stop()
    assert log.health() == module.LogHealth(0, 0, 0, None)


def test_a_blocked_sink_delays_nobody_and_what_does_not_fit_is_counted(sink):
    sink.gate.clear()
    log = started(sink, queued=10)
    for number in range(25):
        log.record(selection(str(number)))
    log.feedback("decision-1", 5)
    health = log.health()
    assert (health.queued, health.dropped) == (10, 16)
    assert len(log.recent()) == 25
    sink.gate.set()
    wait_until(lambda: log.health().queued == 0)
    log.stop()
    assert sink.requests() == [str(number) for number in range(10)]


def test_a_failing_sink_gets_everything_once_it_works_again(sink, caplog):
    sink.failure = RuntimeError("database is locked")
    log = started(sink)
    log.record(selection("a"))
    wait_until(lambda: log.health().error is not None)
    assert log.health().error == "RuntimeError: database is locked"
    log.record(selection("b"))
    sink.failure = None
    wait_until(lambda: log.health().queued == 0)
    log.stop()
    assert sink.requests() == ["a", "b"]
    assert log.health().error is None
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


def test_what_the_sink_refuses_does_not_hold_up_the_rest(sink):
    sink.bad = {"b"}
    log = started(sink)
    for name in "abc":
        log.record(selection(name))
    wait_until(lambda: log.health().queued == 0)
    log.stop()
    assert sink.requests() == ["a", "c"]
    assert log.health() == module.LogHealth(0, 2, 1, None)


def test_what_was_settled_before_a_failure_is_not_offered_again(sink):
    sink.bad, sink.fail_once_at = {"b"}, "c"
    log = DecisionLog(sink)
    for name in "abcd":
        log.record(selection(name))
    log.start()
    wait_until(lambda: log.health().queued == 0)
    log.stop()
    assert sink.requests() == ["a", "c", "d"]
    assert log.health() == module.LogHealth(0, 3, 1, None)


def test_what_is_left_at_the_end_is_counted_as_dropped(sink):
    sink.failure = RuntimeError("gone")
    log = started(sink)
    log.record(selection("a"))
    log.stop()
    assert log.health().dropped == 1


def test_a_decision_that_cannot_be_recorded_fails_nobody(sink, caplog):
    log = DecisionLog(sink)
    log.record(replace(selection("a"), decision=None))  # type: ignore[arg-type]
    assert log.health().dropped == 1
    assert "could not be recorded" in caplog.text


def test_old_rows_are_pruned(sink):
    log = started(sink)
    log.record(selection("a"))
    wait_until(lambda: sink.prunes > 0)
    log.stop()


def test_prompts_are_kept_only_when_asked_for_and_only_for_the_sample(sink):
    quiet = started(sink, explain_share=1.0)
    quiet.record(selection("a"), b"1234")
    quiet.stop()
    recording = started(sink, explain_share=0.5, record_prompts=True)
    for name in "bcde":
        recording.record(selection(name), b"1234")
    recording.stop()
    prompts = [entry.prompt for entry in sink.entries if isinstance(entry, Written)]
    assert prompts == [None, None, b"1234", None, b"1234"]


def test_prompts_waiting_to_be_written_are_bounded(sink, monkeypatch):
    monkeypatch.setattr(module, "PROMPT_BYTES", 10)
    log = DecisionLog(sink, explain_share=1.0, record_prompts=True)
    for name in "abc":
        log.record(selection(name), b"1234")
    log.start()
    log.stop()
    prompts = [entry.prompt for entry in sink.entries if isinstance(entry, Written)]
    assert prompts == [b"1234", b"1234", None]

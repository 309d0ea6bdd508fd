"""The life of a stream, as values: no sockets, no views, no waiting."""

from __future__ import annotations

import random

import pytest

from streams.core.lifecycle import (
    FIRST_RETRY,
    GRACE,
    LAST_RETRY,
    LASTING,
    SOON,
    STRIKES,
    Fetch,
    Lifecycle,
    Timing,
)
from streams.status import Fault, StreamState

BAD = Fault("decode_error", "bad bytes")
TIMING = Timing(replay_timeout=2.0, resync_interval=30.0)


def fresh(seed: int = 1) -> Lifecycle:
    life = Lifecycle(TIMING, random.Random(seed))
    life.start(0.0)
    return life


def connected(now: float = 1.0) -> Lifecycle:
    life = fresh()
    life.live_up(now)
    return life


def synchronized(now: float = 1.0, watermark: int = 5) -> Lifecycle:
    life = connected(now)
    assert life.accept(watermark, now)
    life.published(now)
    return life


def test_the_first_snapshot_is_requested_once_the_live_channel_is_up() -> None:
    life = fresh()
    assert (life.state, life.live, life.fetch) == (StreamState.CONNECTING, 1, None)
    life.tick(5.0)
    assert life.fetch is None
    life.live_up(5.0)
    assert life.state is StreamState.SYNCING
    assert life.fetch is not None
    assert (life.fetch.reason, life.fetch.deadline) == ("start", 7.0)


def test_a_snapshot_makes_the_stream_synchronized_and_ends_the_request() -> None:
    life = synchronized()
    assert (life.state, life.serving, life.fetch, life.error) == (StreamState.SYNCHRONIZED, True, None, None)


def test_a_snapshot_that_does_not_come_in_time_is_tried_again() -> None:
    life = connected(1.0)
    life.tick(2.999)
    assert life.fetch is not None
    life.tick(3.0)
    assert (life.fetch, life.state) == (None, StreamState.UNSYNCHRONIZED)
    assert life.error is not None
    assert life.error.code == "snapshot_timeout"
    retry = life.next_deadline()
    assert retry is not None
    assert 3.0 < retry <= 3.0 + FIRST_RETRY
    life.tick(retry)
    assert life.fetch is not None
    assert (life.fetch.number, life.fetch.reason) == (2, "snapshot_timeout")


def test_decoding_a_complete_snapshot_is_not_timed_out() -> None:
    life = connected(1.0)
    life.accept(5, 2.9)
    life.tick(100.0)
    assert life.fetch is not None
    assert life.next_deadline() is None


def test_retries_back_off_up_to_a_bound_and_stay_jittered() -> None:
    life = connected(1.0)
    waits = []
    now = 1.0
    for _ in range(12):
        life.fail(BAD, now)
        due = life.next_deadline()
        assert due is not None
        waits.append(due - now)
        now = due
        life.tick(now)
    assert waits[0] <= FIRST_RETRY
    assert all(wait <= LAST_RETRY for wait in waits)
    assert min(waits[-4:]) >= LAST_RETRY / 2
    assert len(set(waits[-4:])) == 4


@pytest.mark.parametrize(("lasted", "reset"), [(LASTING + 0.1, True), (LASTING - 0.1, False)])
def test_only_a_success_that_lasted_resets_the_backoff(lasted: float, reset: bool) -> None:
    life = connected(1.0)
    for _ in range(6):
        life.fail(BAD, 1.0)
    life.tick(10.0)
    life.accept(1, 10.0)
    life.published(10.0)
    life.fail(BAD, 10.0 + lasted)
    due = life.next_deadline()
    assert due is not None
    assert (due - (10.0 + lasted) <= FIRST_RETRY) is reset


@pytest.mark.parametrize("live_caused", [False, True])
def test_what_goes_wrong_while_a_retry_is_due_does_not_put_it_off(live_caused: bool) -> None:
    life = connected(1.0)
    life.fail(BAD, 1.0)
    due = life.next_deadline()
    for number in range(100):
        life.fail(Fault("sequence_regressed", "again"), 1.0 + number / 1000, live_caused=live_caused)
    assert life.next_deadline() == due
    assert life.error == Fault("sequence_regressed", "again")


def test_a_crash_ends_service_and_the_connection() -> None:
    life = synchronized(1.0)
    life.crashed(Fault("internal_error", "a fault of ours"), 2.0)
    assert (life.serving, life.live, life.same_life) == (False, None, False)
    due = life.next_deadline()
    assert due is not None
    assert due - 2.0 <= FIRST_RETRY
    life.tick(due)
    assert (life.live, life.state) == (2, StreamState.CONNECTING)


def test_any_fault_of_the_view_ends_service_at_once() -> None:
    life = synchronized()
    life.fail(BAD, 2.0)
    assert (life.serving, life.state, life.error) == (False, StreamState.UNSYNCHRONIZED, BAD)


def test_a_failed_calibration_only_warns() -> None:
    life = synchronized(1.0)
    due = life.next_deadline()
    assert due is not None
    assert 27.0 <= due - 1.0 <= 30.0
    life.tick(due)
    assert life.fetch is not None
    assert life.fetch.reason == "calibration"
    life.tick(due + 2.0)
    assert (life.serving, life.state, life.error) == (True, StreamState.SYNCHRONIZED, None)
    assert life.warning is not None
    assert life.warning.code == "snapshot_timeout"
    again = life.next_deadline()
    assert again is not None
    assert again - (due + 2.0) <= FIRST_RETRY
    life.tick(again)
    life.accept(9, again)
    life.published(again)
    assert life.warning is None


def test_a_lost_connection_ends_service_and_the_life_of_the_engine() -> None:
    life = synchronized()
    assert life.same_life
    life.live_down(Fault("disconnected", "gone"), 2.0)
    assert (life.serving, life.same_life, life.state) == (False, False, StreamState.CONNECTING)
    assert life.live == 2
    life.live_up(3.0)
    assert life.fetch is not None
    assert life.fetch.floor is None
    assert life.error == Fault("disconnected", "gone")


def test_refused_connections_show_their_reason_and_change_nothing_else() -> None:
    life = fresh()
    life.live_down(Fault("connect_failed", "refused"), 1.0)
    assert (life.live, life.state, life.error) == (
        1,
        StreamState.CONNECTING,
        Fault("connect_failed", "refused"),
    )


def test_an_unreachable_engine_is_tried_from_the_start_with_backoff() -> None:
    life = fresh()
    now, waits = 1.0, []
    for attempt in range(1, 10):
        assert life.live == attempt
        life.unreachable(Fault("resolve_failed", "no such name"), now)
        life.unreachable(Fault("resolve_failed", "no such name"), now)
        assert (life.live, life.state) == (None, StreamState.CONNECTING)
        due = life.next_deadline()
        assert due is not None
        waits.append(due - now)
        now = due
        life.tick(now)
    assert waits[0] <= FIRST_RETRY
    assert LAST_RETRY / 2 <= waits[-1] <= LAST_RETRY


def test_a_refusal_is_the_reason_only_until_the_connection_is_made() -> None:
    life = synchronized()
    life.live_down(Fault("disconnected", "gone"), 2.0)
    life.unreachable(Fault("resolve_failed", "no such name"), 2.1)
    assert life.error == Fault("resolve_failed", "no such name")
    life.tick(8.0)
    life.live_up(8.0)
    assert life.error == Fault("disconnected", "gone")


@pytest.mark.parametrize(("watermark", "accepted"), [(6, False), (7, True), (8, True)])
def test_a_snapshot_below_what_was_received_before_it_is_of_another_life(
    watermark: int, accepted: bool
) -> None:
    life = synchronized()
    life.receive(7)
    life.resync("operator", 2.0)
    assert life.accept(watermark, 2.0) is accepted
    assert life.serving is accepted
    if not accepted:
        assert life.error is not None
        assert life.error.code == "snapshot_stale"
        assert not life.same_life
        retry = life.next_deadline()
        assert retry is not None
        life.tick(retry)
        assert life.accept(watermark, 3.0)


@pytest.mark.parametrize(
    ("sequences", "forward"), [([3, 4], True), ([3, 9], True), ([3, 3], False), ([3, 2], False)]
)
def test_sequences_must_grow(sequences: list[int], forward: bool) -> None:
    life = connected()
    assert [life.receive(sequence) for sequence in sequences][-1] is forward


def test_after_a_few_bad_messages_in_a_row_the_live_channel_is_closed_while_waiting() -> None:
    life = connected()
    for strike in range(STRIKES):
        assert life.live == 1, strike
        life.fail(BAD, 2.0, live_caused=True)
    assert life.live is None
    due = life.next_deadline()
    assert due is not None
    life.tick(due)
    assert (life.live, life.state) == (2, StreamState.CONNECTING)


def test_other_faults_do_not_close_the_live_channel() -> None:
    life = connected()
    for _ in range(10):
        life.fail(BAD, 2.0)
    assert life.live == 1


def test_an_unknown_block_soon_after_a_snapshot_brings_one_calibration_forward() -> None:
    life = synchronized(1.0)
    assert life.is_orphan(42, 1.0 + GRACE)
    due = life.next_deadline()
    assert due is not None
    assert due <= 1.0 + GRACE + SOON
    life.tick(due)
    assert life.fetch is not None
    assert life.fetch.reason == "unknown_block"


def test_an_unknown_block_later_means_recovery_but_the_same_one_only_once() -> None:
    life = synchronized(1.0)
    late = 1.0 + GRACE + 0.1
    assert not life.is_orphan(42, late)
    assert life.is_orphan(42, late)
    assert not life.is_orphan(43, late)


def test_an_unknown_block_in_a_view_being_built_is_no_reason_to_start_over() -> None:
    life = connected(1.0)
    life.accept(5, 100.0)
    assert life.is_orphan(42, 100.0, fresh=True)
    life.published(100.0)
    due = life.next_deadline()
    assert due is not None
    assert due <= 100.0 + SOON


def test_a_resync_fetches_at_once_and_keeps_serving() -> None:
    life = synchronized(1.0)
    life.resync("alice", 2.0)
    assert life.serving
    assert life.fetch is not None
    assert life.fetch.reason == "alice"


def test_a_resync_with_drop_stops_serving_first() -> None:
    life = synchronized(1.0)
    life.resync("alice", 2.0, drop=True)
    assert (life.serving, life.state) == (False, StreamState.SYNCING)
    assert life.error is not None
    assert life.error.code == "resync_forced"


def fetched_soon(life: Lifecycle, now: float) -> Fetch:
    """The fetch that begins within SOON, by a clock that is turned to when it is due."""
    due = life.next_deadline()
    assert due is not None
    assert due <= now + SOON
    life.tick(due)
    assert life.fetch is not None
    return life.fetch


def test_resyncs_during_a_fetch_come_to_one_more() -> None:
    life = synchronized(1.0)
    for _ in range(1000):
        life.resync("alice", 2.0)
    assert life.fetch is not None
    assert life.fetch.number == 2
    life.accept(6, 2.5)
    life.published(2.5)
    fetch = fetched_soon(life, 2.5)
    assert (fetch.number, fetch.reason) == (3, "alice")


def test_a_resync_is_not_forgotten_when_the_snapshot_before_it_is_overtaken() -> None:
    life = synchronized(1.0)
    life.resync("alice", 2.0)
    life.resync("bob", 2.0)
    life.redefined(2.5)
    assert fetched_soon(life, 2.5).reason == "bob"


def test_a_resync_cuts_the_backoff_short() -> None:
    life = connected(1.0)
    for _ in range(8):
        life.fail(BAD, 1.0)
    life.resync("alice", 1.1)
    assert life.fetch is not None


def test_a_full_state_on_the_live_channel_restores_the_stream() -> None:
    life = connected(1.0)
    life.fail(BAD, 1.5)
    life.redefined(2.0)
    assert (life.state, life.serving, life.error, life.fetch) == (StreamState.SYNCHRONIZED, True, None, None)


def test_an_idle_stream_waits_for_its_calibration_alone() -> None:
    life = synchronized(1.0)
    due = life.next_deadline()
    life.tick(20.0)
    assert life.next_deadline() == due
    assert life.state is StreamState.SYNCHRONIZED

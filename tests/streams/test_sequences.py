"""Sequence numbers: gaps, restarts, and how a snapshot meets the live messages around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from streams.core.query import match_prefix
from streams.simulator import SimulatedEngine
from streams.simulator.messages import all_blocks_cleared
from streams.spec import Limits
from streams.status import StreamState
from tests.streams.driven import Driven
from tests.streams.harness import SIZE, Portal, copy, remove, store
from tests.streams.puppet import Puppet, Request, synchronize


def request_with_live_messages(portal: Portal, puppet: Puppet, *messages: tuple[int, dict]) -> Request:
    """The first snapshot request, with these live messages received before its answer."""
    portal.follow(puppet.spec)
    puppet.wait_subscribed()
    request = puppet.request()
    for sequence, event in messages:
        puppet.publish(sequence, event)
    portal.wait_counter(puppet.spec, "messages", len(messages))
    return request


def test_a_gap_stops_serving_until_the_next_snapshot(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(1, store(2, parent=1))
    puppet.publish(4, store(3, parent=2))
    request = puppet.request()
    status = portal.status(puppet.spec)
    assert status.state is not StreamState.SYNCHRONIZED
    assert status.error.code == "sequence_gap"
    assert status.sequence is None
    assert portal.holds(puppet.spec, 1, 2) == (0, 0)
    assert portal.match(puppet.spec, []).error.code == "sequence_gap"
    request.answer(4, store(1), store(3, parent=1))
    portal.wait_sequence(puppet.spec, 4)
    assert portal.holds(puppet.spec, 1, 3) == (2, 0)
    assert portal.holds(puppet.spec, 1, 2) == (1, 0)
    assert portal.losses(puppet.spec) == ["sequence_gap"]
    assert portal.counter(puppet.spec, "gaps") == 1
    assert portal.resyncs(puppet.spec) == {"start": 1, "sequence_gap": 1}


def test_after_every_gap_the_engines_truth_is_served_again(
    portal: Portal, make_engine: Callable[..., SimulatedEngine]
) -> None:
    engine = make_engine(seed=1, device_blocks=60, host_blocks=30)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    for lost in (1, 2, 50):
        engine.step(5)
        engine.lose_messages(lost)
        engine.step()
        sequence = engine.ranks[0].publisher.last_sequence
        portal.wait_sequence(engine.spec(), sequence)
        portal.wait_equals(engine.spec(), engine.truth)
    assert set(portal.losses(engine.spec())) == {"sequence_gap"}
    assert portal.counter(engine.spec(), "gaps") == 3


@pytest.mark.parametrize("sequence", [5, 3, 0])
def test_a_sequence_at_or_below_the_last_received_one_means_a_restart(
    portal: Portal, puppet: Puppet, sequence: int
) -> None:
    synchronize(portal, puppet, store(1), watermark=2)
    for received in (3, 4, 5):
        puppet.publish(received, store(received))
    portal.wait_sequence(puppet.spec, 5)
    puppet.publish(sequence, store(8))
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (0, 0)
    request.answer(sequence, store(8))
    portal.wait_sequence(puppet.spec, sequence)
    puppet.publish(sequence + 1, store(9, parent=8))
    portal.wait_holds(puppet.spec, (8, 9), (2, 0))
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.status(puppet.spec).mapped_blocks == 2, "the old process's blocks are forgotten"
    assert portal.losses(puppet.spec) == ["sequence_regressed"]


@pytest.mark.parametrize("watermark", [7, 8], ids=["last contained", "next to come"])
def test_the_first_message_after_a_snapshot_may_be_w_or_w_plus_1(
    portal: Portal, puppet: Puppet, watermark: int
) -> None:
    """The snapshot holds everything up to message 7, whichever way the engine counts."""
    synchronize(portal, puppet, store(1), watermark=watermark)
    puppet.publish(8, store(2, parent=1))
    puppet.publish(9, store(3, parent=2), remove(1))
    portal.wait_sequence(puppet.spec, 9)
    assert portal.status(puppet.spec).device_blocks == 2
    puppet.publish(10, store(1))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))
    assert portal.losses(puppet.spec) == []


def test_an_engine_that_has_published_nothing_starts_with_message_0(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, watermark=0)
    puppet.publish(0, store(1))
    puppet.publish(1, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.losses(puppet.spec) == []


def test_messages_contained_in_the_snapshot_are_dropped_and_later_ones_merged(
    portal: Portal, puppet: Puppet
) -> None:
    request = request_with_live_messages(
        portal,
        puppet,
        (3, store(7)),  # below the watermark, and undone since: must not come back
        (4, remove(7)),
        (5, store(1, 2)),  # equal to the watermark
        (6, remove(2)),
        (7, store(3, parent=1)),
    )
    request.answer(5, store(1, 2))
    portal.wait_sequence(puppet.spec, 7)
    assert portal.holds(puppet.spec, 1, 3) == (2, 0)
    assert portal.holds(puppet.spec, 1, 2) == (1, 0)
    assert portal.holds(puppet.spec, 7) == (0, 0)
    assert portal.losses(puppet.spec) == []
    assert portal.resyncs(puppet.spec) == {"start": 1}


def test_a_removal_is_not_undone_by_a_snapshot_that_still_has_the_block(
    portal: Portal, puppet: Puppet
) -> None:
    request = request_with_live_messages(portal, puppet, (6, remove(2)), (7, remove(3)))
    request.answer(5, store(1, 2), store(3, parent=1))
    portal.wait_sequence(puppet.spec, 7)
    assert portal.holds(puppet.spec, 1, 2) == (1, 0)
    assert portal.holds(puppet.spec, 1, 3) == (1, 0)


def test_messages_below_the_watermark_that_arrive_after_the_snapshot_are_dropped(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1), watermark=20)
    for sequence in (17, 18, 19):
        puppet.publish(sequence, store(sequence))
    puppet.publish(20, store(20))
    puppet.publish(21, store(21))
    portal.wait_sequence(puppet.spec, 21)
    assert [portal.holds(puppet.spec, block) for block in (1, 17, 18, 19, 20, 21)] == [
        (1, 0),
        (0, 0),
        (0, 0),
        (0, 0),
        (1, 0),
        (1, 0),
    ]
    assert portal.losses(puppet.spec) == []


def test_late_messages_below_the_watermark_are_not_even_decoded(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), watermark=20)
    puppet.payload(18, b"\xc1 rubbish")
    puppet.publish(21, store(2))
    portal.wait_sequence(puppet.spec, 21)
    assert portal.losses(puppet.spec) == []


def test_below_the_watermark_later_than_the_replay_timeout_means_a_restart(driven: Driven) -> None:
    driven.synchronize(20, store(1))
    driven.advance(1.9)
    driven.live(5, store(5))
    assert driven.serving
    driven.advance(0.2)
    driven.live(6, store(6))
    assert not driven.serving
    assert driven.losses == ["sequence_regressed"]


def test_a_repeat_among_late_messages_means_a_restart(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), watermark=20)
    puppet.publish(17, store(2))
    puppet.publish(16, store(3))
    request = puppet.request()
    assert portal.losses(puppet.spec) == ["sequence_regressed"]
    assert portal.holds(puppet.spec, 1) == (0, 0)
    request.answer(16, store(3))
    portal.wait_sequence(puppet.spec, 16)


def test_a_hole_that_the_snapshot_covers_is_none(portal: Portal, puppet: Puppet) -> None:
    request = request_with_live_messages(portal, puppet, (3, store(3)), (6, store(6)), (7, store(7)))
    request.answer(6, store(1))
    portal.wait_sequence(puppet.spec, 7)
    assert portal.holds(puppet.spec, 7) == (1, 0)
    assert portal.losses(puppet.spec) == []
    assert portal.resyncs(puppet.spec) == {"start": 1}


def test_a_hole_that_the_snapshot_does_not_cover_is_a_gap(portal: Portal, puppet: Puppet) -> None:
    request = request_with_live_messages(portal, puppet, (3, store(3)), (7, store(7)))
    request.answer(4, store(1))
    portal.wait_error(puppet.spec, "sequence_gap")
    assert portal.holds(puppet.spec, 1) == (0, 0)
    puppet.request().answer(7, store(1), store(7))
    portal.wait_sequence(puppet.spec, 7)
    assert not any(change.detail.startswith("snapshot at watermark 4") for change in portal.changes)


def test_a_hole_between_the_snapshot_and_the_first_live_message_is_a_gap(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1), watermark=4)
    puppet.publish(6, store(2))
    request = puppet.request()
    assert portal.losses(puppet.spec) == ["sequence_gap"]
    request.answer(6, store(2))
    portal.wait_sequence(puppet.spec, 6)


def test_a_snapshot_older_than_the_live_run_means_a_restart(portal: Portal, puppet: Puppet) -> None:
    """Also while the stream serves: the engine that answers is not the one that was followed."""
    synchronize(portal, puppet, store(1), watermark=4)
    puppet.publish(5, store(2))
    portal.wait_sequence(puppet.spec, 5)
    portal.directory.resync()
    puppet.request().answer(3, store(7))
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.losses(puppet.spec) == ["snapshot_stale"]
    request.answer(3, store(7))
    portal.wait_sequence(puppet.spec, 3)
    assert portal.holds(puppet.spec, 7) == (1, 0)
    assert portal.holds(puppet.spec, 1) == (0, 0)


def test_a_snapshot_older_than_the_snapshot_in_service_means_a_restart(
    portal: Portal, puppet: Puppet
) -> None:
    """No live message has come since the first snapshot, but sequences do not go back in one life."""
    synchronize(portal, puppet, store(1, 2), watermark=40)
    portal.directory.resync()
    puppet.request().answer(3, store(7))
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.losses(puppet.spec) == ["snapshot_stale"]
    request.answer(3, store(7))
    portal.wait_sequence(puppet.spec, 3)
    # Nothing that the old process said is believed of the new one.
    assert portal.status(puppet.spec).mapped_blocks == 1


def test_a_stale_answer_during_recovery_is_not_served(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), watermark=4)
    puppet.publish(8, store(2))
    puppet.request().answer(7, store(1))
    assert "7" in portal.wait_error(puppet.spec, "snapshot_stale")
    puppet.request().answer(8, store(2))
    portal.wait_sequence(puppet.spec, 8)
    assert portal.holds(puppet.spec, 1) == (0, 0)


def test_in_message_w_unknown_blocks_are_orphans(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), watermark=6)
    puppet.publish(6, store(3, parent=99), copy(98))
    puppet.publish(7, store(2, parent=1))
    portal.wait_sequence(puppet.spec, 7)
    assert not puppet.asked(1.5), "message W brought a calibration forward"
    assert portal.losses(puppet.spec) == []


@pytest.mark.parametrize("parts", [2, 5])
def test_a_snapshot_in_several_parts_is_one_snapshot(portal: Portal, puppet: Puppet, parts: int) -> None:
    request = request_with_live_messages(portal, puppet, (8, store(20, parent=parts)))
    for part in range(parts):
        request.part(7, store(part + 1, parent=part or None))
        assert portal.holds(puppet.spec, 1) == (0, 0)
    request.end()
    portal.wait_sequence(puppet.spec, 8)
    assert portal.holds(puppet.spec, *range(1, parts + 1), 20) == (parts + 1, 0)


def test_a_simulated_engine_may_spread_its_snapshot(
    portal: Portal, make_engine: Callable[..., SimulatedEngine]
) -> None:
    engine = make_engine(seed=11, device_blocks=100, host_blocks=50, snapshot_parts=7)
    engine.step(100)
    portal.follow_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)


def test_a_full_state_on_the_live_channel_restores_an_unsynchronized_stream(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(5, store(2))
    request = puppet.request()
    puppet.publish(6, store(9), all_blocks_cleared(), store(3, 4), store(6, parent=98), copy(97))
    portal.wait_sequence(puppet.spec, 6)
    assert portal.holds(puppet.spec, 3, 4) == (2, 0)
    assert portal.holds(puppet.spec, 9) == (0, 0)
    request.answer(5, store(1, 2))  # older than the state that was defined since
    puppet.publish(7, store(5, parent=4))
    portal.wait_sequence(puppet.spec, 7)
    assert portal.holds(puppet.spec, 3, 4, 5) == (3, 0)
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.losses(puppet.spec) == ["sequence_gap"]


def test_a_full_state_on_the_live_channel_replaces_a_calibration_under_way(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1))
    portal.directory.resync()
    request = puppet.request()
    puppet.publish(1, all_blocks_cleared(), store(2))
    portal.wait_holds(puppet.spec, (2,), (1, 0))
    request.answer(0, store(1))
    puppet.publish(2, store(3, parent=2))
    portal.wait_sequence(puppet.spec, 2)
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.holds(puppet.spec, 2, 3) == (2, 0)
    assert portal.losses(puppet.spec) == []


def test_a_full_state_after_a_gap_is_served_and_the_gap_counted(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(9, all_blocks_cleared(), store(2))
    portal.wait_sequence(puppet.spec, 9)
    assert portal.holds(puppet.spec, 2) == (1, 0)
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.counter(puppet.spec, "gaps") == 1


def test_a_full_state_from_a_restarted_engine_is_served_at_once(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), watermark=50)
    puppet.publish(51, store(2, parent=1))
    portal.wait_sequence(puppet.spec, 51)
    puppet.publish(0, all_blocks_cleared(), store(3))
    portal.wait_sequence(puppet.spec, 0)
    puppet.publish(1, store(4, parent=3))
    portal.wait_holds(puppet.spec, (3, 4), (2, 0))
    status = portal.status(puppet.spec)
    assert status.mapped_blocks == 2


def test_the_largest_sequences_are_ordinary(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), watermark=2**64 - 4)
    puppet.publish(2**64 - 3, store(2, parent=1))
    puppet.publish(2**64 - 2, store(3, parent=2))
    portal.wait_sequence(puppet.spec, 2**64 - 2)
    assert portal.holds(puppet.spec, 1, 2, 3) == (3, 0)


# -- what a sequence in an answer promises


class WatchedGate:
    """The ingest gate; between two of its holds, when queries have their turn, `look` is called."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __enter__(self) -> None:
        self._look()

    def __exit__(self, *exc: object) -> None:
        self._look()


def test_a_sequence_is_told_only_when_the_whole_message_can_be_found(driven: Driven) -> None:
    """A large message is applied in many holds of the gate; its sequence is told after the last."""
    driven.synchronize(20, store(1))
    blocks = range(2, 302)
    seen: list[tuple[int | None, int]] = []

    def look() -> None:
        match = driven.match(1, *blocks)
        assert driven.follower.status().sequence == match.sequence
        seen.append((match.sequence, match.device_hit_tokens // SIZE))

    driven.index.gate = WatchedGate(look)  # type: ignore[assignment]
    driven.live(21, *(store(block, parent=block - 1) for block in blocks))
    look()
    assert len({hits for _, hits in seen}) > 3, "queries came in between"
    assert {hits for sequence, hits in seen if sequence == 21} == {301}
    assert {sequence for sequence, hits in seen if hits < 301} == {20}


def test_the_bound_of_blocks_holds_when_the_sequence_is_told() -> None:
    with closing(Driven(Limits(max_blocks_per_stream=3))) as driven:
        driven.synchronize(20, store(1), store(2))
        seen: list[tuple[int | None, int]] = []

        def look() -> None:
            status = driven.follower.status()
            seen.append((status.sequence, status.mapped_blocks))

        driven.index.gate = WatchedGate(look)  # type: ignore[assignment]
        driven.live(21, *(event for block in range(3, 203) for event in (store(block), remove(block))))
        look()
        assert max(blocks for _, blocks in seen) > 3, "on the way it was exceeded"
        assert {blocks for sequence, blocks in seen if sequence == 21} == {3}


def test_a_message_that_arrives_during_a_query_is_not_promised(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.synchronize(20, store(1))

    def overtaken(*args: Any) -> Any:
        found = match_prefix(*args)
        driven.live(21, store(2, parent=1))
        return found

    monkeypatch.setattr("streams.index.match_prefix", overtaken)
    match = driven.match(1, 2)
    assert (match.sequence, match.device_hit_tokens) == (20, SIZE)
    monkeypatch.undo()
    match = driven.match(1, 2)
    assert (match.sequence, match.device_hit_tokens) == (21, 2 * SIZE)


def test_the_lag_is_that_of_messages_that_became_visible(driven: Driven) -> None:
    driven.connect()
    assert driven.wait_asking(0.2)
    driven.live(5, store(1))
    driven.answer(5, store(1))
    driven.live(7, store(2))
    assert driven.losses == ["sequence_gap"]
    assert driven.follower.status().lag_seconds is None
    assert driven.wait_asking(0.2)
    driven.answer(7, store(1))
    driven.live(8, store(2))
    assert driven.follower.status().lag_seconds == 0
    driven.live(20, all_blocks_cleared(), store(3))
    assert driven.follower.status().lag_seconds == 0

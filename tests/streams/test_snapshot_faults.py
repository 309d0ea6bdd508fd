"""Snapshot replies that are late, broken or too large: in recovery they are tried again, with the reason
shown; in calibration the stream goes on serving and shows a warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streams.simulator import SimulatedEngine
from streams.simulator.faults import oversized, slow
from streams.status import StreamState
from tests.streams.driven import Driven
from tests.streams.harness import Portal, store
from tests.streams.puppet import Puppet, synchronize

MakeEngine = Callable[..., SimulatedEngine]
MakePortal = Callable[..., Portal]

LIMIT = 150_000

FAULTS = {
    "silent": ("snapshot_timeout", "replay_timeout_ms"),
    "no_end": ("snapshot_timeout", "replay_timeout_ms"),
    "slow": ("snapshot_timeout", "replay_timeout_ms"),
    "wrong_end": ("snapshot_malformed", "watermark"),
    "short_end": ("snapshot_malformed", "8"),
    "end_only": ("snapshot_malformed", "without a snapshot"),
    "short_watermark": ("snapshot_malformed", "8"),
    "mixed_watermarks": ("snapshot_malformed", "two watermarks"),
    "two_frames": ("snapshot_malformed", "frames"),
    "truncated": ("decode_error", ""),
    "random": ("decode_error", ""),
    "trailing_bytes": ("decode_error", ""),
    "huge_array": ("decode_error", ""),
    "deep_nesting": ("decode_error", ""),
    "wrong_types": ("decode_error", ""),
    "oversized": ("snapshot_too_large", "max_message_bytes"),
    "far_oversized": ("snapshot_disconnected", "max_message_bytes"),
}
"""Name of the fault → the code that it shows and something that its sentence must say."""


def spoil(engine: SimulatedEngine, name: str, times: int | None) -> None:
    special = {
        "slow": slow(1.5),
        "oversized": oversized(LIMIT + 1000),
        "far_oversized": oversized(2 * LIMIT + 1000),
    }
    engine.spoil_snapshots(special.get(name, name), times)


@pytest.mark.parametrize("name", FAULTS)
def test_in_recovery_the_reason_is_shown_and_the_next_good_snapshot_served(
    make_portal: MakePortal, make_engine: MakeEngine, name: str
) -> None:
    code, word = FAULTS[name]
    is_timeout = code == "snapshot_timeout"
    portal = make_portal(max_message_bytes=LIMIT, replay_timeout_ms=600 if is_timeout else 60_000)
    engine = make_engine(seed=1, device_blocks=60, host_blocks=20)
    engine.step(30)
    spoil(engine, name, 2)
    portal.follow(engine.spec())
    assert word in portal.wait_error(engine.spec(), code)
    portal.wait_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.status(engine.spec()).error is None
    resyncs = portal.resyncs(engine.spec())
    assert resyncs.pop("start") == 1
    assert resyncs.keys() == {code}
    assert resyncs[code] == 2 or (is_timeout and resyncs[code] > 2)  # a busy machine misses the next one, too


@pytest.mark.parametrize("name", FAULTS)
def test_in_calibration_the_stream_keeps_serving_with_a_warning(
    make_portal: MakePortal, make_engine: MakeEngine, name: str
) -> None:
    portal = make_portal(max_message_bytes=LIMIT, replay_timeout_ms=600)
    engine = make_engine(seed=2, device_blocks=60, host_blocks=20)
    engine.step(30)
    spec = engine.spec()
    portal.follow_synchronized(spec)
    engine.wait_for_subscribers()
    spoil(engine, name, None)
    portal.directory.resync()
    engine.step(2)
    code, word = FAULTS[name]
    assert word in portal.wait_warning(spec, code)
    assert portal.status(spec).state is StreamState.SYNCHRONIZED
    portal.wait_sequence(spec, 31)
    portal.wait_equals(spec, engine.truth)
    engine.spoil_snapshots(None)
    portal.wait(spec, lambda status: status.last_snapshot.count > 1, "a good calibration")
    portal.wait(spec, lambda status: status.warning is None, "no warning")
    engine.step(2)
    portal.wait_sequence(spec, 33)
    portal.wait_equals(spec, engine.truth)
    assert portal.losses(spec) == []


def test_failing_calibrations_do_not_hold_up_live_messages(
    make_portal: MakePortal, make_engine: MakeEngine
) -> None:
    portal = make_portal(resync_interval_ms=50, replay_timeout_ms=100)
    engine = make_engine(seed=3, device_blocks=60)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.spoil_snapshots("silent")
    engine.step()
    portal.wait_warning(engine.spec(), "snapshot_timeout")
    for last in range(1, 200):
        engine.step()
        portal.wait_sequence(engine.spec(), last)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.losses(engine.spec()) == []


def test_a_slow_snapshot_within_the_timeout_is_taken_with_the_messages_since(
    make_portal: MakePortal, make_engine: MakeEngine
) -> None:
    portal = make_portal(replay_timeout_ms=60_000)
    engine = make_engine(seed=4, device_blocks=60, snapshot_parts=4)
    engine.step(30)
    engine.spoil_snapshots(slow(0.1))
    portal.follow(engine.spec())
    engine.wait_for_subscribers()
    engine.ranks[0].publisher.wait_for_replay_requests()
    engine.step(20)
    portal.wait_sequence(engine.spec(), 49)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.resyncs(engine.spec()) == {"start": 1}


def test_the_replay_timeout_bounds_the_whole_snapshot(make_portal: MakePortal, puppet: Puppet) -> None:
    """Parts that keep coming do not extend it."""
    portal = make_portal(replay_timeout_ms=500)
    portal.follow(puppet.spec)
    request = puppet.request()
    parts = 0
    while not portal.errors(puppet.spec)[-1].startswith("snapshot_timeout"):
        request.part(3, store(parts))
        parts += 1
        assert not puppet.asked(0.02)
        assert parts < 500
    puppet.request().answer(3, store(1))
    portal.wait_sequence(puppet.spec, 3)
    assert portal.status(puppet.spec).device_blocks == 1


def test_frames_after_the_end_marker_are_nobodys(portal: Portal, puppet: Puppet) -> None:
    portal.follow(puppet.spec)
    request = puppet.request()
    request.answer(3, store(1))
    request.answer(4, store(2))
    request.send(b"rubbish")
    portal.wait_sequence(puppet.spec, 3)
    puppet.publish(4, store(5))
    portal.wait_sequence(puppet.spec, 4)
    assert portal.holds(puppet.spec, 2) == (0, 0)


def test_a_part_that_fails_spoils_the_whole_snapshot(portal: Portal, puppet: Puppet) -> None:
    portal.follow(puppet.spec)
    request = puppet.request()
    request.part(3, store(1))
    request.part(3, store(2), store(3) | {"block_size": 16})
    request.end()
    assert "block_size" in portal.wait_error(puppet.spec, "decode_error")
    assert portal.holds(puppet.spec, 1) == (0, 0)
    puppet.request().answer(3, store(4))
    portal.wait_sequence(puppet.spec, 3)
    assert portal.status(puppet.spec).mapped_blocks == 1


def test_a_snapshot_of_another_rank_is_refused(portal: Portal, make_puppet: Callable[..., Puppet]) -> None:
    puppet = make_puppet(dp_rank=2)
    portal.follow(puppet.spec)
    request = puppet.request()
    puppet.dp_rank = 1
    request.answer(3, store(1))
    assert "rank" in portal.wait_error(puppet.spec, "decode_error")


def test_retries_come_with_backoff_and_the_first_within_100_ms(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.live(5, store(2))
    assert driven.losses == ["sequence_gap"]
    assert driven.wait_asking(0.12)
    waits = []
    for _ in range(9):
        driven.advance(2.01)  # unanswered: replay_timeout_ms
        start = driven.now
        assert driven.asking or driven.wait_asking(5.1)
        waits.append(driven.now - start)
    assert max(waits) <= 5.0
    assert min(waits[-3:]) >= 2.0
    assert len({round(wait, 1) for wait in waits[-3:]}) > 1 or waits[-1] != waits[-2], "jittered"


def test_a_success_that_lasted_resets_the_backoff(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.live(5)
    for _ in range(6):
        assert driven.wait_asking(5.1)
        driven.advance(2.01)
    assert driven.wait_asking(5.1)
    driven.answer(5, store(1))
    assert driven.serving
    driven.advance(6)
    driven.live(9)
    assert not driven.serving
    assert driven.wait_asking(0.12)


def test_a_stream_that_fails_again_and_again_shows_only_its_newest_reason(
    make_portal: MakePortal, make_engine: MakeEngine
) -> None:
    portal = make_portal(replay_timeout_ms=100)
    engine = make_engine(seed=5)
    engine.spoil_snapshots("silent", 1)
    portal.follow(engine.spec())
    portal.wait_error(engine.spec(), "snapshot_timeout")
    engine.spoil_snapshots("random")
    portal.wait(
        engine.spec(), lambda status: status.error and status.error.code == "decode_error", "decode_error"
    )
    engine.spoil_snapshots(None)
    portal.wait_synchronized(engine.spec())


def test_a_calibration_whose_messages_overflow_the_buffer_fails_alone(
    make_portal: MakePortal, puppet: Puppet
) -> None:
    portal = make_portal(max_buffered_bytes=5_000, replay_timeout_ms=30_000)
    synchronize(portal, puppet, store(1))
    portal.directory.resync()
    puppet.request()
    for sequence in range(1, 40):
        puppet.publish(sequence, store(sequence + 1, parent=sequence))
    assert "max_buffered_bytes" in portal.wait_warning(puppet.spec, "buffer_overflow")
    portal.wait_sequence(puppet.spec, 39)
    assert portal.losses(puppet.spec) == []
    puppet.request().answer(39, store(*range(1, 41)))
    portal.wait(puppet.spec, lambda status: status.warning is None, "no warning")
    assert portal.holds(puppet.spec, *range(1, 41)) == (40, 0)

"""Every limit of the configuration, as one stream runs into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streams.simulator import SimulatedEngine
from streams.simulator.messages import Event
from streams.status import StreamState
from tests.streams.harness import Portal, copy, remove, store
from tests.streams.puppet import Puppet, synchronize

MakePortal = Callable[..., Portal]
MakePuppet = Callable[..., Puppet]
LIMIT = 50_000


def padded(puppet: Puppet, message_bytes: int, *events: Event) -> bytes:
    """A good payload that makes the whole message (topic, sequence, payload) exactly that long."""
    payload_bytes = message_bytes - len(puppet.topic) - 8
    event = events[0] | {"padding": b""}
    short = puppet.encode([event, *events[1:]])
    longer_header = 1 if payload_bytes - len(short) < 65_536 else 3
    event["padding"] = bytes(payload_bytes - len(short) - longer_header)
    payload = puppet.encode([event, *events[1:]])
    assert len(payload) == payload_bytes
    return payload


def test_a_live_message_of_exactly_the_limit_is_taken(make_portal: MakePortal, puppet: Puppet) -> None:
    portal = make_portal(max_message_bytes=LIMIT)
    synchronize(portal, puppet, store(1))
    puppet.payload(1, padded(puppet, LIMIT, store(2, parent=1)))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.losses(puppet.spec) == []


@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT])
def test_a_larger_live_message_is_refused_and_both_sizes_named(
    make_portal: MakePortal, puppet: Puppet, size: int
) -> None:
    portal = make_portal(max_message_bytes=LIMIT)
    synchronize(portal, puppet, store(1))
    puppet.payload(1, padded(puppet, size, store(2, parent=1)))
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (0, 0)
    sentence = portal.wait_error(puppet.spec, "message_too_large")
    assert str(size) in sentence
    assert f"max_message_bytes allows {LIMIT}" in sentence
    request.answer(1, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    puppet.publish(2, store(3, parent=2))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))


def test_a_live_message_far_over_the_limit_cuts_the_connection_which_is_made_anew(
    make_portal: MakePortal, puppet: Puppet
) -> None:
    portal = make_portal(max_message_bytes=LIMIT)
    synchronize(portal, puppet, store(1))
    puppet.payload(1, bytes(2 * LIMIT + 1))
    assert "max_message_bytes" in portal.wait_error(puppet.spec, "disconnected")
    puppet.wait_subscribed()
    puppet.request().answer(1, store(1))
    portal.wait_sequence(puppet.spec, 1)
    puppet.publish(2, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))


@pytest.mark.parametrize("parts", [1, 4])
def test_the_limit_of_a_snapshot_is_on_the_whole_reply(
    make_portal: MakePortal, puppet: Puppet, parts: int
) -> None:
    portal = make_portal(max_message_bytes=LIMIT)
    portal.follow(puppet.spec)
    request = puppet.request()
    for part in range(parts):
        request.part(3, store(part) | {"padding": bytes(LIMIT // parts)})
    sentence = portal.wait_error(puppet.spec, "snapshot_too_large")
    assert f"max_message_bytes allows {LIMIT}" in sentence
    assert "raise" in sentence
    request = puppet.request()
    for part in range(parts):
        request.part(3, store(part) | {"padding": bytes(LIMIT // parts - 250)})
    request.end()
    portal.wait_sequence(puppet.spec, 3)
    assert portal.status(puppet.spec).device_blocks == parts


def test_live_messages_over_the_buffer_during_recovery_fail_it(
    make_portal: MakePortal, puppet: Puppet
) -> None:
    portal = make_portal(max_buffered_bytes=5_000, replay_timeout_ms=60_000)
    portal.follow(puppet.spec)
    puppet.wait_subscribed()
    puppet.request()
    sequence = 0
    while not any(error.startswith("buffer_overflow") for error in portal.errors(puppet.spec)):
        puppet.publish(sequence, store(sequence))
        sequence += 1
        assert sequence < 500
        portal.wait_counter(puppet.spec, "messages", sequence)
    assert "max_buffered_bytes allows 5000" in portal.wait_error(puppet.spec, "buffer_overflow")
    assert 5 < sequence < 30
    puppet.request().answer(sequence, store(1))
    portal.wait_sequence(puppet.spec, sequence)


def test_decoded_records_count_in_the_buffer(make_portal: MakePortal, puppet: Puppet) -> None:
    """Many small messages take much more memory than their bytes on the wire."""
    portal = make_portal(max_buffered_bytes=20_000, replay_timeout_ms=60_000)
    portal.follow(puppet.spec)
    puppet.wait_subscribed()
    puppet.request()
    wire = 0
    for sequence in range(100):
        payload = puppet.encode([])
        puppet.payload(sequence, payload)
        wire += len(payload) + 10
    assert wire < 5_000
    portal.wait_error(puppet.spec, "buffer_overflow")


def test_a_stream_whose_live_messages_fail_again_and_again_is_closed_while_it_waits(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1))
    for sequence in (1, 2, 3):
        puppet.payload(sequence, b"\xc1")
        portal.wait_counter(puppet.spec, "messages", sequence)
    assert puppet.live.poll(10_000)
    assert puppet.live.recv() == b"\x00" + puppet.topic
    assert portal.status(puppet.spec).error.code == "decode_error"
    puppet.wait_subscribed()
    while puppet.asked(0):
        puppet.request()
    puppet.request().answer(3, store(1))
    portal.wait_sequence(puppet.spec, 3)
    puppet.publish(4, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))


def test_blocks_in_no_tier_make_room_oldest_first(make_portal: MakePortal, puppet: Puppet) -> None:
    portal = make_portal(max_blocks_per_stream=4)
    synchronize(portal, puppet, store(1, 2, 3, 4))
    puppet.publish(1, remove(3), remove(1))
    puppet.publish(2, store(5, parent=2))
    portal.wait_sequence(puppet.spec, 2)
    assert portal.status(puppet.spec).mapped_blocks == 4
    # 3 left first and is forgotten now; 1 is still known.
    puppet.publish(3, copy(1))
    portal.wait_holds(puppet.spec, (1, 2, 5), (2, 1))
    assert portal.losses(puppet.spec) == []
    puppet.publish(4, remove(4))
    puppet.publish(5, copy(3))
    portal.wait_sequence(puppet.spec, 5)
    assert portal.holds(puppet.spec, 1, 2, 3) == (1, 1)


def test_more_blocks_in_tiers_than_allowed_invalidate_the_stream(
    make_portal: MakePortal, puppet: Puppet
) -> None:
    portal = make_portal(max_blocks_per_stream=4)
    synchronize(portal, puppet, store(1, 2, 3, 4))
    puppet.publish(1, store(5, parent=4))
    sentence = portal.wait_error(puppet.spec, "index_overflow")
    assert "max_blocks_per_stream allows 4" in sentence
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (0, 0)
    request.answer(1, store(1, 2, 3, 4, 5))
    puppet.request().answer(1, store(1, 2), store(3, parent=99), store(4, parent=98) | {"lora_id": 1})
    portal.wait_sequence(puppet.spec, 1)
    assert portal.losses(puppet.spec) == ["index_overflow"]


def test_orphans_and_opaque_blocks_count_in_the_bound(make_portal: MakePortal, puppet: Puppet) -> None:
    portal = make_portal(max_blocks_per_stream=3)
    portal.follow(puppet.spec)
    orphans = [store(1), store(2, parent=99), store(3, lora_id=1), store(4, parent=98)]
    puppet.request().answer(1, *orphans)
    portal.wait_error(puppet.spec, "index_overflow")
    puppet.request().answer(1, *orphans[:3])
    status = portal.wait_sequence(puppet.spec, 1)
    assert (status.mapped_blocks, status.device_blocks) == (3, 1)


def test_churn_far_over_the_bound_keeps_the_map_bounded(
    make_portal: MakePortal, make_engine: Callable[..., SimulatedEngine]
) -> None:
    portal = make_portal(max_blocks_per_stream=150)
    engine = make_engine(seed=1, device_blocks=60, host_blocks=30)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(800)
    status = portal.wait_sequence(engine.spec(), 799)
    assert status.mapped_blocks == 150
    assert portal.losses(engine.spec()) == []
    portal.wait_equals(engine.spec(), engine.truth)


def test_at_the_bound_of_all_blocks_a_new_snapshot_is_refused_with_a_reason(
    make_portal: MakePortal, make_puppet: MakePuppet
) -> None:
    portal = make_portal(max_total_blocks=5)
    first, second = (make_puppet(name=name) for name in ("a", "b"))
    portal.follow(first.spec, second.spec)
    first.request().answer(0, store(1, 2, 3))
    portal.wait_synchronized(first.spec)
    second.request().answer(0, store(1, 2, 3))
    sentence = portal.wait_error(second.spec, "total_blocks_exceeded")
    assert "max_total_blocks" in sentence
    assert "5" in sentence
    assert portal.holds(first.spec, 1, 2, 3) == (3, 0)
    assert portal.holds(second.spec, 1) == (0, 0)
    second.request().answer(0, store(1, 2))
    portal.wait_synchronized(second.spec)
    assert portal.losses(first.spec) == []


def test_at_the_bound_of_all_blocks_a_stream_may_still_calibrate(
    make_portal: MakePortal, puppet: Puppet
) -> None:
    portal = make_portal(max_total_blocks=3)
    synchronize(portal, puppet, store(1, 2, 3))
    portal.directory.resync()
    puppet.request().answer(0, store(1, 2), store(4, parent=2))
    portal.wait_holds(puppet.spec, (1, 2, 4), (3, 0))
    assert portal.status(puppet.spec).warning is None


def test_more_streams_than_allowed_are_refused_and_change_nothing(
    make_portal: MakePortal, make_puppet: MakePuppet
) -> None:
    portal = make_portal(max_streams=2)
    puppets = [make_puppet(name=name) for name in ("a", "b", "c")]
    portal.follow(puppets[0].spec, puppets[1].spec)
    with pytest.raises(ValueError, match="max_streams allows 2"):
        portal.follow(*(puppet.spec for puppet in puppets))
    assert [status.spec.instance_name for status in portal.directory.statuses()] == ["a", "b"]
    for puppet in puppets[:2]:
        puppet.request().answer(0, store(1))
        portal.wait_synchronized(puppet.spec)


def test_the_resync_interval_is_the_time_between_calibrations(
    make_portal: MakePortal, puppet: Puppet
) -> None:
    portal = make_portal(resync_interval_ms=200)
    synchronize(portal, puppet, store(1))
    for _ in range(3):
        puppet.request().answer(0, store(1))
    portal.wait_counter(puppet.spec, "resyncs:calibration", 3)
    assert portal.status(puppet.spec).state is StreamState.SYNCHRONIZED


def test_a_message_at_the_default_limit_is_decoded_and_served(portal: Portal, puppet: Puppet) -> None:
    """A snapshot of 8 MiB and a live batch of several MiB."""
    blocks = range(1, 40_001)
    synchronize(portal, puppet, store(*blocks))
    assert portal.holds(puppet.spec, *range(1, 1001)) == (1000, 0)
    assert portal.status(puppet.spec).device_blocks == 40_000
    events = [store(*range(start, start + 100), parent=start - 1) for start in range(40_001, 100_001, 100)]
    payload = puppet.encode(events)
    assert len(payload) > 1024 * 1024
    puppet.payload(1, payload)
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, *range(1, 65_001)) == (65_000, 0)

"""Every fault, seen from the other side of the wire."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from streams.simulator import SimulatedEngine, faults
from streams.simulator.faults import LIVE_FAULTS, SNAPSHOT_FAULTS, Good
from tests.simulator.peers import END, NaiveReader, Peer, peer, unpack
from tests.support.waiting import wait_until

WELL_FORMED = {"unknown_type", "unknown_medium", "other_topic", "longer_topic", "oversized"}
"""Live faults whose payload decodes."""


@pytest.fixture
def reader() -> Iterator[Peer]:
    with peer() as each:
        yield each


@pytest.fixture
def engine() -> Iterator[SimulatedEngine]:
    with SimulatedEngine(seed=1, block_size=4, device_blocks=50, dp_size=2, topic="kv") as each:
        each.step(20)
        yield each


def fits(payload: bytes, rank: int) -> bool:
    """Whether a payload is a batch of the protocol, as strictly as a reader has to be."""
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
        timestamp, events, dp_rank = batch[:3]
        assert type(timestamp) in (int, float)
        assert isinstance(batch, list)
        assert dp_rank == rank
        for event in events:
            hashes, tokens = event["block_hashes"], event["token_ids"]
            assert isinstance(hashes, list) and isinstance(tokens, list)
            assert all(type(each) in (int, bytes) for each in hashes)
            assert all(type(each) is int for each in tokens)
            assert len(tokens) == 4 * len(hashes)
    except (AssertionError, ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
        return False
    return True


def test_a_skipped_sequence_is_a_hole_before_the_next_message(reader: Peer, engine: SimulatedEngine) -> None:
    reader.subscribe(engine.ranks[0].publisher)
    engine.skip_sequence(2, rank=0)
    engine.step()
    assert reader.sequences(1) == [22]
    assert engine.ranks[1].publisher.last_sequence == 20


def test_lost_messages_change_the_truth_and_show_only_later(reader: Peer, engine: SimulatedEngine) -> None:
    publisher = engine.ranks[0].publisher
    reader.subscribe(publisher)
    before = engine.truth(0)
    engine.lose_messages(5, rank=0)
    assert engine.truth(0).blocks != before.blocks
    watermark = reader.snapshot(publisher)[0][1]
    assert int.from_bytes(watermark, "big") == 24, "a snapshot knows of them"
    assert not reader.receive_within(0)
    engine.step(rank=0)
    assert reader.sequences(1) == [25]


@pytest.mark.parametrize("visible", [True, False])
def test_a_restart_brings_other_content_and_old_sequences(
    reader: Peer, engine: SimulatedEngine, visible: bool
) -> None:
    publisher = engine.ranks[0].publisher
    reader.subscribe(publisher)
    old = engine.truth(0)
    engine.restart(visible=visible)
    assert engine.truth(0).device_blocks == 0
    assert reader.snapshot(publisher)[0][1] == bytes(8)
    if visible:
        assert publisher.subscribers == 0
        reader.wait_for_subscription(publisher)
    engine.step(3)
    assert reader.sequences(3) == [0, 1, 2]
    assert engine.truth(0).blocks != old.blocks
    view = NaiveReader(4)
    for part in reader.snapshot(publisher)[:-1]:
        view.apply(unpack(part[2])[1])
    prompts = list(engine.truth(0).prompts())
    assert view.hits_of(prompts) == [engine.truth(0).hits(each) for each in prompts]


def test_a_restart_may_continue_at_any_sequence(reader: Peer, engine: SimulatedEngine) -> None:
    reader.subscribe(engine.ranks[1].publisher)
    engine.restart(visible=False, first_sequence=5000)
    engine.step()
    assert reader.sequences(1) == [5000]


def test_dropped_connections_come_back_and_miss_what_was_published(
    reader: Peer, engine: SimulatedEngine
) -> None:
    publisher = engine.ranks[0].publisher
    reader.subscribe(publisher)
    engine.drop_connection(down_s=0.1, wait=False)
    engine.step(wait=False)
    wait_until(lambda: publisher.subscribers == 0)
    reader.wait_for_subscription(publisher)
    engine.step()
    assert reader.sequences(1) == [21]


def test_a_flood_arrives_whole_and_leaves_the_truth_alone(reader: Peer, engine: SimulatedEngine) -> None:
    reader.subscribe(engine.ranks[0].publisher)
    before, view = engine.truth(0), NaiveReader(4)
    engine.flood(1001, rank=0)
    for events in (batch[1] for batch in reader.batches(1002)):
        view.apply(events)
    assert not view.tiers["gpu"]
    assert engine.truth(0).blocks == before.blocks


@pytest.mark.parametrize("name", LIVE_FAULTS)
def test_malformed_live_messages_are_what_they_say(reader: Peer, engine: SimulatedEngine, name: str) -> None:
    reader.subscribe(engine.ranks[1].publisher, topic="")
    engine.send_malformed(name, rank=1)
    engine.step(rank=1)
    frames = reader.receive()
    counted = LIVE_FAULTS[name].counts
    assert reader.sequences(1) == [21 if counted else 20]
    if name in WELL_FORMED:
        assert fits(frames[2], rank=1)
        assert (frames[0] != b"kv") == name.endswith("topic")
    else:
        right_shape = len(frames) == 3 and frames[0] == b"kv" and frames[1] == (20).to_bytes(8, "big")
        assert not (right_shape and fits(frames[2], rank=1))


def test_the_longer_topic_passes_a_filter_by_prefix(reader: Peer, engine: SimulatedEngine) -> None:
    reader.subscribe(engine.ranks[0].publisher, topic="kv")
    engine.send_malformed("other_topic", rank=0)
    engine.send_malformed("longer_topic", rank=0)
    assert reader.receive()[0] == b"kv-2"


def test_a_good_message_is_good() -> None:
    good = Good(b"kv", 1, 0, 4, random.Random(1))
    assert fits(good.with_event()[2], rank=0)
    assert len(LIVE_FAULTS["oversized"].build(good)[2]) > 8 * 1024 * 1024


# -- snapshots


def spoiled(reader: Peer, engine: SimulatedEngine, fault: Any, frame_sets: int) -> list[list[bytes]]:
    """That many frame sets of a spoiled answer, and a proof that there are no more."""
    publisher = engine.ranks[0].publisher
    engine.spoil_snapshots(fault, times=1, rank=0)
    with reader.request(publisher) as dealer:
        publisher.wait_for_replay_requests()  # two connections race: this one is to meet the fault
        reply = [dealer.recv_multipart() for _ in range(frame_sets)]
        assert len(reader.snapshot(publisher)) == 2, "the next answer is good again"
        assert not dealer.poll(0)
    return reply


def holds(engine: SimulatedEngine, part: list[bytes]) -> bool:
    return fits(part[2], rank=0) and len(unpack(part[2])[1]) > 0


SPOILED: dict[str, tuple[int, Any]] = {
    "silent": (0, lambda reply: True),
    "no_end": (1, lambda reply: reply[0][1] != END),
    "wrong_end": (2, lambda reply: reply[1] == [b"", b"\xff" * 7 + b"\xfe", b""]),
    "short_end": (2, lambda reply: reply[1] == [b"", END[:7], b""]),
    "end_only": (1, lambda reply: reply == [[b"", END, b""]]),
    "truncated": (2, lambda reply: not fits(reply[0][2], 0)),
    "random": (2, lambda reply: not fits(reply[0][2], 0)),
    "trailing_bytes": (2, lambda reply: fits(reply[0][2][:-1], 0) and not fits(reply[0][2], 0)),
    "huge_array": (2, lambda reply: not fits(reply[0][2], 0)),
    "deep_nesting": (2, lambda reply: not fits(reply[0][2], 0)),
    "wrong_types": (2, lambda reply: not fits(reply[0][2], 0)),
    "short_watermark": (2, lambda reply: len(reply[0][1]) == 7 and fits(reply[0][2], 0)),
    "mixed_watermarks": (3, lambda reply: reply[0][1] != reply[1][1] and reply[2][1] == END),
    "two_frames": (2, lambda reply: [len(part) for part in reply] == [2, 2]),
    "oversized": (2, lambda reply: len(reply[0][2]) > 8 * 1024 * 1024 and fits(reply[0][2], 0)),
    "stale": (2, lambda reply: reply[0][1] == (9).to_bytes(8, "big") and fits(reply[0][2], 0)),
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_snapshots_are_what_they_say_and_heal(
    reader: Peer, engine: SimulatedEngine, name: str
) -> None:
    frame_sets, is_right = SPOILED[name]
    assert is_right(spoiled(reader, engine, name, frame_sets))


def test_every_snapshot_fault_is_tested() -> None:
    assert SPOILED.keys() | {"slow"} == SNAPSHOT_FAULTS.keys()


def test_a_slow_snapshot_arrives_whole_and_live_messages_pass_it(
    reader: Peer, engine: SimulatedEngine
) -> None:
    publisher = engine.ranks[0].publisher
    reader.subscribe(publisher)
    engine.spoil_snapshots(faults.slow(1.0), times=1, rank=0)
    with reader.request(publisher) as dealer:
        publisher.wait_for_replay_requests(1)
        engine.step()
        assert reader.sequences(1) == [20]
        assert not dealer.poll(0)
        body, end = dealer.recv_multipart(), dealer.recv_multipart()
    assert body[1] == (19).to_bytes(8, "big")
    assert holds(engine, body)
    assert end[1] == END


def test_a_snapshot_fault_lasts_until_it_is_taken_away(reader: Peer, engine: SimulatedEngine) -> None:
    engine.spoil_snapshots("end_only", rank=0)
    for _ in range(3):
        assert len(reader.snapshot(engine.ranks[0].publisher)) == 1
    assert len(reader.snapshot(engine.ranks[1].publisher)) == 2, "another rank is not affected"
    engine.spoil_snapshots(None)
    assert len(reader.snapshot(engine.ranks[0].publisher)) == 2


def test_the_oversized_snapshot_has_the_size_asked_for(reader: Peer, engine: SimulatedEngine) -> None:
    body, _ = spoiled(reader, engine, faults.oversized(100_000), 2)
    assert 100_000 <= len(body[2]) < 120_000
    assert holds(engine, body)

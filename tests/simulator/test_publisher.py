from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from streams.simulator import Publisher, sockets
from streams.simulator.messages import Snapshot, block_stored
from tests.simulator.peers import END, Peer, peer, unpack
from tests.support.waiting import wait_until

EVENT = block_stored([1, 2], None, range(8), 4)


@pytest.fixture
def reader() -> Iterator[Peer]:
    with peer() as each:
        yield each


def test_live_messages_carry_topic_counting_sequence_and_batch(reader: Peer) -> None:
    with Publisher(topic="kv", dp_rank=3, first_sequence=41, clock=lambda: 12.5) as publisher:
        reader.subscribe(publisher)
        assert publisher.last_sequence is None
        assert [publisher.publish([EVENT]), publisher.publish([])] == [41, 42]
        first, second = reader.receive(), reader.receive()
        assert publisher.last_sequence == 42
        assert first[:2] == [b"kv", (41).to_bytes(8, "big")]
        assert second[1] == (42).to_bytes(8, "big")
        assert unpack(first[2]) == [12.5, [EVENT], 3]
        assert unpack(second[2]) == [12.5, [], 3]


def test_snapshot_carries_the_last_sequence_and_ends_with_the_marker(reader: Peer) -> None:
    with Publisher(snapshot=lambda: [EVENT], clock=lambda: 1.0) as publisher:
        assert reader.snapshot(publisher)[0][1] == bytes(8), "nothing published yet: the next one"
        for _ in range(3):
            publisher.publish([EVENT])
        body, end = reader.snapshot(publisher)
        assert body[:2] == [b"", (2).to_bytes(8, "big")]
        assert unpack(body[2]) == [1.0, [EVENT], 0]
        assert end == [b"", END, b""]
        assert publisher.replay_requests == 2


def test_watermark_convention_next(reader: Peer) -> None:
    with Publisher(watermark="next") as publisher:
        publisher.publish([])
        assert reader.snapshot(publisher)[0][1] == (1).to_bytes(8, "big")


def test_a_snapshot_may_bring_its_own_watermark(reader: Peer) -> None:
    with Publisher(snapshot=lambda: Snapshot(2**64 - 2, ())) as publisher:
        assert reader.snapshot(publisher)[0][1] == (2**64 - 2).to_bytes(8, "big")


@pytest.mark.parametrize("parts", [2, 5])
def test_a_snapshot_in_several_frame_sets_keeps_order_and_watermark(reader: Peer, parts: int) -> None:
    events = [block_stored([i], None, [i], 1) for i in range(3)]
    with Publisher(snapshot=lambda: events, snapshot_parts=parts, first_sequence=9) as publisher:
        *body, end = reader.snapshot(publisher)
        assert len(body) == parts
        assert {each[1] for each in body} == {(9).to_bytes(8, "big")}
        assert [event for each in body for event in unpack(each[2])[1]] == events
        assert end[1] == END


def test_a_snapshot_that_cannot_be_made_leaves_the_publisher_alive(reader: Peer) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("no snapshot")

    with Publisher(snapshot=broken) as publisher, reader.request(publisher):
        publisher.wait_for_replay_requests(1)
        reader.subscribe(publisher)
        publisher.publish([EVENT])
        assert reader.receive()[1] == bytes(8)


def test_requests_of_the_wrong_shape_are_ignored(reader: Peer) -> None:
    with Publisher() as publisher, reader.request(publisher, [b"", b"short"]) as dealer:
        publisher.wait_for_replay_requests(1)
        reader.snapshot(publisher)
        assert not dealer.poll(0)


def test_skipped_sequences_leave_a_hole(reader: Peer) -> None:
    with Publisher() as publisher:
        reader.subscribe(publisher)
        publisher.publish([])
        assert publisher.skip_sequence(3) == 3
        publisher.publish([])
        assert reader.sequences(2) == [0, 4]


def test_sequences_wrap_before_the_end_marker(reader: Peer) -> None:
    with Publisher(first_sequence=2**64 - 2) as publisher:
        reader.subscribe(publisher)
        publisher.publish([])
        assert publisher.last_sequence == 2**64 - 2
        publisher.publish([])
        assert reader.sequences(2) == [2**64 - 2, 0]


def test_a_dropped_connection_loses_messages_and_comes_back_on_the_same_port(reader: Peer) -> None:
    with Publisher() as publisher:
        reader.subscribe(publisher)
        endpoints = publisher.endpoint, publisher.replay_endpoint
        done = publisher.drop_connection(down_s=0.2, wait=False)
        publisher.publish([])
        done.result(10)
        reader.wait_for_subscription(publisher)
        publisher.publish([])
        assert reader.sequences(1) == [1]
        assert (publisher.endpoint, publisher.replay_endpoint) == endpoints
        assert reader.snapshot(publisher)[0][1] == (1).to_bytes(8, "big")


def test_only_the_live_socket_drops(reader: Peer) -> None:
    with Publisher() as publisher:
        reader.subscribe(publisher)
        publisher.drop_connection(replay=False, down_s=600, wait=False)
        wait_until(lambda: publisher.subscribers == 0)
        assert reader.snapshot(publisher)


def test_only_the_replay_socket_drops(reader: Peer) -> None:
    with Publisher() as publisher:
        reader.subscribe(publisher)
        publisher.drop_connection(live=False, down_s=600, wait=False)
        publisher.publish([])
        assert reader.sequences(1) == [0]
        with reader.request(publisher) as dealer:
            assert not dealer.poll(100)
            assert publisher.replay_requests == 0


def test_a_port_that_was_taken_meanwhile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "REBIND_S", 0.2)
    with Publisher() as publisher:
        port = int(publisher.endpoint.rpartition(":")[2])
        done = publisher.drop_connection(replay=False, down_s=0.5, wait=False)
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wait_until(lambda: not thief_fails(thief, port))
            thief.listen()
            with pytest.raises(OSError, match=f"cannot listen on .*:{port}"):
                done.result(20)


def thief_fails(thief: socket.socket, port: int) -> bool:
    try:
        thief.bind(("127.0.0.1", port))
    except OSError:
        return True
    return False


def test_a_port_in_use_fails_the_start_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with Publisher() as publisher, pytest.raises(OSError, match="cannot listen on"):
        Publisher(endpoint=publisher.endpoint)
    assert threading.active_count() == before


def test_flood_sends_every_message_in_order(reader: Peer) -> None:
    with Publisher(first_sequence=5, lossless=True) as publisher:
        reader.subscribe(publisher)
        done = publisher.flood([publisher.encode([EVENT]), publisher.encode([])], 5000)
        assert reader.sequences(5000) == list(range(5, 5005))
        done.result(10)
        publisher.publish([])
        assert reader.sequences(1) == [5005]


def test_snapshots_are_answered_during_a_flood(reader: Peer) -> None:
    with Publisher() as publisher:
        done = publisher.flood([publisher.encode([EVENT])], 1_000_000)
        first, second = (int.from_bytes(reader.snapshot(publisher)[0][1], "big") for _ in range(2))
        assert not done.done()
        assert 0 < first <= second < 1_000_000


def test_a_slow_subscriber_loses_messages_unless_lossless(reader: Peer) -> None:
    with Publisher(send_hwm=10) as publisher:
        reader.subscribe(publisher)
        payload = bytes(1_000_000)
        for _ in range(200):
            publisher.publish_payload(payload)
        publisher.flush()
        received: list[int] = []
        while not received or received[-1] < 200:
            publisher.publish_payload(b"", wait=True)
            if reader.receive_within(10):
                received += reader.sequences(1)
        assert received == sorted(received)
        assert len([each for each in received if each < 200]) < 200


def test_flush_waits_for_slow_subscribers_when_lossless(reader: Peer) -> None:
    with Publisher(send_hwm=10, lossless=True) as publisher:
        reader.subscribe(publisher, receive_hwm=1)
        payload = bytes(1_000_000)
        for _ in range(200):
            publisher.publish_payload(payload)
        with pytest.raises(TimeoutError, match="messages still wait"):
            publisher.flush(timeout=0.2)
        assert reader.sequences(200) == list(range(200))
        publisher.flush()


def test_subscriptions_are_counted_and_leave_with_their_socket() -> None:
    with Publisher() as publisher:
        with peer() as one, peer() as two:
            one.subscribe(publisher)
            two.subscribe(publisher)
            assert publisher.subscribers == 2
        wait_until(lambda: publisher.subscribers == 0)
        with pytest.raises(TimeoutError, match="1 subscriptions"):
            publisher.wait_for_subscribers(timeout=0.05)


def test_close_leaves_no_thread_and_no_listening_port() -> None:
    before = threading.active_count()
    publisher = Publisher()
    ports = [int(each.rpartition(":")[2]) for each in (publisher.endpoint, publisher.replay_endpoint)]
    waiting = publisher.drop_connection(live=False, down_s=600, wait=False)
    publisher.close()
    publisher.close()
    assert waiting.cancelled()
    assert threading.active_count() == before
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish([])


def test_publishers_share_a_context_that_stays_theirs_who_made_it() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Publisher(context=context), Publisher(context=context):
        pass
    assert not context.closed
    context.term()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"first_sequence": 2**64 - 1}, "first_sequence is"),
        ({"first_sequence": -1}, "first_sequence is"),
        ({"snapshot_parts": 0}, "snapshot_parts is 0"),
        ({"watermark": "none"}, "watermark is 'none'"),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Publisher(**setting)

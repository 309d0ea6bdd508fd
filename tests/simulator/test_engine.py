"""The engine on the wire: what a reader that sees live messages and snapshots ends up with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from streams.simulator import Prompt, SimulatedEngine, TrafficConfig
from streams.simulator.engine import EngineConfig
from streams.simulator.messages import block_stored
from streams.spec import StreamSpec
from tests.simulator.peers import END, NaiveReader, Peer, peer, unpack
from tests.support.waiting import wait_until

SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "device_blocks": 40,
    "host_blocks": 30,
    "traffic": TrafficConfig(system_prompts=4, conversations=6, lora_share=0.1, image_share=0.1),
}


@pytest.fixture
def reader() -> Iterator[Peer]:
    with peer() as each:
        yield each


class Follower:
    """Replays a snapshot and the live messages from its watermark on, as the portal has to."""

    def __init__(self, reader: Peer, engine: SimulatedEngine, rank: int) -> None:
        self.reader, self.engine, self.rank = reader, engine, rank
        self.publisher = engine.ranks[rank].publisher
        self.applied = -1
        reader.subscribe(self.publisher)
        self.join()

    def join(self) -> None:
        *parts, end = self.reader.snapshot(self.publisher)
        assert end == [b"", END, b""]
        self.watermark = int.from_bytes(parts[0][1], "big")
        self.view = NaiveReader(self.engine.config.cache.block_size)
        for part in parts:
            self.view.apply(self.batch(part[2]))

    def follow(self) -> None:
        """Apply everything that was published until now."""
        self.engine.flush()
        while self.applied != self.publisher.last_sequence:
            _, sequence, payload = self.reader.receive()
            self.applied = int.from_bytes(sequence, "big")
            if self.applied >= self.watermark:
                self.view.apply(self.batch(payload))

    def batch(self, payload: bytes) -> list[Any]:
        _, events, rank = unpack(payload)
        assert rank == self.rank
        return events

    def agrees(self) -> None:
        truth = self.engine.truth(self.rank)
        prompts = list(truth.prompts())
        assert self.view.hits_of(prompts) == [truth.hits(each) for each in prompts]


@pytest.mark.parametrize("watermark", ["last", "next"])
@pytest.mark.parametrize("before", [0, 1, 120])
def test_a_late_joiner_arrives_at_the_truth(reader: Peer, watermark: str, before: int) -> None:
    settings = SETTINGS | {"watermark": watermark, "orphan_probability": 0.2, "snapshot_parts": 3}
    with SimulatedEngine(seed=before, first_sequence=7, **settings) as engine:
        engine.step(before)
        follower = Follower(reader, engine, 0)
        for _ in range(15):
            follower.agrees()
            engine.step(10)
            follower.follow()
        assert not follower.view.unknown


@pytest.mark.parametrize("delay", [1, 3, 20])
def test_slow_offload_is_followed_by_joining_again_at_unknown_copies(reader: Peer, delay: int) -> None:
    with SimulatedEngine(seed=delay, offload_delay=delay, orphan_probability=0.1, **SETTINGS) as engine:
        engine.step(100)
        follower = Follower(reader, engine, 0)
        joins = 0
        for _ in range(60):
            engine.step(4)
            follower.follow()
            if follower.view.unknown:
                follower.join()
                joins += 1
            follower.agrees()
        assert joins


def test_a_snapshot_taken_while_messages_are_published_fits_its_watermark(reader: Peer) -> None:
    with SimulatedEngine(seed=3, **SETTINGS) as engine:
        follower = Follower(reader, engine, 0)
        engine.start(rate=3000)
        for _ in range(10):
            follower.publisher.wait_for_replay_requests(1)
            follower.join()
            last = follower.publisher.next_sequence
            wait_until(lambda last=last: follower.publisher.next_sequence > last + 20)  # type: ignore[misc]
        engine.stop()
        follower.follow()
        follower.agrees()


def test_ranks_are_apart_and_listen_on_consecutive_ports(reader: Peer) -> None:
    with SimulatedEngine(seed=4, dp_size=3, **SETTINGS) as engine:
        ports = [int(engine.endpoint(rank).rpartition(":")[2]) for rank in range(3)]
        replay = [int(engine.replay_endpoint(rank).rpartition(":")[2]) for rank in range(3)]
        assert ports == list(range(ports[0], ports[0] + 3))
        assert replay == list(range(replay[0], replay[0] + 3))
        follower = Follower(reader, engine, 2)
        engine.step(30, rank=2)
        engine.step(5)
        follower.follow()
        follower.agrees()
        assert [each.publisher.last_sequence for each in engine.ranks] == [4, 4, 34]
        assert engine.truth(0).blocks != engine.truth(2).blocks


def test_store_runs_a_given_prompt_and_publish_sends_given_events(reader: Peer) -> None:
    with SimulatedEngine(**SETTINGS) as engine:
        follower = Follower(reader, engine, 0)
        assert engine.ranks[0].store([1, 2, 3, 4, 5]) > 0
        assert engine.ranks[0].store([1, 2, 3, 4]) == 0
        engine.ranks[0].store(Prompt([9, 9, 9, 9], lora="adapter-1"))
        engine.ranks[0].publish([block_stored([77], None, [5, 6, 7, 8], 4)])
        follower.follow()
        assert follower.applied == 2
        assert follower.view.hits([1, 2, 3, 4]) == (4, 0)
        assert follower.view.hits([5, 6, 7, 8]) == (4, 0)
        assert follower.view.hits([9, 9, 9, 9]) == (0, 0)
        assert engine.truth().hits([5, 6, 7, 8]) == (0, 0)
        engine.ranks[0].clear()
        follower.follow()
        assert follower.view.hits([1, 2, 3, 4]) == (0, 0) == engine.truth().hits([1, 2, 3, 4])


def test_clearing_happens_with_its_probability() -> None:
    with SimulatedEngine(clear_probability=1.0, **SETTINGS) as engine:
        engine.step(5)
        assert engine.truth().device_blocks == 0


def test_same_seed_same_wire(reader: Peer) -> None:
    def wire(seed: int) -> list[Any]:
        with SimulatedEngine(seed=seed, **SETTINGS) as engine, peer() as other:
            other.subscribe(engine.ranks[0].publisher)
            engine.step(50)
            return [events for _, events, _ in other.batches(50)]

    assert wire(1) == wire(1)
    assert wire(1) != wire(2)


def test_free_running_can_be_paused_changed_and_stopped() -> None:
    with SimulatedEngine(**SETTINGS) as engine:
        publisher = engine.ranks[0].publisher
        engine.start(rate=2000)
        wait_until(lambda: publisher.next_sequence > 50)
        engine.set_rate(0)
        with engine.ranks[0].paused():
            paused_at = publisher.next_sequence
        engine.set_rate(2000)
        wait_until(lambda: publisher.next_sequence > paused_at + 50)
        engine.stop()
        stopped_at = publisher.next_sequence
        engine.step(1)
        assert publisher.next_sequence == stopped_at + 1
        engine.start(rate=2000)
        wait_until(lambda: publisher.next_sequence > stopped_at + 50)
        with pytest.raises(ValueError, match="rate is -1"):
            engine.set_rate(-1)


def test_the_spec_names_the_stream() -> None:
    with SimulatedEngine(dp_size=2, topic="kv", **SETTINGS) as engine:
        assert engine.spec(1, "one", incarnation="x") == StreamSpec(
            instance_name="one",
            dp_rank=1,
            endpoint=engine.endpoint(1),
            replay_endpoint=engine.replay_endpoint(1),
            block_size=4,
            topic="kv",
            incarnation="x",
        )


def test_fixed_ports_that_are_taken_fail_the_start_and_leave_nothing() -> None:
    before = threading.active_count()
    with SimulatedEngine(dp_size=2, **SETTINGS) as engine:
        taken = int(engine.endpoint(1).rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot listen on tcp://127.0.0.1:{taken}"):
            SimulatedEngine(dp_size=2, event_port=taken, replay_port=taken + 100, **SETTINGS)
    assert threading.active_count() == before


def test_close_ends_everything_in_the_middle_of_traffic_and_floods() -> None:
    before = threading.active_count()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = SimulatedEngine(dp_size=4, context=context, **SETTINGS)
    engine.start(rate=10_000)
    engine.flood(100_000_000, wait=False)
    wait_until(lambda: engine.ranks[3].publisher.next_sequence > 100)
    engine.close()
    engine.close()
    assert threading.active_count() == before
    context.term()


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="no_such"):
        SimulatedEngine(no_such=1)
    assert EngineConfig().cache.block_size == 16

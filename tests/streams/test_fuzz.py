"""Whatever comes over the wire: no crash, no hang, no blow-up; the stream next to it notices nothing, and the
one that it came to finds back to the engine's truth and says what was wrong."""

from __future__ import annotations

import gc
import random
import threading
from array import array
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.simulator import SimulatedEngine
from streams.simulator.faults import LIVE_FAULTS, SNAPSHOT_FAULTS, Reply, SnapshotFault
from streams.simulator.messages import END_MARKER, Frames, sequence_frame
from streams.status import StreamState
from tests.streams.harness import Portal, rss_bytes
from tests.support.waiting import wait_until

MakeEngine = Callable[..., SimulatedEngine]
MIB = 1024 * 1024


class Scene:
    """Two streams that are followed: one gets what the test makes up, the other goes on beside it."""

    def __init__(self, portal: Portal, make_engine: MakeEngine) -> None:
        self.portal = portal
        self.victim = make_engine(seed=1, device_blocks=40, host_blocks=20, vllm_fields=True)
        self.neighbour = make_engine(seed=2, device_blocks=40, host_blocks=20)
        self.spec = self.victim.spec(instance_name="victim")
        self.neighbour_spec = self.neighbour.spec(instance_name="neighbour")
        self.victim.step(10)
        portal.follow_synchronized(self.spec, self.neighbour_spec)
        for engine in (self.victim, self.neighbour):
            engine.wait_for_subscribers()
        self._messages = self.neighbour.ranks[0].publisher.next_sequence

    @property
    def publisher(self) -> Any:
        return self.victim.ranks[0].publisher

    def good_payload(self) -> bytes:
        """A batch as the engine would send it; it changes the engine's cache, but is not sent."""
        rank = self.victim.ranks[0]
        return self.publisher.encode(rank._next_events())

    def heal(self) -> None:
        """Ask for a snapshot, as an operator would, and wait until the engine's truth is served."""
        self.victim.spoil_snapshots(None)
        self.portal.directory.resync(instance_name="victim")
        self.portal.wait_equals(self.spec, self.victim.truth)
        wait_until(lambda: self.publisher.subscribers, message="the victim is not subscribed to again")

    def check_neighbour(self) -> None:
        self.neighbour.step()
        self.portal.wait_sequence(self.neighbour_spec, self._messages)
        self._messages += 1
        assert self.portal.status(self.neighbour_spec).warning is None
        assert self.portal.losses(self.neighbour_spec) == []

    def finish(self) -> None:
        """The victim heals and goes on by itself; the neighbour was never touched."""
        self.heal()
        for _ in range(20):
            self.victim.step()
        self.portal.wait_equals(self.spec, self.victim.truth)
        assert self.portal.status(self.spec).state is StreamState.SYNCHRONIZED
        self.check_neighbour()
        self.portal.wait_equals(self.neighbour_spec, self.neighbour.truth)
        assert all("internal_error" not in error for error in self.portal.errors(self.spec))


@pytest.fixture
def scene(make_portal: Callable[..., Portal], make_engine: MakeEngine) -> Scene:
    return Scene(make_portal(max_message_bytes=MIB), make_engine)


@pytest.mark.parametrize("name", sorted(LIVE_FAULTS))
def test_each_named_live_fault_is_shown_and_healed(scene: Scene, name: str) -> None:
    scene.victim.send_malformed(name)
    codes = {
        "unknown_type": "warnings:unknown_event",
        "unknown_medium": "warnings:unknown_medium",
        "longer_topic": "warnings:other_topic",
        "oversized": "resyncs:disconnected",
        "other_topic": "messages",
        "deep_nesting": "resyncs:decode_error",
    }
    if name != "other_topic":  # which is not even delivered
        scene.portal.wait_counter(scene.spec, codes.get(name, "resyncs:decode_error"), 1)
    scene.check_neighbour()
    scene.finish()


MUTATIONS = ("flip", "cut", "insert", "repeat", "length", "value", "random")


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """A payload with one to four things wrong in it."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(data) or 1)
        match rng.choice(MUTATIONS):
            case "flip" if data:
                data[position] ^= 1 << rng.randrange(8)
            case "cut":
                del data[position:]
            case "insert":
                data[position:position] = rng.randbytes(rng.randint(1, 8))
            case "repeat":
                data[position:position] = data[position : position + rng.randint(1, 300)]
            case "length":
                marker = rng.choice(b"\xc6\xc9\xdb\xdd\xdf")
                data[position : position + 5] = bytes([marker]) + rng.choice(
                    (b"\xff" * 4, b"\x7f\xff\xff\xff")
                )
            case "value":
                data[position : position + 1] = rng.choice(
                    (b"\xc0", b"\xc3", b"\x90", b"\x80", b"\xa0", b"\xc1")
                )
            case "random":
                data = bytearray(rng.randbytes(rng.randint(0, 300)))
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
def test_broken_payloads_on_the_live_channel(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    before = rss_bytes()
    for _ in range(40):
        for _ in range(rng.randint(1, 3)):
            scene.publisher.publish_payload(mutated(scene.good_payload(), rng))
        if rng.random() < 0.3:
            scene.victim.step()
        scene.check_neighbour()
        scene.heal()
    scene.finish()
    gc.collect()
    assert rss_bytes() - before < 64 * MIB
    shown = [error for error in scene.portal.errors(scene.spec) if error.startswith("decode_error")]
    assert len(shown) > 10


@pytest.mark.parametrize("seed", range(3))
def test_broken_payloads_in_snapshots(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)

    def spoil(reply: list[Frames], _: random.Random) -> Reply:
        return Reply([[b"", reply[0][1], mutated(reply[0][2], rng)], reply[-1]])

    for number in range(40):
        scene.victim.spoil_snapshots(SnapshotFault("mutated", spoil), times=rng.randint(1, 2))
        before = scene.publisher.replay_requests
        scene.portal.directory.resync(instance_name="victim", drop=bool(number % 2))
        scene.publisher.wait_for_replay_requests(before + 1)
        scene.check_neighbour()
        scene.heal()
    scene.finish()
    assert any(error.startswith("decode_error") for error in scene.portal.errors(scene.spec))


@pytest.mark.parametrize("seed", range(3))
def test_wrong_frames_on_both_channels(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)

    def frame() -> bytes:
        sizes = (0, 1, 7, 8, 8, 9, 200)
        return rng.choice((rng.randbytes(rng.choice(sizes)), END_MARKER, sequence_frame(rng.randrange(50))))

    def frames() -> list[bytes]:
        return [frame() for _ in range(rng.choice((1, 2, 3, 3, 3, 4, 9, 100)))]

    def spoil(reply: list[Frames], _: random.Random) -> Reply:
        sets = [rng.choice((frames(), [b"", *frames()], *reply)) for _ in range(rng.randint(1, 5))]
        return Reply([*sets, reply[-1]])

    for _ in range(40):
        for _ in range(rng.randint(1, 3)):
            scene.publisher.send_frames([scene.publisher.topic, *frames()])
        scene.victim.spoil_snapshots(SnapshotFault("frames", spoil), times=1)
        scene.portal.directory.resync(instance_name="victim")
        scene.check_neighbour()
        scene.heal()
    scene.finish()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
FIELDS = {
    "block_hashes": st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=33), max_size=4),
    "parent_block_hash": st.none() | st.integers(0, 5) | st.binary(max_size=9),
    "token_ids": st.lists(st.integers(-5, 2**32 + 5), max_size=64),
    "block_size": st.sampled_from([16, 0, 1, 2**40]),
    "medium": st.sampled_from(["gpu", "cpu", "GPU", "disk", None]),
    "lora_id": st.none() | st.integers(-1, 3),
    "extra_keys": st.none() | st.lists(JUNK, max_size=3),
    "group_idx": st.none() | st.integers(-1, 3),
    "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]),
}
EVENT = st.fixed_dictionaries(
    {"type": TYPES | JUNK}, optional={name: field | JUNK for name, field in FIELDS.items()}
)
BATCH = st.tuples(
    st.floats() | st.integers(-(2**63), 2**64 - 1), st.lists(EVENT | JUNK, max_size=4), st.just(0)
)


def test_batches_of_plausible_nonsense(scene: Scene) -> None:
    @settings(
        max_examples=120,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(batch=BATCH | JUNK)
    def check(batch: Any) -> None:
        scene.publisher.publish_payload(msgpack.packb(batch))
        scene.check_neighbour()
        scene.heal()

    check()
    scene.finish()


def test_plausible_nonsense_in_snapshots(scene: Scene) -> None:
    @settings(
        max_examples=80,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(batch=BATCH | JUNK)
    def check(batch: Any) -> None:
        payload = msgpack.packb(batch)
        fault = SnapshotFault("nonsense", lambda reply, _: Reply([[b"", reply[0][1], payload], reply[-1]]))
        scene.victim.spoil_snapshots(fault, times=1)
        before = scene.publisher.replay_requests
        scene.portal.directory.resync(instance_name="victim")
        scene.publisher.wait_for_replay_requests(before + 1)
        scene.heal()

    check()
    scene.finish()


def array_of(count: int) -> bytes:
    """The header of a MessagePack array of that many elements."""
    return b"\xdd" + count.to_bytes(4, "big")


def batch_of(events: bytes) -> bytes:
    return b"\x93\xcb" + bytes(8) + events + b"\x00"


def stored_with(field: str, value: bytes) -> bytes:
    """A good `BlockStored` with one more, or another, field."""
    fields = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16}
    fields["token_ids"] = list(range(16))
    fields.pop(field, None)
    body = b"".join(msgpack.packb(name) + msgpack.packb(value) for name, value in fields.items())
    return bytes([0x80 + len(fields) + 1]) + body + msgpack.packb(field) + value


ROOM = 8 * MIB - 1000
SMALL_EVENT = msgpack.packb({"type": "X"})
HOSTILE = {
    "millions of integers as events": lambda: batch_of(array_of(ROOM) + bytes(ROOM)),
    "millions of empty maps as events": lambda: batch_of(array_of(ROOM) + b"\x80" * ROOM),
    "very many events of an unknown type": lambda: batch_of(
        array_of(ROOM // 20) + SMALL_EVENT * (ROOM // 20)
    ),
    "millions of empty lists as extra keys": lambda: batch_of(
        b"\x91" + stored_with("extra_keys", array_of(ROOM) + b"\x90" * ROOM)
    ),
    "millions of empty lists as lora id": lambda: batch_of(
        b"\x91" + stored_with("lora_id", array_of(ROOM) + b"\x90" * ROOM)
    ),
    "millions of empty lists as tokens": lambda: batch_of(
        b"\x91" + stored_with("token_ids", array_of(ROOM) + b"\x90" * ROOM)
    ),
    "millions of empty lists in one hash": lambda: batch_of(
        b"\x91" + stored_with("block_hashes", b"\x91" + array_of(ROOM) + b"\x90" * ROOM)
    ),
    "a list as the key of a map": lambda: batch_of(
        b"\x91" + stored_with("extra_keys", b"\x91\x81\x91\x01" + msgpack.packb(bytes(MIB)))
    ),
    "8 MiB of one unknown field": lambda: batch_of(b"\x91" + stored_with("x", msgpack.packb(bytes(ROOM)))),
    "deep nesting of 8 MiB": lambda: b"\x91" * ROOM,
    "a million copies of unknown blocks": lambda: batch_of(
        b"\x91\x83"
        + msgpack.packb("type")
        + msgpack.packb("BlockStored")
        + msgpack.packb("token_ids")
        + b"\x90"
        + msgpack.packb("block_hashes")
        + array_of(ROOM // 5)
        + spread(ROOM // 5)
    ),
}


def spread(count: int) -> bytes:
    """That many different 32-bit hashes."""
    words = array("I", range(2**30, 2**30 + count))
    words.byteswap()
    data = bytearray(b"\xce" * (5 * count))
    raw = words.tobytes()
    for byte in range(4):
        data[byte + 1 :: 5] = raw[byte::4]
    return bytes(data)


class PeakMemory:
    """The most resident memory above the start, sampled while the block runs."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._start = rss_bytes()
        self.grown = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.grown = max(self.grown, rss_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_8_mib_message_costs_bounded_memory(
    portal: Portal, make_engine: MakeEngine, name: str
) -> None:
    scene = Scene(portal, make_engine)
    payload = HOSTILE[name]()
    assert len(payload) <= 8 * MIB - 100
    with PeakMemory() as memory:
        scene.publisher.publish_payload(payload)
        scene.portal.wait_counter(scene.spec, "messages", 1)
        scene.check_neighbour()
        fault = SnapshotFault("hostile", lambda reply, _: Reply([[b"", reply[0][1], payload], reply[-1]]))
        scene.victim.spoil_snapshots(fault, times=1)
        before = scene.publisher.replay_requests
        scene.portal.directory.resync(instance_name="victim", drop=True)
        scene.publisher.wait_for_replay_requests(before + 1)
        scene.check_neighbour()
        scene.heal()
    assert memory.grown < 224 * MIB
    scene.finish()


def test_a_message_of_very_many_frames_is_refused(scene: Scene) -> None:
    for size in (0, 1, 8):
        scene.publisher.send_frames([scene.publisher.topic, *[bytes(size)] * 50_000])
        scene.portal.wait_counter(scene.spec, "resyncs:decode_error", 1)
        scene.check_neighbour()
        scene.heal()
    scene.finish()


def test_a_flood_of_tiny_messages_of_rubbish(scene: Scene) -> None:
    with PeakMemory() as memory:
        for _ in range(3):
            for number in range(5_000):
                scene.publisher.send_frames([scene.publisher.topic, *[b"x"] * (number % 4)])
            scene.check_neighbour()
        scene.publisher.flush()
    assert memory.grown < 64 * MIB
    scene.portal.wait_error(scene.spec, "decode_error")
    scene.finish()


def test_snapshot_faults_one_after_the_other_are_survived(scene: Scene) -> None:
    rng = random.Random(4)
    names = [name for name in SNAPSHOT_FAULTS if name not in ("silent", "no_end", "slow")] * 3
    rng.shuffle(names)
    for name in names:
        scene.victim.spoil_snapshots(name, times=1)
        before = scene.publisher.replay_requests
        scene.portal.directory.resync(instance_name="victim", drop=rng.random() < 0.5)
        scene.publisher.wait_for_replay_requests(before + 1)
        scene.check_neighbour()
        scene.heal()
    scene.finish()

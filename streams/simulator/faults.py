"""Ways to break the protocol on purpose, as pure functions from a good message to bad ones.

`LIVE_FAULTS` builds frames for the live channel, `SNAPSHOT_FAULTS` spoils a snapshot reply. Each fault has
one name, which tests, the command and its control channel share, and one sentence of help.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from streams.simulator.messages import (
    END_MARKER,
    Frames,
    block_stored,
    encode_batch,
    live_frames,
    sequence_frame,
)

OVERSIZED_BYTES = 9 * 1024 * 1024
"""Default size of an oversized message: above the portal's default limit of 8 MiB."""
NESTING = 100_000
"""Depth of a deeply nested payload; more than any recursive decoder's stack."""


@dataclass(frozen=True, slots=True)
class Good:
    """The good message that a live fault starts from."""

    topic: bytes
    sequence: int
    dp_rank: int
    block_size: int
    rng: random.Random

    def batch(self, *events: Any) -> bytes:
        return encode_batch(events, timestamp=0.0, dp_rank=self.dp_rank)

    def store(self, **changes: Any) -> dict[str, Any]:
        tokens = [self.rng.randrange(150_000) for _ in range(self.block_size)]
        return block_stored([self.rng.getrandbits(64)], None, tokens, self.block_size) | changes

    def with_payload(self, payload: bytes) -> Frames:
        return live_frames(self.topic, self.sequence, payload)

    def with_event(self, **changes: Any) -> Frames:
        return self.with_payload(self.batch(self.store(**changes)))


@dataclass(frozen=True, slots=True)
class LiveFault:
    """A malformed or foreign live message."""

    help: str
    build: Callable[[Good], Frames]
    counts: bool = True
    """Whether the message takes a sequence number, as a message of this publisher does."""


def _oversized_batch(good: Good) -> bytes:
    padding = bytes(OVERSIZED_BYTES)
    return bytes(msgpack.packb([0.0, [good.store()], good.dp_rank, padding]))


def _half(payload: bytes) -> bytes:
    return payload[: len(payload) // 2]


LIVE_FAULTS: Mapping[str, LiveFault] = {
    "random": LiveFault(
        "random bytes instead of a payload", lambda good: good.with_payload(good.rng.randbytes(200))
    ),
    "empty": LiveFault("an empty payload", lambda good: good.with_payload(b"")),
    "truncated": LiveFault(
        "a payload cut in half", lambda good: good.with_payload(_half(good.batch(good.store())))
    ),
    "trailing_bytes": LiveFault(
        "bytes after the MessagePack value",
        lambda good: good.with_payload(good.batch(good.store()) + b"\x01"),
    ),
    "huge_array": LiveFault(
        "an array that claims 2**32-1 elements", lambda good: good.with_payload(b"\xdd\xff\xff\xff\xff")
    ),
    "huge_map": LiveFault(
        "a map that claims 2**32-1 entries",
        lambda good: good.with_payload(b"\x93\xcb" + bytes(8) + b"\x91\xdf\xff\xff\xff\xff"),
    ),
    "huge_bytes": LiveFault(
        "a byte string that claims 4 GiB",
        lambda good: good.with_payload(b"\x93\xcb" + bytes(8) + b"\xc6\xff\xff\xff\xff"),
    ),
    "deep_nesting": LiveFault(
        f"arrays nested {NESTING:,} deep", lambda good: good.with_payload(b"\x91" * NESTING + b"\x90")
    ),
    "oversized": LiveFault(
        f"a well-formed batch of {OVERSIZED_BYTES:,} bytes",
        lambda good: good.with_payload(_oversized_batch(good)),
    ),
    "not_a_list": LiveFault(
        "a map instead of the batch list", lambda good: good.with_payload(msgpack.packb({"events": []}))
    ),
    "event_not_a_map": LiveFault(
        "an integer instead of an event", lambda good: good.with_payload(good.batch(7))
    ),
    "tokens_not_a_list": LiveFault("`token_ids` as a map", lambda good: good.with_event(token_ids={1: 2})),
    "token_is_text": LiveFault(
        "one token ID as text",
        lambda good: good.with_event(token_ids=["a", *range(good.block_size - 1)]),
    ),
    "hash_is_float": LiveFault("a block hash of 1.5", lambda good: good.with_event(block_hashes=[1.5])),
    "hashes_are_text": LiveFault(
        "a block hash list that is text", lambda good: good.with_event(block_hashes="ab")
    ),
    "timestamp_is_text": LiveFault(
        "a timestamp that is text",
        lambda good: good.with_payload(bytes(msgpack.packb(["now", [good.store()], good.dp_rank]))),
    ),
    "rank_is_text": LiveFault(
        "a rank that is text",
        lambda good: good.with_payload(bytes(msgpack.packb([0.0, [good.store()], str(good.dp_rank)]))),
    ),
    "token_count": LiveFault(
        "one token fewer than the blocks need",
        lambda good: good.with_event(token_ids=list(range(good.block_size - 1)) or [1, 2]),
    ),
    "block_size": LiveFault(
        "blocks of another size",
        lambda good: good.with_event(
            block_size=good.block_size + 1, token_ids=list(range(good.block_size + 1))
        ),
    ),
    "wrong_rank": LiveFault(
        "the batch of another rank",
        lambda good: good.with_payload(encode_batch([good.store()], timestamp=0.0, dp_rank=good.dp_rank + 1)),
    ),
    "short_sequence": LiveFault(
        "a sequence frame of 7 bytes",
        lambda good: [good.topic, bytes(7), good.batch(good.store())],
    ),
    "long_sequence": LiveFault(
        "a sequence frame of 9 bytes",
        lambda good: [good.topic, bytes(9), good.batch(good.store())],
    ),
    "two_frames": LiveFault("no payload frame", lambda good: [good.topic, sequence_frame(good.sequence)]),
    "four_frames": LiveFault(
        "one frame too many", lambda good: [*good.with_event(), good.batch(good.store())]
    ),
    "unknown_type": LiveFault(
        "an event type that does not exist (to be skipped, not an error)",
        lambda good: good.with_event(type="BlockTeleported"),
    ),
    "unknown_medium": LiveFault(
        "a store in an unknown medium (to be skipped, not an error)",
        lambda good: good.with_event(medium="TAPE"),
    ),
    "other_topic": LiveFault(
        "a message under another topic",
        lambda good: live_frames(b"other", 0, good.batch(good.store())),
        counts=False,
    ),
    "longer_topic": LiveFault(
        "a message under a topic that merely starts with the right one",
        lambda good: live_frames(good.topic + b"-2", 0, good.batch(good.store())),
        counts=False,
    ),
}
"""Everything that can be wrong with one live message, by name."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One snapshot reply: frame sets in order, each sent `delay_s` after the one before."""

    frames: Sequence[Frames]
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SnapshotFault:
    """A way to spoil a snapshot reply."""

    help: str
    spoil: Callable[[list[Frames], random.Random], Reply]


def slow(delay_s: float) -> SnapshotFault:
    """Every frame set, the end marker included, comes `delay_s` late."""
    return SnapshotFault(
        f"each frame set {delay_s:g} s late", lambda reply, rng: Reply(reply, delay_s=delay_s)
    )


def stale(behind: int) -> SnapshotFault:
    """The right content under a watermark that is `behind` messages too old (not below 0)."""

    def spoil(reply: list[Frames], rng: random.Random) -> Reply:
        watermark = max(0, int.from_bytes(reply[0][1], "big") - behind)
        return Reply([*([b"", sequence_frame(watermark), part[2]] for part in reply[:-1]), reply[-1]])

    return SnapshotFault(f"a watermark {behind} messages too old", spoil)


def oversized(size: int) -> SnapshotFault:
    """The right content, padded with a trailing element to a payload of at least `size` bytes."""

    def spoil(reply: list[Frames], rng: random.Random) -> Reply:
        batch = msgpack.unpackb(reply[0][2], strict_map_key=False)
        first = [b"", reply[0][1], msgpack.packb([*batch, bytes(size)])]
        return Reply([first, *reply[1:]])

    return SnapshotFault(f"padded to at least {size:,} bytes", spoil)


def _with_payload(change: Callable[[bytes, random.Random], bytes]) -> Callable[..., Reply]:
    def spoil(reply: list[Frames], rng: random.Random) -> Reply:
        return Reply([[b"", reply[0][1], change(reply[0][2], rng)], *reply[1:]])

    return spoil


def _mixed_watermarks(reply: list[Frames], rng: random.Random) -> Reply:
    watermark = int.from_bytes(reply[0][1], "big")
    return Reply([reply[0], [b"", sequence_frame(watermark + 1), reply[0][2]], reply[-1]])


SNAPSHOT_FAULTS: Mapping[str, SnapshotFault] = {
    "silent": SnapshotFault("no answer at all", lambda reply, rng: Reply([])),
    "no_end": SnapshotFault("no end marker", lambda reply, rng: Reply(reply[:-1])),
    "wrong_end": SnapshotFault(
        "an end marker of 2**64-2",
        lambda reply, rng: Reply([*reply[:-1], [b"", sequence_frame(2**64 - 2), b""]]),
    ),
    "short_end": SnapshotFault(
        "an end marker of 7 bytes", lambda reply, rng: Reply([*reply[:-1], [b"", END_MARKER[:7], b""]])
    ),
    "end_only": SnapshotFault("an end marker without a snapshot", lambda reply, rng: Reply(reply[-1:])),
    "truncated": SnapshotFault("a payload cut in half", _with_payload(lambda payload, rng: _half(payload))),
    "random": SnapshotFault(
        "random bytes instead of a payload", _with_payload(lambda payload, rng: rng.randbytes(500))
    ),
    "trailing_bytes": SnapshotFault(
        "bytes after the MessagePack value", _with_payload(lambda payload, rng: payload + b"\x01")
    ),
    "huge_array": SnapshotFault(
        "an array that claims 2**32-1 elements",
        _with_payload(lambda payload, rng: b"\xdd\xff\xff\xff\xff"),
    ),
    "deep_nesting": SnapshotFault(
        f"arrays nested {NESTING:,} deep", _with_payload(lambda payload, rng: b"\x91" * NESTING + b"\x90")
    ),
    "wrong_types": SnapshotFault(
        "a map instead of the batch list",
        _with_payload(lambda payload, rng: bytes(msgpack.packb({"events": 1}))),
    ),
    "short_watermark": SnapshotFault(
        "a watermark of 7 bytes",
        lambda reply, rng: Reply([[b"", reply[0][1][:7], reply[0][2]], *reply[1:]]),
    ),
    "mixed_watermarks": SnapshotFault("frame sets with two different watermarks", _mixed_watermarks),
    "two_frames": SnapshotFault(
        "frame sets without the empty delimiter", lambda reply, rng: Reply([part[1:] for part in reply])
    ),
    "oversized": oversized(OVERSIZED_BYTES),
    "slow": slow(3.0),
    "stale": stale(10),
}
"""Everything that can be wrong with a snapshot reply, by name; the adjustable ones with defaults."""

"""What the simulated engine puts on the wire: event maps, batches and frames.

Written from the protocol's side of the engine and apart from the portal's decoder, so that the two check
each other. Encoding is `msgpack`; everything here is pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgpack

Event = dict[str, Any]
"""One event as the map that goes on the wire."""
Frames = list[bytes]
"""One multipart message without routing identity."""
HashForm = Literal["unsigned", "signed", "bytes"]
"""How block hashes are written: 0 … 2**64-1, two's complement, or 32 bytes whose last 8 are the hash."""

SEQUENCE_END = 2**64 - 1
END_MARKER = SEQUENCE_END.to_bytes(8, "big")
"""Sequence frame that ends a snapshot reply; never the sequence of a message."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The full state of one rank: events to apply to an empty view, and the watermark they stand at."""

    watermark: int
    events: Sequence[Event]


def block_stored(
    block_hashes: Iterable[int | bytes],
    parent_block_hash: int | bytes | None,
    token_ids: Iterable[int],
    block_size: int,
    medium: str | None = "gpu",
    **fields: Any,
) -> Event:
    """A `BlockStored` event; `fields` are further map entries such as `lora_id` or `extra_keys`."""
    return {
        "type": "BlockStored",
        "block_hashes": list(block_hashes),
        "parent_block_hash": parent_block_hash,
        "token_ids": list(token_ids),
        "block_size": block_size,
        "medium": medium,
        **fields,
    }


def host_copy(block_hashes: Iterable[int | bytes], medium: str = "cpu", **fields: Any) -> Event:
    """A tokenless `BlockStored`: copies of known blocks, announced with `block_size` 0 as engines do."""
    return block_stored(block_hashes, None, (), 0, medium, **fields)


def block_removed(block_hashes: Iterable[int | bytes], medium: str | None = "gpu", **fields: Any) -> Event:
    """A `BlockRemoved` event for one tier."""
    return {"type": "BlockRemoved", "block_hashes": list(block_hashes), "medium": medium, **fields}


def all_blocks_cleared() -> Event:
    """Both tiers of the rank are empty from here on."""
    return {"type": "AllBlocksCleared"}


def hash_on_wire(block_hash: int, form: HashForm) -> int | bytes:
    """An unsigned 64-bit `block_hash` in one of the forms that engines use."""
    if form == "unsigned":
        return block_hash
    if form == "signed":
        return block_hash - 2**64 if block_hash >= 2**63 else block_hash
    tail = block_hash.to_bytes(8, "big")
    return hashlib.blake2b(tail, digest_size=24).digest() + tail


def encode_batch(events: Sequence[Event], *, timestamp: float, dp_rank: int | None = 0) -> bytes:
    """`[timestamp, events, dp_rank]` as one MessagePack value; `timestamp` in seconds."""
    return bytes(msgpack.packb([timestamp, list(events), dp_rank]))


def sequence_frame(sequence: int) -> bytes:
    """8 bytes, unsigned, big-endian."""
    return sequence.to_bytes(8, "big")


def live_frames(topic: bytes, sequence: int, payload: bytes) -> Frames:
    """`topic | sequence | payload`."""
    return [topic, sequence_frame(sequence), payload]


def snapshot_frames(
    snapshot: Snapshot, *, timestamp: float, dp_rank: int | None = 0, parts: int = 1
) -> list[Frames]:
    """The frame sets of one snapshot reply, end marker last.

    The events are spread in order over `parts` payloads that carry the same watermark; there may be more
    parts than events, some of them empty.
    """
    watermark = sequence_frame(snapshot.watermark)
    total = len(snapshot.events)
    bounds = [total * i // parts for i in range(parts + 1)]
    reply = []
    for start, stop in pairwise(bounds):
        payload = encode_batch(snapshot.events[start:stop], timestamp=timestamp, dp_rank=dp_rank)
        reply.append([b"", watermark, payload])
    return [*reply, [b"", END_MARKER, b""]]

"""Fills an index directly, without sockets, through the same calls that a subscriber makes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from streams.core.events import BlockHash, BlockStored, Tier
from streams.core.sequence import Cursor
from streams.core.view import as_orphan
from streams.index import BoardEntry, Index, IndexedView
from streams.spec import StreamSpec

BLOCK_SIZE = 128
BLOCK_BYTES = BLOCK_SIZE * 4
PER_EVENT = 32


def random_tokens(blocks: int) -> bytes:
    """Packed token IDs below 2**17 for that many blocks."""
    words = bytearray(os.urandom(blocks * BLOCK_BYTES))
    words[3::4] = bytes(len(words) // 4)
    words[2::4] = bytes(value & 1 for value in words[2::4])
    return bytes(words)


def stored(tokens: bytes, parent: int | None = None) -> Iterator[BlockStored]:
    """Events of PER_EVENT blocks each that store packed tokens as one prompt."""
    width = PER_EVENT * BLOCK_BYTES
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        raw = os.urandom(8 * (len(part) // BLOCK_BYTES))
        hashes = tuple(BlockHash(int.from_bytes(raw[i : i + 8], "big")) for i in range(0, len(raw), 8))
        yield BlockStored(hashes, None if parent is None else BlockHash(parent), part, Tier.DEVICE)
        parent = hashes[-1]


def new_stream(index: Index, name: str, max_blocks: int = 300_000) -> IndexedView:
    """A served, empty view."""
    spec = StreamSpec(name, 0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", BLOCK_SIZE, incarnation="i")
    view = index.new_view(spec, max_blocks, Cursor(0, 0.0))
    if view is None:
        raise RuntimeError("no slot is free")
    index.admit(BoardEntry(spec, view, None))
    return view


def fill(index: Index, view: IndexedView, tokens: bytes) -> None:
    for event in stored(tokens):
        with index.gate:
            view.apply((event,), as_orphan)

"""Bytes of the wire protocol → events. Nothing here keeps state between calls.

A payload is one MessagePack value `[timestamp, events, dp_rank]`, an event is a map with a `type`;
docs/protocol.md describes every field. Decoding happens in bounded steps, so that a caller can let
other threads run between them: a payload is first split into raw events without building objects,
then each event is decoded on its own, and an event with very many tokens piece by piece.

No allocation follows a length that the payload merely claims: msgspec grows lists as elements
arrive, and MessagePack's skip builds nothing; both refuse deep nesting.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from xxhash import xxh3_128_digest

from streams.core.content_key import pack_tokens
from streams.core.errors import DecodeError
from streams.core.events import (
    MAX_TOKEN_ID,
    NO_BLOCKS,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    Skipped,
    SkippedKind,
    Tier,
)

SEQUENCE_BYTES = 8
END_SEQUENCE = 2**64 - 1
"""Closes a snapshot reply; never a message's own sequence."""

SPLIT_BYTES = 1024 * 1024
"""Payloads up to this size are split in one call (about 1 ms); larger ones slice by slice."""

SLICE_BYTES = 256 * 1024
BIG_EVENT_BYTES = 256 * 1024
"""An event above this size has its tokens decoded PIECE by PIECE."""

PIECE = 4096
_MASK_64 = 2**64 - 1
_TIERS = {"gpu": Tier.DEVICE, "cpu": Tier.HOST}
_REUSABLE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, msgpack.UnpackException, ValueError)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a stream's batches must agree with."""

    block_size: int
    dp_rank: int = 0


class Warnings:
    """What was skipped in one batch: kind → how often, and the last sentence about it."""

    def __init__(self) -> None:
        self._kinds: dict[str, Skipped] = {}

    def note(self, kind: str, sentence: str) -> None:
        before = self._kinds.get(kind)
        self._kinds[kind] = Skipped(kind, sentence, 1 if before is None else before.count + 1)

    def summary(self) -> tuple[Skipped, ...]:
        return tuple(self._kinds.values())


class _RawBatch(msgspec.Struct, array_like=True):
    timestamp: float | int
    events: list[msgspec.Raw]
    dp_rank: int | None = None


class _RawEvent(msgspec.Struct):
    type: str
    block_hashes: list[int | bytes] | UnsetType = UNSET
    parent_block_hash: int | bytes | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    block_size: Any = None
    medium: str | None = None
    lora_id: Any = None
    lora_name: Any = None
    extra_keys: list[Any] | None = None
    kv_cache_spec_kind: str | None = None
    group_idx: int | None = None


_T = TypeVar("_T")
_Steps = Generator[tuple[Event, ...], None, _T]

_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_EVENT = msgspec.msgpack.Decoder(_RawEvent)
_FIELDS = frozenset(_RawEvent.__struct_fields__)
_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_sequence(frame: bytes | memoryview) -> int:
    """A sequence frame: exactly 8 bytes, unsigned, big-endian."""
    if len(frame) != SEQUENCE_BYTES:
        raise DecodeError(f"the sequence frame has {len(frame)} bytes, it must have {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def encode_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """What a batch is beside its events; known for certain once all of it is decoded."""

    timestamp: float
    warnings: tuple[Skipped, ...]


DecodeSteps = Generator[tuple[Event, ...], None, BatchEnd]


def decode_batch(payload: bytes | memoryview, expected: Expected) -> Batch:
    """Decode a whole payload at once. Raises DecodeError, and then nothing of it counts."""
    events: list[Event] = []
    steps = decode_steps(payload, expected)
    while True:
        try:
            events.extend(next(steps))
        except StopIteration as stop:
            end: BatchEnd = stop.value
            return Batch(end.timestamp, tuple(events), end.warnings)


def decode_steps(payload: bytes | memoryview, expected: Expected) -> DecodeSteps:
    """Decode in bounded steps: yields the events decoded since the step before (often none).

    Raises DecodeError, at any step: until the last one it is not known that the batch is sound.
    """
    try:
        header, raw_events = yield from _split(payload)
        _check_rank(header, expected.dp_rank)
        events: list[Event] = []
        warnings = Warnings()
        size = 0
        for position, raw in enumerate(raw_events):
            try:
                raw_event = yield from _read_event(raw, warnings)
                if raw_event is not None:
                    events.extend(_build(raw_event, expected, warnings))
            except (*_MALFORMED, DecodeError) as error:
                raise DecodeError(f"event {position}: {error}") from None
            size += len(memoryview(raw))
            if size >= SLICE_BYTES:
                yield tuple(events)
                events.clear()
                size = 0
        yield tuple(events)
    except _MALFORMED as error:
        raise DecodeError(f"the payload is not a batch: {error}") from None
    return BatchEnd(float(header.timestamp), warnings.summary())


def body_digest(payload: bytes | memoryview) -> bytes:
    """A digest of a payload without its timestamp: equal bodies have equal digests.

    The outer array's header and the timestamp take at most 14 bytes; anything that does not start
    like a batch is digested whole.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=64)
    unpacker.feed(payload[:32])
    try:
        unpacker.read_array_header()
        unpacker.skip()
        start = unpacker.tell()
    except (msgpack.UnpackException, ValueError):
        start = 0
    return xxh3_128_digest(memoryview(payload)[start:])


def _check_rank(header: _RawBatch, dp_rank: int) -> None:
    if header.dp_rank is None and dp_rank == 0:
        return
    if header.dp_rank != dp_rank:
        raise DecodeError(f"the batch is of dp_rank {header.dp_rank}, this stream follows rank {dp_rank}")


# Splitting a payload into raw events.


def _split(payload: bytes | memoryview) -> _Steps[tuple[_RawBatch, list[Any]]]:
    """Yields between slices; returns (header, raw events)."""
    if len(payload) <= SPLIT_BYTES:
        batch = _BATCH.decode(payload)
        return batch, batch.events
    spans = _Spans(payload)
    timestamp = yield from spans.take(msgspec.msgpack.Decoder(float | int))
    count = yield from spans.array_header()
    raw_events: list[Any] = []
    while len(raw_events) < count:
        raw_events.append((yield from spans.raw()))
    dp_rank = None
    if spans.outer > 2:
        dp_rank = yield from spans.take(msgspec.msgpack.Decoder(int | None))
        for _ in range(spans.outer - 3):
            yield from spans.raw()
    spans.check_end()
    return _RawBatch(timestamp, [], dp_rank), raw_events


class _Spans:
    """Walks a large payload slice by slice and tells where each value begins and ends."""

    def __init__(self, payload: bytes | memoryview) -> None:
        self._view = memoryview(payload)
        self._fed = 0
        self._unpacker = msgpack.Unpacker(max_buffer_size=len(payload))
        self._feed()
        self.outer = self._unpacker.read_array_header()
        if self.outer < 2:
            raise DecodeError(f"the batch has {self.outer} elements, it must have at least 2")

    def _feed(self) -> None:
        if self._fed >= len(self._view):
            raise DecodeError("the payload ends inside a value")
        self._unpacker.feed(self._view[self._fed : self._fed + SLICE_BYTES])
        self._fed += SLICE_BYTES

    def array_header(self) -> _Steps[int]:
        while True:
            try:
                return int(self._unpacker.read_array_header())
            except msgpack.OutOfData:
                self._feed()
                yield ()

    def raw(self) -> _Steps[memoryview]:
        start = self._unpacker.tell()
        while True:
            try:
                self._unpacker.skip()
            except msgpack.OutOfData:
                self._feed()
                yield ()
            else:
                return self._view[start : self._unpacker.tell()]

    def take(self, decoder: msgspec.msgpack.Decoder[Any]) -> _Steps[Any]:
        return decoder.decode((yield from self.raw()))

    def check_end(self) -> None:
        if self._unpacker.tell() != len(self._view):
            raise DecodeError("bytes follow the end of the batch")


# One raw event → its fields.


def _read_event(raw: Any, warnings: Warnings) -> _Steps[_RawEvent | None]:
    """Returns the event's fields, or None for a type that this version does not know."""
    event: _RawEvent | None
    if len(memoryview(raw)) > BIG_EVENT_BYTES:
        event = yield from _read_big_event(raw)
    else:
        try:
            event = _EVENT.decode(raw)
        except msgspec.ValidationError:
            event = _read_odd_event(raw)
    if event is not None and event.type in _TYPES:
        return event
    name = "" if event is None else event.type
    warnings.note("unknown_event", f"an event of the unknown type {name[:64]!r} was skipped")
    return None


def _read_odd_event(raw: Any) -> _RawEvent | None:
    """An event that is not what we expect may be newer than we are: only known types must fit."""
    fields = msgspec.msgpack.decode(raw, strict=False)
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise DecodeError("an event must be a map with a text field `type`")
    if fields["type"] not in _TYPES:
        return _RawEvent(type=fields["type"])
    return msgspec.convert({key: fields[key] for key in fields if key in _FIELDS}, _RawEvent)


def _read_big_event(raw: Any) -> _Steps[_RawEvent]:
    """The same as one decode call, but with a pause after every PIECE of a long list."""
    view = memoryview(raw)
    unpacker = msgpack.Unpacker(max_buffer_size=len(view), strict_map_key=False)
    for start in range(0, len(view), SLICE_BYTES):
        unpacker.feed(view[start : start + SLICE_BYTES])
        yield ()
    fields: dict[str, Any] = {}
    for _ in range(unpacker.read_map_header()):
        name = unpacker.unpack()
        if name in ("token_ids", "block_hashes"):
            fields[name] = yield from _read_long_list(unpacker, name)
        elif isinstance(name, str) and name in _FIELDS:
            fields[name] = unpacker.unpack()
        else:
            unpacker.skip()
    tokens = fields.pop("token_ids", UNSET)
    event = msgspec.convert(fields, _RawEvent)
    event.token_ids = tokens
    return event


def _read_long_list(unpacker: msgpack.Unpacker, name: str) -> _Steps[list[Any]]:
    length = unpacker.read_array_header()
    allowed = {int} if name == "token_ids" else {int, bytes}
    pieces: list[list[Any]] = []
    for start in range(0, length, PIECE):
        piece = [unpacker.unpack() for _ in range(min(PIECE, length - start))]
        if not allowed.issuperset(map(type, piece)):
            raise DecodeError(f"{name} must hold only {' or '.join(t.__name__ for t in allowed)}")
        pieces.append(piece)
        yield ()
    return list(chain.from_iterable(pieces))


# Fields → event.


def _build(raw: _RawEvent, expected: Expected, warnings: Warnings) -> tuple[Event, ...]:
    """The event, or nothing for a removal that concerns no tier of ours."""
    if raw.type == "AllBlocksCleared":
        return (AllBlocksCleared(),)
    if raw.block_hashes is UNSET:
        raise DecodeError(f"{raw.type} has no block_hashes")
    kind = raw.kv_cache_spec_kind
    if kind is not None and kind not in _REUSABLE_KINDS:
        warnings.note("skipped_kind", f"blocks of the kind {kind[:64]!r} make no reusable prefix")
        return (SkippedKind(kind, raw.group_idx if raw.type == "BlockStored" else None),)
    tier = _tier(raw, warnings)
    hashes = tuple([_block_hash(value) for value in raw.block_hashes])
    if raw.type == "BlockRemoved":
        return () if tier is None else (BlockRemoved(hashes, tier, raw.group_idx),)
    return (_stored(raw, hashes, tier, expected),)


def _tier(raw: _RawEvent, warnings: Warnings) -> Tier | None:
    if raw.medium is None:
        return Tier.DEVICE
    tier = _TIERS.get(raw.medium.lower())
    if tier is None:
        where = f"the unknown medium {raw.medium[:64]!r}"
        warnings.note("unknown_medium", f"a {raw.type} in {where} is held nowhere")
    return tier


def _block_hash(value: int | bytes) -> BlockHash:
    if isinstance(value, int):
        return BlockHash(value & _MASK_64)
    if not value:
        raise DecodeError("a block hash must not be empty")
    return BlockHash(int.from_bytes(value[-8:], "big"))


def _stored(
    raw: _RawEvent, hashes: tuple[BlockHash, ...], tier: Tier | None, expected: Expected
) -> BlockStored:
    if raw.token_ids is UNSET:
        raise DecodeError("BlockStored has no token_ids")
    parent = None
    if raw.parent_block_hash is not UNSET and raw.parent_block_hash is not None:
        parent = _block_hash(raw.parent_block_hash)
    opaque = _context(raw, len(hashes))
    tokens = b""
    if raw.token_ids:
        _check_shape(raw, len(hashes), expected.block_size)
        tokens, odd = _pack(raw.token_ids, expected.block_size)
        opaque |= odd
    return BlockStored(
        hashes, parent, tokens, tier, opaque, raw.group_idx, names_kind=raw.kv_cache_spec_kind is not None
    )


def _check_shape(raw: _RawEvent, blocks: int, block_size: int) -> None:
    if raw.parent_block_hash is UNSET:
        raise DecodeError("BlockStored has no parent_block_hash (nil for a first block)")
    if type(raw.block_size) is not int or raw.block_size != block_size:
        raise DecodeError(f"block_size is {raw.block_size!r:.40}, this stream is configured for {block_size}")
    if len(raw.token_ids) != blocks * block_size:  # type: ignore[arg-type]
        raise DecodeError(
            f"token_ids holds {len(raw.token_ids)} tokens, "  # type: ignore[arg-type]
            f"{blocks} blocks of {block_size} need {blocks * block_size}"
        )


def _context(raw: _RawEvent, blocks: int) -> frozenset[int]:
    """Positions of the blocks whose content depends on more than their text."""
    if raw.lora_id is not None or raw.lora_name not in (None, ""):
        return frozenset(range(blocks))
    if raw.extra_keys is None:
        return NO_BLOCKS
    if len(raw.extra_keys) != blocks:
        return frozenset(range(blocks))
    return frozenset(position for position, own in enumerate(raw.extra_keys) if own is not None)


def _pack(token_ids: list[int], block_size: int) -> tuple[bytes, frozenset[int]]:
    """Packed tokens, and the positions of blocks with a token ID outside 0 ... 2**31-1."""
    try:
        tokens = pack_tokens(token_ids)
    except OverflowError:
        odd_id = MAX_TOKEN_ID + 1
        tokens = pack_tokens([token if 0 <= token <= MAX_TOKEN_ID else odd_id for token in token_ids])
    ids = np.frombuffer(tokens, "<u4")
    if ids.max() <= MAX_TOKEN_ID:
        return tokens, NO_BLOCKS
    odd = (ids.reshape(-1, block_size) > MAX_TOKEN_ID).any(axis=1)
    return tokens, frozenset(np.flatnonzero(odd).tolist())

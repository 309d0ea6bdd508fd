"""Bytes of the wire protocol → events. Nothing here keeps state between calls.

A payload is one MessagePack value `[timestamp, events, dp_rank]`, an event is a map with a `type`;
docs/protocol.md describes every field. Decoding happens in bounded steps, so that a caller can let
other threads run between them: a payload is first split into raw events without building objects,
then each event is decoded on its own (`raw_event`) and its meaning checked (`interpret`).

No allocation follows a length that the payload merely claims: msgspec grows lists as elements
arrive, and MessagePack's skip builds nothing; both refuse deep nesting.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import msgspec
from xxhash import xxh3_128_digest

from streams.core.errors import DecodeError
from streams.core.events import Batch, Event, Skipped
from streams.core.interpret import Expected, Warnings, interpret
from streams.core.raw_event import MALFORMED, SLICE_BYTES, read_event

SEQUENCE_BYTES = 8
END_SEQUENCE = 2**64 - 1
"""Closes a snapshot reply; never a message's own sequence."""

SPLIT_BYTES = 1024 * 1024
"""Payloads up to this size are split in one call (about 1 ms); larger ones slice by slice."""


class _RawBatch(msgspec.Struct, array_like=True):
    timestamp: float | int
    events: list[msgspec.Raw]
    dp_rank: int | None = None


_T = TypeVar("_T")
_Pauses = Generator[None, None, _T]

_BATCH = msgspec.msgpack.Decoder(_RawBatch)


def decode_sequence(frame: bytes | memoryview) -> int:
    """A sequence frame: exactly 8 bytes, unsigned, big-endian."""
    if len(frame) != SEQUENCE_BYTES:
        raise DecodeError(f"the sequence frame has {len(frame)} bytes, it must have {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


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
        walk = _raw_events(payload)
        events: list[Event] = []
        warnings = Warnings()
        position = size = 0
        while True:
            try:
                raw = next(walk)
            except StopIteration as stop:
                header: _Header = stop.value
                break
            if raw is None:
                yield ()
                continue
            try:
                events.extend(interpret((yield from read_event(raw)), expected, warnings))
            except (*MALFORMED, DecodeError) as error:
                raise DecodeError(f"event {position}: {error}") from None
            position += 1
            size += len(memoryview(raw))
            if size >= SLICE_BYTES:
                yield tuple(events)
                events.clear()
                size = 0
        _check_rank(header.dp_rank, expected.dp_rank)
        yield tuple(events)
    except MALFORMED as error:
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


def _check_rank(found: int | None, dp_rank: int) -> None:
    if found is None and dp_rank == 0:
        return
    if found != dp_rank:
        raise DecodeError(f"the batch is of dp_rank {found}, this stream follows rank {dp_rank}")


# Splitting a payload into raw events.


@dataclass(frozen=True, slots=True)
class _Header:
    timestamp: float
    dp_rank: int | None


def _raw_events(payload: bytes | memoryview) -> Generator[Any, None, _Header]:
    """Yields each event's bytes, and None where a pause may be made.

    Of a large payload one event at a time, because a list of millions of tiny ones would take hundreds
    of times their size.
    """
    if len(payload) <= SPLIT_BYTES:
        batch = _BATCH.decode(payload)
        yield from batch.events
        return _Header(batch.timestamp, batch.dp_rank)
    spans = _Spans(payload)
    timestamp = yield from spans.take(msgspec.msgpack.Decoder(float | int))
    count = yield from spans.array_header()
    for _ in range(count):
        yield (yield from spans.raw())
    dp_rank = None
    if spans.outer > 2:
        dp_rank = yield from spans.take(msgspec.msgpack.Decoder(int | None))
        for _ in range(spans.outer - 3):
            yield from spans.raw()
    spans.check_end()
    return _Header(timestamp, dp_rank)


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

    def array_header(self) -> _Pauses[int]:
        while True:
            try:
                return int(self._unpacker.read_array_header())
            except msgpack.OutOfData:
                self._feed()
                yield None

    def raw(self) -> _Pauses[memoryview]:
        start = self._unpacker.tell()
        while True:
            try:
                self._unpacker.skip()
            except msgpack.OutOfData:
                self._feed()
                yield None
            else:
                return self._view[start : self._unpacker.tell()]

    def take(self, decoder: msgspec.msgpack.Decoder[Any]) -> _Pauses[Any]:
        return decoder.decode((yield from self.raw()))

    def check_end(self) -> None:
        if self._unpacker.tell() != len(self._view):
            raise DecodeError("bytes follow the end of the batch")

"""The bytes of one event → its fields, typed but not yet judged.

An event of usual size is one call of the decoder. A big one is read field by field with pauses, so that
millions of tokens do not hold the interpreter lock, and nothing is built of what is not needed.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain
from typing import Any, TypeVar

import msgpack
import msgspec
from msgspec import UNSET, UnsetType

from streams.core.errors import DecodeError
from streams.core.events import Event

SLICE_BYTES = 256 * 1024
"""Bytes handled between two pauses."""
BIG_EVENT_BYTES = 256 * 1024
"""An event above this size has its tokens decoded PIECE by PIECE."""
PIECE = 4096
MAX_NAME_BYTES = 32
MAX_FIELD_BYTES = 64 * 1024
"""Largest value of a field that is no list of blocks or tokens, in a big event."""
MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, msgpack.UnpackException, ValueError)
"""What the decoders raise for bytes that do not fit."""

_NIL = 0xC0
_T = TypeVar("_T")
Steps = Generator[tuple[Event, ...], None, _T]
"""A computation with pauses: what it yields is empty, what it returns counts."""


class RawEvent(msgspec.Struct):
    """An event as it stands on the wire. UNSET: the field is absent."""

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


_EVENT = msgspec.msgpack.Decoder(RawEvent)
_FIELDS = frozenset(RawEvent.__struct_fields__)
_NAMES = {msgspec.msgpack.encode(name): name for name in _FIELDS}
_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def read_event(raw: Any) -> Steps[RawEvent]:
    """Returns the event's fields; of a type that this version does not know, the type alone."""
    if len(memoryview(raw)) > BIG_EVENT_BYTES:
        return (yield from _read_big_event(raw))
    try:
        return _EVENT.decode(raw)
    except msgspec.ValidationError:
        return _read_odd_event(raw)


def _read_odd_event(raw: Any) -> RawEvent:
    """An event that is not what we expect may be newer than we are: only known types must fit."""
    fields = msgspec.msgpack.decode(raw, strict=False)
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise DecodeError("an event must be a map with a text field `type`")
    if fields["type"] not in _TYPES:
        return RawEvent(type=fields["type"])
    return _typed({key: fields[key] for key in fields if key in _FIELDS})


def _read_big_event(raw: Any) -> Steps[RawEvent]:
    """The same as one decode call, but with pauses, and nothing is built of what is not needed."""
    spans = yield from _field_spans(memoryview(raw))
    kind = _read_small(spans, "type")
    if not isinstance(kind, str):
        raise DecodeError("an event must be a map with a text field `type`")
    if kind not in _TYPES:
        return RawEvent(type=kind)
    fields: dict[str, Any] = {}
    for name, span in spans.items():
        if name in ("token_ids", "block_hashes"):
            fields[name] = yield from _read_long_list(span, name)
        elif name == "extra_keys" and span[0] != _NIL:
            fields[name] = yield from _read_presence(span)
        else:
            fields[name] = _read_small(spans, name)
    tokens, hashes = fields.pop("token_ids", UNSET), fields.pop("block_hashes", UNSET)
    event = _typed(fields)
    event.token_ids, event.block_hashes = tokens, hashes
    return event


def _typed(fields: dict[str, Any]) -> RawEvent:
    """Fields that have been read one by one, held to the same types as a whole event.

    Through the wire form once more: converting Python objects would take text for base64.
    """
    return _EVENT.decode(msgspec.msgpack.encode(fields))


def _field_spans(view: memoryview) -> Steps[dict[str, memoryview]]:
    """Where in an event each field that we know stands."""
    unpacker = yield from _fed(view)
    spans: dict[str, memoryview] = {}
    for number in range(unpacker.read_map_header()):
        start = unpacker.tell()
        unpacker.skip()
        middle = unpacker.tell()
        unpacker.skip()
        name = _NAMES.get(bytes(view[start : min(middle, start + MAX_NAME_BYTES)]))
        if name is not None:
            spans[name] = view[middle : unpacker.tell()]
        if number % PIECE == PIECE - 1:
            yield ()
    return spans


def _fed(view: memoryview) -> Steps[msgpack.Unpacker]:
    """An unpacker that holds all of it and refuses to build anything nested."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(view), max_array_len=0, max_map_len=0)
    for start in range(0, len(view), SLICE_BYTES):
        unpacker.feed(view[start : start + SLICE_BYTES])
        yield ()
    return unpacker


def _read_small(spans: dict[str, memoryview], name: str) -> Any:
    """A field that takes a few bytes; None when it is absent."""
    span = spans.get(name)
    if span is None:
        return None
    if len(span) > MAX_FIELD_BYTES:
        raise DecodeError(f"{name} has {len(span)} bytes, at most {MAX_FIELD_BYTES} are read")
    return msgspec.msgpack.decode(span)


def _read_long_list(span: memoryview, name: str) -> Steps[list[Any]]:
    unpacker = yield from _fed(span)
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


def _read_presence(span: memoryview) -> Steps[list[bool | None]]:
    """A list of which only matters where it holds nil: None there, True elsewhere."""
    unpacker = yield from _fed(span)
    presence: list[bool | None] = []
    for number in range(unpacker.read_array_header()):
        presence.append(None if span[unpacker.tell()] == _NIL else True)
        unpacker.skip()
        if number % PIECE == PIECE - 1:
            yield ()
    return presence

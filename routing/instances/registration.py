"""Values written by engines, as bytes, into checked values. Pure.

Typed where the portal uses a field, indifferent to fields that it does not know: a newer engine may
send more. A value that does not fit raises `InvalidInputError` with a sentence that names the field.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Final, TypeVar

import msgspec

from routing.instances.model import WIRE_ROLES, XLLM, Latency, LoadReport, Registration, Role, Rows

MAX_VALUE_BYTES: Final = 512 * 1024
"""Longest value that is looked at. A registration with thousands of profiling rows has 100 KiB."""
MAX_NAME_LENGTH: Final = 256
_MAX_INT: Final = 2**63 - 1
_TYPES: Final = {
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "str": "text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""msgspec's names of JSON types, in words."""
_EXPECTED: Final = re.compile(r"Expected `(.+)`, got `(.+)`")
_MISSING: Final = re.compile(r"Object missing required field `(.+)`")
MAX_INCARNATION_LENGTH: Final = 256

T = TypeVar("T", bound="msgspec.Struct")


class InvalidInputError(ValueError):
    """A value that says nothing usable; the message names the field and what is allowed."""


class _Registration(msgspec.Struct):
    name: str | None = None
    rpc_address: str | None = None
    incarnation_id: str | None = None
    register_ts_ms: int | None = None
    type: int | None = None
    dp_size: int | None = None
    backend: str | None = None
    ttft_profiling_data: list[list[float]] | None = None
    tpot_profiling_data: list[list[float]] | None = None


class _LeasedRegistration(_Registration):
    ttl_s: float | None = None


class _Load(msgspec.Struct):
    waiting_requests_num: int
    gpu_cache_usage_perc: float


class _Latency(msgspec.Struct):
    recent_max_ttft: float | None = None
    recent_max_tbt: float | None = None


class _Heartbeat(msgspec.Struct):
    name: str
    load_metrics: _Load
    incarnation_id: str | None = None
    latency_metrics: _Latency | None = None


class _Deletion(msgspec.Struct):
    incarnation_id: str | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """One heartbeat of an engine."""

    name: str
    incarnation_id: str | None
    load: LoadReport
    latency: Latency | None


_registration = msgspec.json.Decoder(_Registration)
_leased = msgspec.json.Decoder(_LeasedRegistration)
_load = msgspec.json.Decoder(_Load)
_heartbeat = msgspec.json.Decoder(_Heartbeat)
_deletion = msgspec.json.Decoder(_Deletion)


def parse_registration(name: str, value: bytes, key_role: Role = Role.DEFAULT) -> Registration:
    """The registration of the instance `name`. `key_role` is that of the key's prefix and counts
    where the value names no `type`; the name in the value is not looked at, the key's counts."""
    return _registration_of(name, _decode(_registration, value), key_role)


def parse_leased_registration(name: str, value: bytes) -> tuple[Registration, float | None]:
    """A registration sent over HTTP, with its `ttl_s` (None when it is missing)."""
    raw = _decode(_leased, value)
    if raw.name is not None and raw.name != name:
        raise InvalidInputError(
            f"name: {show(raw.name)}; it must be left out or equal the path's {show(name)}"
        )
    return _registration_of(name, raw, Role.DEFAULT), raw.ttl_s


def parse_load(value: bytes) -> LoadReport:
    """The load of an instance as it stands in etcd."""
    return _report(_decode(_load, value))


def parse_heartbeat(value: bytes) -> Heartbeat:
    """A heartbeat's body. Fields that old engines still send (`cache_event`) are ignored."""
    raw = _decode(_heartbeat, value)
    latency = raw.latency_metrics
    return Heartbeat(
        check_name(raw.name),
        raw.incarnation_id or None,
        _report(raw.load_metrics),
        None if latency is None else Latency(latency.recent_max_ttft, latency.recent_max_tbt),
    )


def load_document(report: LoadReport) -> bytes:
    """What `parse_load` reads back. JSON has no number that is not finite; -1 is as invalid."""
    usage = report.gpu_cache_usage_perc
    return msgspec.json.encode(
        {
            "waiting_requests_num": report.waiting_requests_num,
            "gpu_cache_usage_perc": usage if math.isfinite(usage) else -1.0,
        }
    )


def parse_deletion(value: bytes) -> str | None:
    """The incarnation that a DELETE is meant for; None (or no body) for whichever there is."""
    return (_decode(_deletion, value).incarnation_id or None) if value.strip() else None


def check_name(name: str) -> str:
    """`name` itself, when it can name an instance at all. Whether it is an address that can be
    connected to is another question: a bad one is registered, and shown as excluded."""
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidInputError(f"name: {len(name)} characters; 1 to {MAX_NAME_LENGTH} are allowed")
    if any(unicodedata.category(c)[0] in "CZ" for c in name) or "/" in name:
        raise InvalidInputError(f"name: {show(name)} has a space, slash or control character")
    if name in (".", ".."):
        raise InvalidInputError(f"name: {show(name)} vanishes from paths; it must be host:port")
    return name


def show(text: str) -> str:
    """A text from outside, made fit for a message: quoted, escaped and short."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def _registration_of(name: str, raw: _Registration, key_role: Role) -> Registration:
    dp_size = 1 if raw.dp_size is None else raw.dp_size
    if not 1 <= dp_size <= _MAX_INT:
        raise InvalidInputError(f"dp_size: {dp_size}; it must be from 1 to {_MAX_INT}")
    if raw.incarnation_id is not None and len(raw.incarnation_id) > MAX_INCARNATION_LENGTH:
        raise InvalidInputError(f"incarnation_id: longer than {MAX_INCARNATION_LENGTH} characters")
    if raw.register_ts_ms is not None and not 0 <= raw.register_ts_ms <= _MAX_INT:
        raise InvalidInputError(
            f"register_ts_ms: {raw.register_ts_ms}; it must be milliseconds since the epoch, from 0 to "
            f"{_MAX_INT}"
        )
    return Registration(
        name=check_name(name),
        role=key_role if raw.type is None else _role(raw.type),
        # Engines that do not know a field may still write its zero value.
        incarnation_id=raw.incarnation_id or None,
        register_ts_ms=raw.register_ts_ms or None,
        dp_size=dp_size,
        backend=(raw.backend or XLLM).lower(),
        rpc_address=raw.rpc_address or "",
        ttft_profiling_data=_rows("ttft_profiling_data", raw.ttft_profiling_data, ("tokens", "ms")),
        tpot_profiling_data=_rows("tpot_profiling_data", raw.tpot_profiling_data, ("avg_len", "batch", "ms")),
    )


def _report(raw: _Load) -> LoadReport:
    # A queue longer than 64 bits can count is still a queue, but could not be sent on.
    waiting = max(-_MAX_INT - 1, min(raw.waiting_requests_num, _MAX_INT))
    return LoadReport(waiting, raw.gpu_cache_usage_perc)


def _role(wire: int) -> Role:
    if not 0 <= wire < len(WIRE_ROLES):
        allowed = ", ".join(f"{number} ({role})" for number, role in enumerate(WIRE_ROLES))
        raise InvalidInputError(f"type: {wire}; it must be {allowed}")
    return WIRE_ROLES[wire]


def _rows(field: str, rows: list[list[float]] | None, columns: tuple[str, ...]) -> Rows:
    for position, row in enumerate(rows or ()):
        if len(row) != len(columns):
            raise InvalidInputError(
                f"{field}[{position}]: has {len(row)} numbers; it must have {len(columns)}: "
                f"{', '.join(columns)}"
            )
    return tuple(tuple(row) for row in rows or ())


def _decode(decoder: msgspec.json.Decoder[T], value: bytes) -> T:
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidInputError(f"{len(value):,} bytes long; at most {MAX_VALUE_BYTES:,} are allowed")
    if not value.strip():
        raise InvalidInputError("not JSON: it is empty")
    try:
        return decoder.decode(value)
    except msgspec.ValidationError as error:
        if "Number out of range" in str(error):
            return _decode_large(decoder, value)
        raise InvalidInputError(_sentence(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidInputError("nested too deeply") from None


def _decode_large(decoder: msgspec.json.Decoder[T], value: bytes) -> T:
    """Numbers such as 1e999 are JSON, and the value that they stand for is infinite."""
    try:
        converted: T = msgspec.convert(json.loads(value), decoder.type)
        return converted
    except msgspec.ValidationError as error:
        raise InvalidInputError(_sentence(str(error))) from None
    except ValueError as error:
        raise InvalidInputError(f"not JSON: {error}") from None


def _sentence(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.dp_size`" as people say it, the field in front."""
    text, _, path = message.partition(" - at `$")
    field = path.strip(".`")
    if missing := _MISSING.fullmatch(text):
        inside = f"{field}." if field else ""
        return f"{inside}{missing[1]}: missing"
    if expected := _EXPECTED.fullmatch(text):
        allowed = " or ".join(_TYPES.get(name, name) for name in expected[1].split(" | "))
        found = "a decimal number" if expected[2] == "float" else _TYPES.get(expected[2], expected[2])
        text = f"must be {allowed}, not {found}"
    return f"{field}: {text}" if field else text

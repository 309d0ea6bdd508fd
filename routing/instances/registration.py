"""Values written by engines, as bytes, into checked values. Pure.

Typed where the portal uses a field, indifferent to fields that it does not know: a newer engine may
send more. A value that does not fit raises `InvalidInputError` with a sentence for every field that is
wrong. What fits is read in one go by msgspec, which stops at its first fault; only then is the value
read a second time, field by field.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TypeVar, get_args

import msgspec

from routing.instances.embedded import MAX_TTL_SECONDS
from routing.instances.model import WIRE_ROLES, XLLM, Latency, LoadReport, Registration, Role, Rows

MAX_VALUE_BYTES: Final = 512 * 1024
"""Longest value that is looked at. A registration with thousands of profiling rows has 100 KiB."""
MAX_NAME_LENGTH: Final = 256
MAX_INCARNATION_LENGTH: Final = 256
_MAX_INT: Final = 2**63 - 1
_SHOWN_DIGITS: Final = 30
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
_REQUIRED: Final = {
    "name": "the address that it registered with, host:port",
    "load_metrics": "an object",
    "waiting_requests_num": "an integer",
    "gpu_cache_usage_perc": "a number",
    "ttl_s": f"a number of seconds above 0, at most {MAX_TTL_SECONDS:g}",
}
"""Fields that must be there, and what each must be."""
_COLUMNS: Final = {
    "ttft_profiling_data": ("tokens", "ms"),
    "tpot_profiling_data": ("avg_len", "batch", "ms"),
}
"""What the numbers of a row stand for."""

T = TypeVar("T", bound="msgspec.Struct")


class InvalidInputError(ValueError):
    """A value that says nothing usable; the message names each field at fault and what is allowed."""


class NotJsonError(InvalidInputError):
    """The value is no JSON at all."""


class TooLongError(InvalidInputError):
    """The value is longer than `MAX_VALUE_BYTES`."""


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


class _LeasedRegistration(_Registration, kw_only=True):
    ttl_s: float


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
    """The registration of the instance `name`, which `check_name` has taken. `key_role` is that of the
    key's prefix and counts where the value names no `type`; the name in the value is not looked at."""
    return _registration_of(name, _read(_registration, value, _registration_faults), key_role)


def parse_leased_registration(name: str, value: bytes) -> tuple[Registration, float]:
    """A registration sent over HTTP under `name`, with its `ttl_s`."""
    raw = _read(_leased, value, partial(_leased_faults, name))
    return _registration_of(name, raw, Role.DEFAULT), raw.ttl_s


def parse_load(value: bytes) -> LoadReport:
    """The load of an instance as it stands in etcd."""
    return _report(_read(_load, value))


def parse_heartbeat(value: bytes) -> Heartbeat:
    """A heartbeat's body. Fields that old engines still send (`cache_event`) are ignored."""
    raw = _read(_heartbeat, value, _heartbeat_faults)
    latency = raw.latency_metrics
    return Heartbeat(
        raw.name,
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
    return (_read(_deletion, value).incarnation_id or None) if value.strip() else None


def check_name(name: str) -> str:
    """`name` itself, when it can name an instance at all. Whether it is an address that can be
    connected to is another question: a bad one is registered, and shown as excluded."""
    fault = _name_fault(name)
    if fault is not None:
        raise InvalidInputError(fault)
    return name


def show(text: str) -> str:
    """A text from outside, made fit for a message: quoted, escaped and short."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


# ---- from what was read to what it means


def _registration_of(name: str, raw: _Registration, key_role: Role) -> Registration:
    return Registration(
        name=name,
        role=key_role if raw.type is None else WIRE_ROLES[raw.type],
        # Engines that do not know a field may still write its zero value.
        incarnation_id=raw.incarnation_id or None,
        register_ts_ms=raw.register_ts_ms or None,
        dp_size=1 if raw.dp_size is None else raw.dp_size,
        backend=(raw.backend or XLLM).lower(),
        rpc_address=raw.rpc_address or "",
        ttft_profiling_data=_rows(raw.ttft_profiling_data),
        tpot_profiling_data=_rows(raw.tpot_profiling_data),
    )


def _rows(rows: list[list[float]] | None) -> Rows:
    return tuple(tuple(row) for row in rows or ())


def _report(raw: _Load) -> LoadReport:
    # A queue longer than 64 bits can count is still a queue, but could not be sent on.
    waiting = max(-_MAX_INT - 1, min(raw.waiting_requests_num, _MAX_INT))
    return LoadReport(waiting, raw.gpu_cache_usage_perc)


# ---- what is wrong with values of the right type (None: absent, or its type was wrong already)


def _no_faults(_: object) -> Iterable[str]:
    return ()


def _registration_faults(raw: _Registration) -> Iterator[str]:
    if raw.dp_size is not None and not 1 <= raw.dp_size <= _MAX_INT:
        yield f"dp_size: {_number(raw.dp_size)}; it must be from 1 to {_MAX_INT}"
    if raw.incarnation_id is not None and len(raw.incarnation_id) > MAX_INCARNATION_LENGTH:
        yield f"incarnation_id: longer than {MAX_INCARNATION_LENGTH} characters"
    if raw.register_ts_ms is not None and not 0 <= raw.register_ts_ms <= _MAX_INT:
        allowed = f"milliseconds since the epoch, from 0 to {_MAX_INT}"
        yield f"register_ts_ms: {_number(raw.register_ts_ms)}; it must be {allowed}"
    if raw.type is not None and not 0 <= raw.type < len(WIRE_ROLES):
        allowed = ", ".join(f"{number} ({role})" for number, role in enumerate(WIRE_ROLES))
        yield f"type: {_number(raw.type)}; it must be {allowed}"
    for field, columns in _COLUMNS.items():
        for position, row in enumerate(getattr(raw, field) or ()):
            if len(row) != len(columns):
                allowed = f"{len(columns)}: {', '.join(columns)}"
                yield f"{field}[{position}]: has {len(row)} numbers; it must have {allowed}"
                break


def _leased_faults(name: str, raw: _LeasedRegistration) -> Iterator[str]:
    fault = _name_fault(name)
    if fault is not None:
        yield fault
    elif raw.name is not None and raw.name != name:
        yield f"name: {show(raw.name)}; it must be left out or equal the path's {show(name)}"
    yield from _registration_faults(raw)
    if raw.ttl_s is not None and not 0.0 < raw.ttl_s <= MAX_TTL_SECONDS:
        yield f"ttl_s: {raw.ttl_s:g}; it must be {_REQUIRED['ttl_s']}"


def _heartbeat_faults(raw: _Heartbeat) -> Iterable[str]:
    fault = None if raw.name is None else _name_fault(raw.name)
    return () if fault is None else (fault,)


def _name_fault(name: str) -> str | None:
    if not name or len(name) > MAX_NAME_LENGTH:
        return f"name: {len(name)} characters; 1 to {MAX_NAME_LENGTH} are allowed"
    if any(unicodedata.category(c)[0] in "CZ" for c in name) or "/" in name:
        return f"name: {show(name)} has a space, slash or control character"
    if name in (".", ".."):
        return f"name: {show(name)} vanishes from paths; it must be host:port"
    return None


def _number(value: int) -> str:
    return str(value) if abs(value) < 10**_SHOWN_DIGITS else f"a number of more than {_SHOWN_DIGITS} digits"


# ---- from bytes to typed fields


def _read(
    decoder: msgspec.json.Decoder[T], value: bytes, value_faults: Callable[[T], Iterable[str]] = _no_faults
) -> T:
    """The fields of `value`, of the right types and without `value_faults`."""
    if len(value) > MAX_VALUE_BYTES:
        raise TooLongError(f"{len(value):,} bytes long; at most {MAX_VALUE_BYTES:,} are allowed")
    if not value.strip():
        raise NotJsonError("not JSON: it is empty")
    faults: list[str] = []
    try:
        raw = decoder.decode(value)
    except msgspec.ValidationError:
        raw = _read_by_field(decoder.type, value, faults)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJsonError(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidInputError("nested too deeply") from None
    faults += value_faults(raw)
    if faults:
        raise InvalidInputError(". ".join(faults))
    return raw


def _read_by_field(kind: Any, value: bytes, faults: list[str]) -> Any:
    """Something with the fields of `kind`. What is missing or of another type is None in it, and has a
    sentence in `faults`. Also takes numbers such as 1e999: they are JSON, and the value that they stand
    for is infinite."""
    document = _json(value)
    if isinstance(document, dict):
        return _fields(document, kind, "", faults)
    _convert(document, kind, "", faults)
    return _fields({}, kind, "", [])


def _fields(document: dict[str, Any], kind: type, prefix: str, faults: list[str]) -> Any:
    values = {}
    for field in msgspec.structs.fields(kind):
        place = prefix + field.name
        if field.name in document:
            values[field.name] = _convert(document[field.name], field.type, place, faults)
        elif field.required:
            values[field.name] = None
            faults.append(f"{place}: missing; it must be {_REQUIRED[field.name]}")
        else:
            values[field.name] = field.default
    return SimpleNamespace(**values)


def _convert(value: object, kind: Any, place: str, faults: list[str]) -> Any:
    struct = next((each for each in (kind, *get_args(kind)) if _is_struct(each)), None)
    if struct is not None and isinstance(value, dict):
        return _fields(value, struct, f"{place}.", faults)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        faults.append(_sentence(place, str(error)))
        return None


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _json(value: bytes) -> object:
    """The value by the standard library, and not more of JSON than msgspec takes."""
    try:
        document = json.loads(value.decode(), parse_constant=_refuse_constant)
        json.dumps(document, ensure_ascii=False).encode()  # half of a character does not pass
    except NotJsonError:
        raise
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NotJsonError(f"not JSON: {error}") from None
    except UnicodeEncodeError:
        raise NotJsonError("not JSON: a text holds half of a character (a lone surrogate)") from None
    except ValueError:
        raise InvalidInputError("it holds a number with too many digits") from None
    except RecursionError:
        raise InvalidInputError("nested too deeply") from None
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise NotJsonError(f"not JSON: {name} is no JSON value")


def _sentence(place: str, message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$[3]`" as people say it, the field in front."""
    text, _, path = message.partition(" - at `$")
    place += path.rstrip("`")
    if expected := _EXPECTED.fullmatch(text):
        allowed = " or ".join(_TYPES.get(name, name) for name in expected[1].split(" | "))
        found = "a decimal number" if expected[2] == "float" else _TYPES.get(expected[2], expected[2])
        text = f"must be {allowed}, not {found}"
    return f"{place}: {text}" if place else text

"""The KV events file (JSON): bytes in, a validated `KvEventsConfig` and every fault out."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvportal.config.endpoints import ALLOWED as ENDPOINT_ALLOWED
from kvportal.config.endpoints import endpoint_key
from kvportal.config.faults import Faults, show
from kvportal.config.flags import MAX_MS
from kvportal.config.model import KvEventsConfig
from streams.discovery import DiscoverySettings
from streams.spec import Limits, StreamSpec

MAX_FILE_BYTES = 4 * 1024 * 1024
MOST_STREAMS = 128
_LARGE = 2**40
"""Upper bound of counts and sizes: far beyond any machine, and it fits every socket option."""

Check = Callable[[object], bool]


def _integer(low: int, high: int) -> tuple[str, Check]:
    def check(value: object) -> bool:
        return type(value) is int and low <= value <= high

    allowed = f"an integer of at least {low}" if high == _LARGE else f"an integer from {low} to {high}"
    return allowed, check


def _is_text(value: object) -> bool:
    """Text that can be sent as UTF-8 (JSON can spell halves of characters that cannot)."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable() and value == value.strip()


_TEXT = ("text", _is_text)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_ENDPOINT = (ENDPOINT_ALLOWED, lambda value: isinstance(value, str))
_BLOCK_SIZE = _integer(1, 2**20)

LIMITS: dict[str, tuple[str, Check]] = {
    "max_streams": _integer(1, MOST_STREAMS),
    "max_total_blocks": _integer(0, _LARGE),
    "max_blocks_per_stream": _integer(1, _LARGE),
    "max_message_bytes": _integer(1, _LARGE),
    "max_buffered_bytes": _integer(1, _LARGE),
    "replay_timeout_ms": _integer(1, MAX_MS),
    "resync_interval_ms": _integer(1, MAX_MS),
}
DISCOVERY: dict[str, tuple[str, Check]] = {
    "enabled": _FLAG,
    "block_size": _BLOCK_SIZE,
    "topic": _TEXT,
    "event_port_offset": _integer(0, 65535),
    "replay_port_offset": _integer(0, 65535),
    "refresh_interval_ms": _integer(50, 60_000),
}
STREAM: dict[str, tuple[str, Check]] = {
    "instance_name": ("a name of 1 to 255 printable characters", _is_name),
    "dp_rank": _integer(0, 65535),
    "block_size": _BLOCK_SIZE,
    "endpoint": _ENDPOINT,
    "replay_endpoint": _ENDPOINT,
    "topic": _TEXT,
    "hash_seed": _integer(0, 2**64 - 1),
}
REQUIRED = frozenset({"instance_name", "endpoint", "replay_endpoint"})


def read_events_file(path: str, where: str, faults: Faults) -> KvEventsConfig:
    """Reads and checks the file that `where` (a flag or a variable) names."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        faults.note(
            where, f"{show(path)} ({reason})", "a readable KV events file, or empty to turn the index off"
        )
        return KvEventsConfig()
    if len(data) > MAX_FILE_BYTES:
        faults.note(path, "a file over 4 MiB", "a KV events file")
        return KvEventsConfig()
    return parse_events(data, path, faults)


def parse_events(data: bytes, where: str, faults: Faults) -> KvEventsConfig:
    """The content of the file as a configuration; every fault is placed by `where` and its key."""
    document = _decode(data, where, faults)
    if not isinstance(document, dict):
        return KvEventsConfig()
    _refuse_unknown(document, {*LIMITS, "discovery", "streams"}, where, faults)
    limits = Limits(**_section(document, LIMITS, f"{where}: ", faults))
    discovery = _discovery(document, where, faults)
    streams = _streams(document.get("streams", []), where, faults)
    if discovery is not None and discovery.enabled and document.get("streams"):
        faults.note(
            f"{where}: streams",
            "static streams together with discovery.enabled",
            "one of the two: discovery, or a list of streams",
        )
    if len(streams) > limits.max_streams:
        allowed = f"at most max_streams, {limits.max_streams}"
        faults.note(f"{where}: streams", f"{len(streams)} streams", allowed)
    specs = tuple(spec for spec in streams if spec is not None)
    return KvEventsConfig(limits=limits, streams=specs, discovery=discovery)


def _decode(data: bytes, where: str, faults: Faults) -> object:
    """The JSON value; None with a fault when it is none, or no object."""
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        faults.note(where, "a byte order mark at the beginning", "JSON in UTF-8 without a byte order mark")
        return None
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return value

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        faults.note(where, f"an invalid byte at offset {error.start}", "JSON in UTF-8")
        return None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        found = f"no valid JSON ({error.msg} at {place})" if data.strip() else "an empty file"
        faults.note(where, found, "one JSON object")
        return None
    except (ValueError, RecursionError):
        faults.note(where, "a number or a nesting beyond every limit", "one JSON object")
        return None
    for key in repeated:
        faults.note(where, f"the key {show(key)} more than once in one object", "each key once")
    if not isinstance(value, dict):
        faults.note(where, f"{_json_type(value)} at the top", "one JSON object")
    return value


def _discovery(document: Mapping[str, Any], where: str, faults: Faults) -> DiscoverySettings | None:
    if "discovery" not in document:
        return None
    section, where = document["discovery"], f"{where}: discovery"
    if not isinstance(section, dict):
        faults.note(where, _json_type(section), "an object")
        return None
    _refuse_unknown(section, set(DISCOVERY), where, faults)
    settings = DiscoverySettings(**_section(section, DISCOVERY, f"{where}.", faults))
    if settings.event_port_offset == settings.replay_port_offset:
        faults.note(
            f"{where}.replay_port_offset",
            f"{settings.replay_port_offset}, the same as event_port_offset",
            "another offset: the two channels have a port each",
        )
    return settings


def _streams(section: object, where: str, faults: Faults) -> list[StreamSpec | None]:
    """One entry for each element of the list, None for a faulty one."""
    if not isinstance(section, list):
        faults.note(f"{where}: streams", _json_type(section), "a list of objects")
        return []
    specs = []
    owners: dict[object, str] = {}
    for index, element in enumerate(section):
        place = f"{where}: streams[{index}]"
        spec = _stream(element, place, faults)
        if spec is not None:
            _refuse_duplicates(spec, f"streams[{index}]", place, owners, faults)
        specs.append(spec)
    return specs


def _stream(element: object, place: str, faults: Faults) -> StreamSpec | None:
    if not isinstance(element, dict):
        faults.note(place, _json_type(element), "an object")
        return None
    _refuse_unknown(element, set(STREAM), place, faults)
    before = len(faults)
    values = {"dp_rank": 0, **_section(element, STREAM, f"{place}.", faults, required=REQUIRED)}
    for key in ("endpoint", "replay_endpoint"):
        if key in values:
            _check_endpoint(values[key], f"{place}.{key}", faults)
    return StreamSpec(**values) if len(faults) == before else None


def _check_endpoint(endpoint: str, place: str, faults: Faults) -> None:
    try:
        endpoint_key(endpoint)
    except ValueError as error:
        faults.note(place, f"{show(endpoint)} ({error})", ENDPOINT_ALLOWED)


def _refuse_duplicates(
    spec: StreamSpec, name: str, place: str, owners: dict[object, str], faults: Faults
) -> None:
    """A stream's identity and both its endpoints belong to nobody else in the list."""
    claims: list[tuple[object, str, str, str]] = [
        (
            spec.id,
            "",
            f"instance {show(spec.instance_name)}, rank {spec.dp_rank}",
            "each (instance, rank) once",
        ),
        (endpoint_key(spec.endpoint), ".endpoint", show(spec.endpoint), "an endpoint of its own"),
        (
            endpoint_key(spec.replay_endpoint),
            ".replay_endpoint",
            show(spec.replay_endpoint),
            "an endpoint of its own",
        ),
    ]
    for key, suffix, found, allowed in claims:
        owner = owners.setdefault(key, name + suffix)
        if owner != name + suffix:
            faults.note(place + suffix, f"{found}, which {owner} already has", allowed)


def _section(
    document: Mapping[str, Any],
    table: Mapping[str, tuple[str, Check]],
    prefix: str,
    faults: Faults,
    *,
    required: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The values of `document` that `table` allows; a key that is absent or faulty is left out."""
    values: dict[str, Any] = {}
    for key, (allowed, check) in table.items():
        if key not in document:
            if key in required:
                faults.note(prefix + key, "nothing", allowed)
        elif check(document[key]):
            values[key] = document[key]
        else:
            faults.note(prefix + key, _shown(document[key]), allowed)
    return values


def _refuse_unknown(document: Mapping[str, Any], known: set[str], where: str, faults: Faults) -> None:
    for key in document:
        if key not in known:
            faults.note(where, f"the unknown key {show(key)}", ", ".join(sorted(known)))


def _shown(value: object) -> str:
    """A value as the file spells it; containers by their kind alone."""
    if isinstance(value, (dict, list)):
        return _json_type(value)
    return show(value) if isinstance(value, str) else json.dumps(value)


def _json_type(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")

"""What etcd's JSON gateway speaks: int64 as strings, bytes in base64, errors in several shapes. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from routing.instances.keys import KeyEvent

_UNAUTHENTICATED: Final = 16
_PERMISSION_DENIED: Final = 7
_UNAVAILABLE: Final = 14
# Answers of 3.4 that mean "authenticate (again)" under a code that also means other things.
_STALE_TOKEN_TEXTS: Final = ("user name is empty", "invalid auth token", "revision of auth store is old")
_NO_HISTORY_TEXTS: Final = ("has been compacted", "is a future revision")


class EtcdError(Exception):
    """A call did not succeed. The message is fit to be shown."""


class EtcdUnavailableError(EtcdError):
    """No endpoint answered."""


class EtcdHistoryError(EtcdError):
    """The revision asked for is no longer kept, or not reached: nothing can be told of it."""


class EtcdRefusedError(EtcdError):
    """etcd answered with an error of its own."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def wants_token(self) -> bool:
        return self.code in (_UNAUTHENTICATED, _PERMISSION_DENIED) or any(
            text in str(self) for text in _STALE_TOKEN_TEXTS
        )


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as a range shows it."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Page:
    """The answer to a range."""

    kvs: tuple[KeyValue, ...]
    count: int
    """Keys in the whole range, whatever the limit."""
    revision: int
    """The store's revision when it answered."""
    cluster_id: str
    more: bool


@dataclass(frozen=True, slots=True)
class WatchAnswer:
    """One message of a watch."""

    events: tuple[KeyEvent, ...]
    revision: int
    partial: bool
    """More of the same revisions follows in the next message."""


def checked(status: int, payload: bytes) -> dict[str, Any]:
    document = document_of(payload)
    if status == 200 and "error" not in document:
        return document
    raise _refusal(document if document else {"message": f"HTTP status {status}"})


def document_of(payload: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise EtcdUnavailableError(f"not etcd's JSON: {payload[:80]!r}") from None
    if not isinstance(document, dict):
        raise EtcdUnavailableError(f"not etcd's JSON: {payload[:80]!r}")
    return document


def _refusal(document: Mapping[str, Any]) -> EtcdError:
    """The error in an answer; its form differs between versions and between calls and streams."""
    inner = document.get("error")
    fields = inner if isinstance(inner, Mapping) else document
    code = int(fields.get("code") or fields.get("grpc_code") or 0)
    message = str(fields.get("message") or inner or "unknown error")
    if any(text in message for text in _NO_HISTORY_TEXTS):
        return EtcdHistoryError(message)
    if code == _UNAVAILABLE:
        return EtcdUnavailableError(message)
    return EtcdRefusedError(code, message)


def _cancelled(reason: str) -> EtcdError:
    text = reason or "the watch was cancelled"
    if "permission denied" in text:
        return EtcdRefusedError(_PERMISSION_DENIED, text)
    if any(stale in text for stale in _STALE_TOKEN_TEXTS):
        return EtcdRefusedError(_UNAUTHENTICATED, text)
    return EtcdUnavailableError(text)


def key_value(raw: Mapping[str, Any]) -> KeyValue:
    return KeyValue(
        key=bytes_of(raw.get("key", "")),
        value=bytes_of(raw.get("value", "")),
        create_revision=int(raw.get("create_revision", 0)),
        mod_revision=int(raw.get("mod_revision", 0)),
    )


def page_of(answer: Mapping[str, Any]) -> Page:
    """The answer to a range."""
    header = answer.get("header", {})
    return Page(
        kvs=tuple(key_value(kv) for kv in answer.get("kvs", ())),
        count=int(answer.get("count", 0)),
        revision=int(header.get("revision", 0)),
        cluster_id=str(header.get("cluster_id", "")),
        more=bool(answer.get("more", False)),
    )


def watch_answer_of(line: bytes) -> WatchAnswer:
    """One line of a watch. Raises what ended the watch, if it says so."""
    message = document_of(line)
    if "error" in message:
        raise _refusal(message)
    result = message.get("result", {})
    if int(result.get("compact_revision", 0)):
        raise EtcdHistoryError(f"revisions before {result['compact_revision']} were compacted")
    if result.get("canceled"):
        raise _cancelled(str(result.get("cancel_reason", "")))
    return WatchAnswer(
        events=tuple(_key_event(event) for event in result.get("events", ())),
        revision=int(result.get("header", {}).get("revision", 0)),
        partial=bool(result.get("fragment", False)),
    )


def _key_event(raw: Mapping[str, Any]) -> KeyEvent:
    kv = key_value(raw.get("kv", {}))
    previous = raw.get("prev_kv")
    return KeyEvent(
        key=kv.key,
        value=None if raw.get("type") == "DELETE" else kv.value,
        mod_revision=kv.mod_revision,
        create_revision=kv.create_revision,
        previous=bytes_of(previous.get("value", "")) if previous else None,
    )


def base64_of(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def bytes_of(text: str) -> bytes:
    return b64decode(text)


# ---- parts of a transaction


def mod_revision_is(key: str, revision: int) -> dict[str, Any]:
    """Holds when the key was last written at `revision`; 0: when it does not exist."""
    return {
        "target": "MOD",
        "result": "EQUAL",
        "key": base64_of(key.encode()),
        "mod_revision": str(revision),
    }


def putting(key: str, value: bytes) -> dict[str, Any]:
    return {"request_put": {"key": base64_of(key.encode()), "value": base64_of(value)}}


def deleting(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": base64_of(key.encode())}}

"""The small vocabulary that endpoint functions speak: bytes in, status and bytes out.

An endpoint knows no web framework. The ASGI fast route and the DRF view are two shells around the
same function, so that both give the same answers. Neither shell calls an endpoint directly: it looks
the name up here and finds the endpoint behind its guard, which is asked twice, as a request arrives
in two parts:

1. `admit(head)`, before the body is read: an answer (401, 405, 413, 415, 503, ...) or an `Admission`;
2. `Admission.answer(body)`, which runs the endpoint and turns whatever it raises into an answer; or
   `Admission.refuse(error)`, when no body comes.

The composition root installs the guarded endpoints when it starts and takes them away when it stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import orjson

API_PREFIX = "/v1/internal/"
"""Everything below this path speaks JSON only, success and failure alike."""
NOT_FOUND = "not_found"
"""Name of the endpoint that answers, in JSON as well, for paths below `/v1/` that do not exist."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request before its body has been read."""

    method: str
    path: str
    """Percent-decoded, without the query string."""
    allowed: tuple[str, ...]
    """The methods that exist for this path."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Named parts of the path, percent-decoded."""
    token: bytes = b""
    """The header `X-Internal-Token` as it came; empty when there was none."""
    content_type: str = ""
    content_encoding: str = ""
    content_length: int | None = None
    """None when the client did not announce it, or not as a number. See `announced_length`."""
    host: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What an endpoint may know of a request. `body` is complete and within the size limit."""

    method: str
    path: str
    body: bytes = b""
    params: Mapping[str, str] = field(default_factory=dict)
    """Named parts of the path, already percent-decoded."""
    actor: str = "api"
    """Who asks, for the audit: `api`, or the name of a signed-in user."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class ApiError(Exception):
    """An answer other than success. `code` is stable; `message` names the field and what is allowed."""

    def __init__(
        self, status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers or {}


Endpoint = Callable[[Request], Response]


class Admission(Protocol):
    """The right to have one body read and answered. Holds a place until the `with` block ends."""

    max_body_bytes: int
    """The shell stops reading a body that is longer, and hands over what it has."""

    def answer(self, body: bytes) -> Response: ...

    def refuse(self, error: ApiError) -> Response:
        """In place of `answer`, when the shell cannot bring a body."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Guarded(Protocol):
    """An endpoint behind its guard."""

    def admit(self, head: Head) -> Admission | Response: ...


def json_response(value: Any, status: int = 200) -> Response:
    return Response(status, orjson.dumps(value))


def error_response(error: ApiError) -> Response:
    # A path may hold what UTF-8 cannot say; an error about it must not become another error.
    message = error.message.encode("utf-8", "replace").decode()
    body = {"error": {"code": error.code, "message": message}}
    return Response(error.status, orjson.dumps(body), headers=error.headers)


def announced_length(text: str) -> int | None:
    """The value of a Content-Length header; None for what is no number."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text[:18])  # more digits are no longer a size, and Python refuses thousands of them


class _NotRunning:
    """Stands behind every name while nothing is installed."""

    def admit(self, head: Head) -> Response:
        return error_response(
            ApiError(503, "not_ready", "the portal is starting or stopping; try again in a moment")
        )


_NOT_RUNNING = _NotRunning()
_installed: Mapping[str, Guarded] = {}


def install(endpoints: Mapping[str, Guarded]) -> None:
    """Puts these guarded endpoints in service in place of all earlier ones; an empty mapping: none."""
    global _installed  # one swap of one reference: readers see the old mapping or the new, whole
    _installed = dict(endpoints)


def endpoint(name: str) -> Guarded:
    """The guarded endpoint of that name; one that answers 503 `not_ready` when there is none."""
    return _installed.get(name, _NOT_RUNNING)

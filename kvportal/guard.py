"""What stands between a request and an endpoint, the same in both shells.

In this order: token (401), method (405), content type and encoding (415), announced size (413),
readiness (503), load (503 `overloaded`); then, with the body read, its size (413) and the endpoint, whose
failures become JSON whatever they are. An answer is never HTML and never shows a traceback.

*Opened* endpoints (health, metrics) skip the token and everything about bodies.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Protocol, Self

from django.http.request import split_domain_port, validate_host

from streams.body import body_too_large
from streams.http import NOT_FOUND, ApiError, Endpoint, Head, Request, Response, error_response

log = logging.getLogger(__name__)

Gate = Callable[[], ApiError | None]
"""Says why an endpoint cannot answer now; None when it can. Called for each request."""

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class Observer(Protocol):
    """Is told of every answer of a guarded endpoint."""

    def observe_response(self, endpoint: str, status: int) -> None: ...

    def observe_answer(self, endpoint: str, seconds: float) -> None:
        """Time within the endpoint function, parsing and encoding included, reading the body not."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Who may ask, and how much at once."""

    tokens: tuple[str, ...] = ()
    """Each of them is accepted; none: nobody is asked for a token."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_readers: int = 64
    """Requests whose body is being read or answered. One more is turned away: with 16 MiB each, these
    are already a gigabyte."""
    allowed_hosts: tuple[str, ...] = ("*",)
    """Names of this server, as Django's ALLOWED_HOSTS. Asked for only while there are no tokens: a web
    page that points its own name at this server must not ask in its visitor's stead. A token, which no
    browser adds by itself, makes the check needless, and so does an IP address instead of a name."""


class Guard:
    """Makes guarded endpoints. One guard has one set of places, shared by all of its endpoints."""

    def __init__(self, settings: GuardSettings, *, gates: Mapping[str, Gate], observer: Observer) -> None:
        self.settings = settings
        self.observer = observer
        self.places = threading.BoundedSemaphore(settings.max_readers)
        self._gates = dict(gates)
        self._digests = tuple(_digest(token.encode()) for token in settings.tokens)

    def wrap(
        self, endpoints: Mapping[str, Endpoint], *, opened: Mapping[str, Endpoint] | None = None
    ) -> dict[str, GuardedEndpoint | OpenedEndpoint]:
        """The endpoints as `streams.http.install` takes them, with the one for unknown paths."""
        named = {**endpoints, NOT_FOUND: _not_found}
        wrapped: dict[str, GuardedEndpoint | OpenedEndpoint] = {
            name: GuardedEndpoint(name, endpoint, self, self._gates.get(name))
            for name, endpoint in named.items()
        }
        for name, endpoint in (opened or {}).items():
            wrapped[name] = OpenedEndpoint(name, endpoint)
        return wrapped

    def who_refuses(self, head: Head) -> ApiError | None:
        """Checks the token against all valid ones, without stopping at the first that fits."""
        if self._digests:
            presented = _digest(head.token)
            fits = [hmac.compare_digest(presented, digest) for digest in self._digests]
            return None if any(fits) else _UNAUTHORIZED
        return None if is_own_host(head.host, self.settings.allowed_hosts) else _UNKNOWN_HOST


class GuardedEndpoint:
    """One endpoint behind the guard. Contract: `streams.http.Guarded`."""

    def __init__(self, name: str, endpoint: Endpoint, guard: Guard, gate: Gate | None) -> None:
        self.name = name
        self.endpoint = endpoint
        self.guard = guard
        self._gate = gate

    def admit(self, head: Head) -> Response | Place:
        try:
            error = self._refuse(head)
        except Exception:
            log.exception("the checks before the endpoint %s failed", self.name)
            error = _FAILED
        if error is None and not self.guard.places.acquire(blocking=False):
            error = OVERLOADED
        if error is None:
            return Place(self, head)
        self.guard.observer.observe_response(self.name, error.status)
        return error_response(error)

    def _refuse(self, head: Head) -> ApiError | None:
        settings = self.guard.settings
        error = self.guard.who_refuses(head)
        if error is not None:
            return error
        if self.name == NOT_FOUND:
            return None
        if head.method not in head.allowed:
            return _method_not_allowed(head)
        if head.method in BODY_METHODS and not _may_be_json(head):
            return _unsupported_media_type(head.content_type)
        if head.content_encoding.strip().lower() not in ("", "identity"):
            return _unsupported_encoding(head.content_encoding)
        if head.content_length is not None and head.content_length > settings.max_body_bytes:
            return body_too_large(settings.max_body_bytes)
        return None if self._gate is None else self._gate()

    def answer(self, request: Request) -> Response:
        observer, started = self.guard.observer, time.perf_counter()
        response = _run(self.name, self.endpoint, request)
        observer.observe_answer(self.name, time.perf_counter() - started)
        observer.observe_response(self.name, response.status)
        return response


class Place:
    """One of the guard's places; free again when the `with` block ends. Contract: `Admission`."""

    __slots__ = ("_endpoint", "_head", "max_body_bytes")

    def __init__(self, endpoint: GuardedEndpoint, head: Head) -> None:
        self._endpoint = endpoint
        self._head = head
        self.max_body_bytes = endpoint.guard.settings.max_body_bytes

    def answer(self, body: bytes) -> Response:
        head, error = self._head, self._why_not(body)
        if error is None:
            return self._endpoint.answer(Request(head.method, head.path, body, head.params))
        return self.refuse(error)

    def refuse(self, error: ApiError) -> Response:
        self._endpoint.guard.observer.observe_response(self._endpoint.name, error.status)
        return error_response(error)

    def _why_not(self, body: bytes) -> ApiError | None:
        if len(body) > self.max_body_bytes:
            return body_too_large(self.max_body_bytes)
        if body and self._head.method in BODY_METHODS and not self._head.content_type:
            return _unsupported_media_type("")
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._endpoint.guard.places.release()


class OpenedEndpoint:
    """An endpoint for probes and scrapers: no token, no body, no place."""

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self.endpoint = endpoint

    def admit(self, head: Head) -> Response:
        if head.method not in head.allowed:
            return error_response(_method_not_allowed(head))
        return _run(self.name, self.endpoint, Request(head.method, head.path))


@lru_cache(maxsize=64)
def is_own_host(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a Host header is an IP address, absent, or one of the allowed names."""
    domain, _ = split_domain_port(host)
    if not host or validate_host(domain, allowed):
        return True
    try:
        ipaddress.ip_address(domain.strip("[]"))
    except ValueError:
        return False
    return True


@lru_cache(maxsize=64)
def is_json(content_type: str) -> bool:
    """Whether a Content-Type says JSON in UTF-8 (`application/json`, with or without its charset)."""
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() != "application/json":
        return False
    for parameter in filter(None, (part.strip() for part in parameters.split(";"))):
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            return False
    return True


def _run(name: str, endpoint: Endpoint, request: Request) -> Response:
    try:
        return endpoint(request)
    except ApiError as error:
        return error_response(error)
    except Exception:
        log.exception("the endpoint %s failed", name)  # without the request, which may hold a prompt
        return error_response(_FAILED)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _not_found(request: Request) -> Response:
    raise ApiError(404, "not_found", f"there is nothing at {request.path[:200]}")


def _method_not_allowed(head: Head) -> ApiError:
    allowed = ", ".join(head.allowed)
    return ApiError(
        405,
        "method_not_allowed",
        f"{head.method[:20]} is not allowed here; use {allowed}",
        headers={"Allow": allowed},
    )


def _may_be_json(head: Head) -> bool:
    """A request that says neither type nor length most likely has no body; `Place` sees whether it has."""
    return is_json(head.content_type) or not (head.content_type or head.content_length)


def _unsupported_encoding(found: str) -> ApiError:
    return ApiError(
        415,
        "unsupported_media_type",
        f"the header Content-Encoding must be left out (or identity), found {found[:100]}",
    )


def _unsupported_media_type(found: str) -> ApiError:
    shown = f"found {found[:100]}" if found else "found none"
    return ApiError(
        415, "unsupported_media_type", f"the header Content-Type must be application/json (UTF-8), {shown}"
    )


_FAILED = ApiError(500, "internal_error", "the portal failed on this request; its log says why")
_UNAUTHORIZED = ApiError(
    401, "unauthorized", "the header X-Internal-Token is missing or holds no valid token"
)
_UNKNOWN_HOST = ApiError(
    400,
    "invalid_host",
    "the header Host names no server of this portal; set an API token, or add the name to "
    "KVPORTAL_ALLOWED_HOSTS",
)
OVERLOADED = ApiError(503, "overloaded", "too many requests at once; try again", headers={"Retry-After": "1"})

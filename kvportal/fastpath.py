"""The ASGI application in front of Django: the hot endpoints, answered without it.

Django's handler and a view cost ten times what a query does. An exact path with its method and a JSON
body (or a health probe) is answered here, by the same guarded endpoint that the view would call;
everything else falls through to Django, whose body this application bounds. The views are the contract,
so whatever they answer, this answers byte for byte.

Endpoints run on the event loop. A thread would not free it: parsing holds the GIL from the first byte to
the last, so the longest stall of the loop stays the same, and the hand-over costs about what a whole
query of 4,096 tokens does. What bounds the time on the loop is the number of token IDs that a body may
hold. Heavier answers (`/metrics`, lists of streams and instances) are left to Django, which runs them in
a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from kvportal.guard import is_json
from streams.body import body_too_large
from streams.http import ApiError, Head, Response, announced_length, endpoint, error_response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SECONDS: Final = 10.0
"""Time for a whole body to arrive: a client that stops in the middle must not keep a place."""

ROUTES: Final = {
    ("POST", "/v1/internal/kv-cache/query"): "query",
    ("POST", "/v1/internal/routing/select"): "select",
    ("POST", "/v1/internal/instances/heartbeat"): "heartbeat",
}
PROGRESS_PREFIX: Final = "/v1/internal/routing/requests/"
PROGRESS_SUFFIX: Final = "/progress"
PROBES: Final = {"/livez": "livez", "/readyz": "readyz"}
_HEADERS: Final = frozenset(
    {b"x-internal-token", b"content-type", b"content-encoding", b"content-length", b"host"}
)
PROBE_METHODS: Final = ("GET", "HEAD")


class FastPath:
    """ASGI application for connections of type `http`; `fallback` is Django's."""

    def __init__(
        self, fallback: Application, *, max_body_bytes: int, body_seconds: float = BODY_SECONDS
    ) -> None:
        self._fallback = fallback
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        name = ROUTES.get((method, path))
        params: dict[str, str] = {}
        if name is None and method == "POST" and is_progress(path):
            name = "progress"
            params = {"request_id": path[len(PROGRESS_PREFIX) : -len(PROGRESS_SUFFIX)]}
        if name is not None:
            head = read_head(scope, (method,), params)
            if is_json(head.content_type):
                await self._answer(name, head, receive, send)
                return
        elif path in PROBES and method in PROBE_METHODS:
            await self._answer(PROBES[path], read_head(scope, PROBE_METHODS, params), receive, send)
            return
        await self._fall_through(scope, receive, send)

    async def _answer(self, name: str, head: Head, receive: Receive, send: Send) -> None:
        admission = endpoint(name).admit(head)
        if isinstance(admission, Response):
            await send_response(send, admission, head.method)
            return
        with admission:
            try:
                async with asyncio.timeout(self._body_seconds):
                    body = await read_body(receive, admission.max_body_bytes)
            except TimeoutError:
                await send_response(send, admission.refuse(_BODY_TIMEOUT), head.method)
                return
            response = None if body is None else admission.answer(body)
        if response is not None:
            await send_response(send, response, head.method)

    async def _fall_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Django stores a body before any view sees it, however long it is."""
        limit = self._max_body_bytes
        announced = read_head(scope, ()).content_length
        if announced is not None and announced > limit:
            await send_response(send, error_response(body_too_large(limit)), scope["method"])
            return
        await _Bounded(receive, send, limit).run(self._fallback, scope)


class _Bounded:
    """Runs an application on a body of bounded length. A longer one is answered with 413; to the
    application it looks as if the client had gone, and what it says then is not sent."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._left = limit
        self._cut = False
        self._started = False

    async def run(self, application: Application, scope: Scope) -> None:
        await application(scope, self._bounded_receive, self._bounded_send)
        if self._cut and not self._started:
            await send_response(self._send, error_response(body_too_large(self._limit)), scope["method"])

    async def _bounded_receive(self) -> Message:
        if self._cut:
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self._cut = True
                return {"type": "http.disconnect"}
        return message

    async def _bounded_send(self, message: Message) -> None:
        if self._cut and not self._started:
            return
        self._started = True
        await self._send(message)


def is_progress(path: str) -> bool:
    """Whether a path is `…/requests/<request_id>/progress` with a request_id (which may hold slashes)."""
    return (
        path.startswith(PROGRESS_PREFIX)
        and path.endswith(PROGRESS_SUFFIX)
        and len(path) > len(PROGRESS_PREFIX) + len(PROGRESS_SUFFIX)
    )


def read_head(scope: Scope, allowed: tuple[str, ...], params: dict[str, str] | None = None) -> Head:
    """The head of a request. Of a header that comes several times, all values are joined by commas,
    as Django does."""
    found: dict[bytes, bytes] = {}
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for key, value in headers:
        if key in _HEADERS:
            found[key] = value if key not in found else found[key] + b"," + value

    def text(name: bytes) -> str:
        return found.get(name, b"").decode("latin-1")

    return Head(
        method=scope["method"],
        path=scope["path"],
        allowed=allowed,
        params=params or {},
        token=found.get(b"x-internal-token", b""),
        content_type=text(b"content-type"),
        content_encoding=text(b"content-encoding"),
        content_length=announced_length(text(b"content-length")),
        host=text(b"host"),
    )


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None when the client went away in the middle. Stops as soon as it is too long
    and returns what it has, which is then longer than `limit`."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        chunks.append(chunk)
        if size > limit or not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def send_response(send: Send, response: Response, method: str) -> None:
    for message in response_messages(response, method):
        await send(message)


def response_messages(response: Response, method: str) -> tuple[Message, Message]:
    """A response as ASGI has it. To HEAD, everything but the body is what GET would be answered."""
    body = b"" if method == "HEAD" else response.body
    headers = [] if response.status == 204 else [(b"content-length", str(len(response.body)).encode())]
    if response.body:
        headers.append((b"content-type", response.content_type.encode("latin-1")))
    headers += [
        (key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in response.headers.items()
    ]
    if response.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not waited for
    return (
        {"type": "http.response.start", "status": response.status, "headers": headers},
        {"type": "http.response.body", "body": body},
    )


_BODY_TIMEOUT = ApiError(408, "body_timeout", "the body did not arrive in time")

"""The ASGI servers that `manage.py serve` can run, and what they have in common.

A server gets a socket that listens already, the application and a `StopRequest`. It returns when it
was asked to stop, in this order: `/readyz` says so for the drain time, the port closes, requests in
flight are answered (for a bounded time), WebSockets are closed with 1001 "going away" (1012 "service
restart" under uvicorn), tasks that are left are cancelled, and the event loop is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]],
    Awaitable[None],
]


class Output(Protocol):
    """Where lines for people go: `write` takes one without its end."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Times:
    """How long a server waits for what, in seconds. The steps of an orderly stop, together with the
    runtime's own stop, stay below `STOP_SECONDS`."""

    drain: float = 0.0
    """Between the request to stop and closing the port."""
    in_flight: float = 2.0
    """For requests that are being answered."""
    websockets: float = 0.5
    """For the other side to confirm that a WebSocket closes."""
    tasks: float = 0.5
    """For tasks that were cancelled."""
    arrival: float = 30.0
    """For a request to arrive whole (Daphne hands nothing over before); then the connection is reset."""
    ping_interval: float = 20.0
    """From a WebSocket's answer to a ping (at first: from its opening) to the next ping."""
    ping_timeout: float = 20.0
    """For the answer; then the connection is reset. What is sent to a client that does not read is kept
    until then. Other messages of the client do not count: only one that reads sees the ping."""


STOP_SECONDS = 4.6
"""From the request to stop (the drain time comes on top) to the end of the process, at the latest:
5 seconds are promised, and the interpreter needs some of them."""

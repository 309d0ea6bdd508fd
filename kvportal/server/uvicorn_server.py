"""Uvicorn (an optional extra): it stops in order by itself; signals and deadlines are ours."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import socket
from collections.abc import Callable, Generator

from kvportal.server import Application, Times
from kvportal.server.stopping import StopRequest


class UvicornMissingError(Exception):
    """The extra is not installed; the sentence says how to get it."""


def require_uvicorn() -> None:
    """Raises UvicornMissingError when the extra is not installed."""
    if importlib.util.find_spec("uvicorn") is None:
        raise UvicornMissingError(
            "--server uvicorn needs a package that is not installed: pip install 'kvportal[uvicorn]', "
            "or leave the flag out to use daphne"
        )


def run_uvicorn(
    application: Application,
    listener: socket.socket,
    stop: StopRequest,
    times: Times,
    *,
    on_drain: Callable[[], object],
) -> None:
    """Serves until `stop` is requested; `application` is told of the loop by the lifespan protocol."""
    import uvicorn
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class WebSocket(WebSocketsSansIOProtocol):
        def keepalive_timeout(self) -> None:
            """A close frame would wait behind what the client does not read, and the connection with it."""
            super().keepalive_timeout()
            self.transport.abort()

    class PortalServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            """The process has its own handlers; one of them ends in `stop_serving`."""
            loop = asyncio.get_running_loop()
            stop.on_request(lambda: loop.call_soon_threadsafe(self.stop_serving))
            yield

        def stop_serving(self) -> None:
            on_drain()
            asyncio.get_running_loop().call_later(times.drain, self.handle_exit, 0, None)

    config = uvicorn.Config(
        application,
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws=WebSocket,
        ws_ping_interval=times.ping_interval,
        ws_ping_timeout=times.ping_timeout,
        timeout_graceful_shutdown=math.ceil(times.in_flight),
    )
    PortalServer(config).run(sockets=[listener])

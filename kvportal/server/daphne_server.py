"""Daphne, with an orderly stop and without its second-long delays.

What is different from Daphne's own `Server`:

* It adopts a listening socket, so that a busy port is found before it starts.
* A stop waits for requests in flight, tells clients not to send more on their connections, and
  closes WebSockets with a close frame. Daphne drops both.
* Finished requests are forgotten at once. Daphne sweeps them once a second, which stalls the loop for
  tens of milliseconds at thousands of requests per second, and answers a failed request only then.
* A request body is kept in memory up to a limit, and no further. Daphne writes it to a temporary
  file, without a limit, and hands it over in pieces of 8 KiB. Twisted would also parse every form, on the
  event loop: 16 MiB of one keep it for many seconds, whoever sent them.
* Bodies that are still arriving take a bounded amount of memory together, and each has a bounded time.
  Nobody has looked at their token yet.
* A connection that an answer calls closed is closed, and a client cannot choose the root path of the
  application by a header.
* A WebSocket whose client does not answer a ping is reset even if it sends messages all the time. Daphne
  pings only those that are silent, so what is sent to a client that never reads would pile up.
* After the loop has ended, leftover tasks, the default executor and the loop itself are closed;
  Python 3.11 may crash at exit otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any, Final
from urllib.parse import urlsplit

from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.server import Server, reactor
from daphne.ws_protocol import WebSocketProtocol

from kvportal.fastpath import response_messages
from kvportal.guard import OVERLOADED
from kvportal.server import Application, Times
from kvportal.server.stopping import StopRequest
from streams.http import error_response
from streams.wording import counted

log = logging.getLogger(__name__)

GOING_AWAY = 1001
POLL_SECONDS = 0.02
SWEEP_SECONDS = 1.0
NO_TIMEOUT = -1
CLOSE = (b"connection", b"close")
BODIES_ARRIVING: Final = 16
"""So many bodies of the greatest length may be arriving at once. One more is turned away with a 503."""
SMALL_BODY_BYTES: Final = 64 * 1024
"""A body that is no longer than this is never turned away."""


def run_daphne(
    application: Application,
    listener: socket.socket,
    stop: StopRequest,
    times: Times,
    *,
    max_body_bytes: int,
    on_drain: Callable[[], object],
    attach: Callable[[asyncio.AbstractEventLoop], object],
    detach: Callable[[], object],
) -> None:
    """Serves until `stop` is requested. `listener` is closed afterwards.

    `attach` is called with the event loop as soon as it runs, `on_drain` when the stop begins,
    `detach` while the loop still runs and everything else has ended.
    """
    server = _Server(application, max_body_bytes, times)
    loop: asyncio.AbstractEventLoop = reactor._asyncioEventloop
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        on_drain()
        try:
            await server.wind_up(times)
        finally:
            detach()
            reactor.stop()

    def begin() -> None:
        attach(loop)
        stop.on_request(lambda: loop.call_soon_threadsafe(lambda: ending.append(loop.create_task(end()))))

    def start() -> None:
        server.adopt(listener)
        reactor.callWhenRunning(begin)

    server.ready_callable = start
    server.run()
    close_loop(loop, times.tasks)


class _Server(Server):
    def __init__(self, application: Application, max_body_bytes: int, times: Times) -> None:
        super().__init__(
            application,
            endpoints=["adopted"],
            signal_handlers=False,
            request_buffer_size=max_body_bytes + 2,  # one piece: a body is at most one byte over the limit
            websocket_timeout=NO_TIMEOUT,
            ping_interval=math.inf,  # not Daphne's own: see `adopt`
            server_name="",
        )
        self.endpoints: list[str] = []  # nothing for `run` to open: see `adopt`
        self.max_body_bytes = max_body_bytes
        self.times = times
        self.stopping = False
        self.arriving = 0
        """Bytes kept of bodies whose end has not come."""
        self._port: Any = None  # an IListeningPort, once adopted

    def adopt(self, listener: socket.socket) -> None:
        """Accepts connections on a socket that listens already; Twisted works on a duplicate of it."""
        self.ws_factory.setProtocolOptions(
            autoPingInterval=self.times.ping_interval,
            autoPingTimeout=self.times.ping_timeout,
            autoPingRestartOnAnyTraffic=False,
        )
        self._port = reactor.adoptStreamPort(listener.fileno(), listener.family, _HTTPFactory(self))
        listener.close()

    # ---- connections: forgotten as soon as both sides are done with them

    def create_application(self, protocol: Any, scope: dict[str, Any]) -> asyncio.Queue[Any] | None:
        queue: asyncio.Queue[Any] | None = super().create_application(protocol, scope)
        details = self.connections.get(protocol)
        if details is not None and "application_instance" in details:
            details["application_instance"].add_done_callback(lambda task: self._finished(protocol, task))
        return queue

    def _finished(self, protocol: Any, task: asyncio.Task[None]) -> None:
        details = self.connections.get(protocol)
        if details is None:
            return
        details.pop("application_instance", None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the application failed: %s", error, exc_info=error)
            if "disconnected" not in details:
                protocol.handle_exception(error)
        if "disconnected" in details:
            self.connections.pop(protocol, None)

    def protocol_disconnected(self, protocol: Any) -> None:
        details = self.connections.get(protocol)
        if details is None:
            return
        super().protocol_disconnected(protocol)
        if "application_instance" not in details:
            self.connections.pop(protocol, None)

    def application_checker(self) -> None:
        """Only ends applications whose client has been gone for long, and requests that do not arrive;
        `_finished` does the rest."""
        now = time.time()
        for protocol, details in list(self.connections.items()):
            if isinstance(protocol, _Request) and protocol.is_late(self.times.arrival):
                protocol.channel.transport.abortConnection()
                continue
            gone, task = details.get("disconnected"), details.get("application_instance")
            if gone and task and not task.done() and now - gone > self.application_close_timeout:
                log.warning(
                    "the application did not end after its client had gone, and was cancelled: %r", protocol
                )
                task.cancel()
        reactor.callLater(SWEEP_SECONDS, self.application_checker)

    async def handle_reply(self, protocol: Any, message: dict[str, Any]) -> None:
        if message.get("type") == "http.response.start":
            if self.stopping:
                message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            if CLOSE in map(tuple, message.get("headers", ())) and protocol.channel is not None:
                protocol.channel.persistent = False  # Twisted closes after the answer, as the header says
        await super().handle_reply(protocol, message)

    # ---- the end

    async def wind_up(self, times: Times) -> None:
        """Everything up to the stop of the reactor, each step in its time."""
        await asyncio.sleep(times.drain)
        self.stopping = True
        if self._port is not None:
            closing = self._port.stopListening()
            if closing is not None:
                await closing.asFuture(asyncio.get_running_loop())
        await self._until(lambda: not self._requests(), times.in_flight)
        if self._requests():
            cut_off = counted(len(self._requests()), "request")
            log.warning("the server stops, and cuts off what is still being answered: %s", cut_off)
        for protocol in self._websockets():
            protocol.sendCloseFrame(code=GOING_AWAY, reasonUtf8=b"the server stops", isReply=False)
        await self._until(lambda: not self._websockets(), times.websockets)
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=times.tasks)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        # What is waited for are Daphne's own variables, which nobody announces.
        while not condition() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _open(self, kind: type) -> list[Any]:
        return [
            protocol
            for protocol, details in self.connections.items()
            if isinstance(protocol, kind) and "disconnected" not in details
        ]

    def _requests(self) -> list[Any]:
        return self._open(WebRequest)

    def _websockets(self) -> list[Any]:
        open_ones = (WebSocketProtocol.STATE_OPEN, WebSocketProtocol.STATE_CLOSING)
        return [protocol for protocol in self._open(WebSocketProtocol) if protocol.state in open_ones]

    def _tasks(self) -> list[asyncio.Task[None]]:
        """The applications that still run."""
        found = (details.get("application_instance") for details in self.connections.values())
        return [task for task in found if task is not None and not task.done()]

    def kill_all_applications(self) -> None:
        """`wind_up` has done it, with a deadline."""


class _Request(WebRequest):
    """A request whose body stays in memory and is cut one byte after the limit.

    That byte tells the application that the body is too long; the rest is read and dropped, because a
    client that is still sending would not see an answer. The same is done with a body that there is no
    room for.
    """

    method: bytes
    uri: bytes
    path: bytes

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, parsePOSTFormSubmission=False)
        self.turned_away = False
        self._began = time.monotonic()
        self._arrived = False
        self._kept = 0

    def is_late(self, seconds: float) -> bool:
        """Whether it is still arriving after so many seconds."""
        waiting = not self._arrived and self.channel is not None
        return waiting and time.monotonic() - self._began > seconds

    def gotLength(self, length: int | None) -> None:  # noqa: N802 - Twisted's name
        self.content = BytesIO()

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802 - Twisted's name
        server, kept = self.server, data[: self.server.max_body_bytes + 1 - self._kept]
        room = BODIES_ARRIVING * server.max_body_bytes - server.arriving
        if self._kept + len(kept) > SMALL_BODY_BYTES and len(kept) > room:
            self.turned_away = True
            self._release()
        if not self.turned_away:
            self._kept += len(kept)
            server.arriving += len(kept)
            self.content.write(kept)

    def process(self) -> Any:
        self._arrived = True
        if self.turned_away:
            for message in response_messages(error_response(OVERLOADED), self.method.decode("latin-1")):
                self.handle_reply(message)  # without the application
            return None
        self.requestHeaders.removeHeader(b"daphne-root-path")
        if not self.uri.startswith(b"/"):
            self._take_absolute_form()
        processing = super().process()
        self._release()
        return processing

    def connectionLost(self, reason: Any) -> None:  # noqa: N802 - Twisted's name
        self._release()
        super().connectionLost(reason)

    def _release(self) -> None:
        """What was kept is the application's by now, or nobody's."""
        self.server.arriving -= self._kept
        self._kept = 0
        self.content = BytesIO()

    def _take_absolute_form(self) -> None:
        """A client that believes to speak to a proxy names the whole URL."""
        try:
            parts = urlsplit(self.uri)
        except ValueError:
            return
        if parts.scheme in (b"http", b"https") and parts.netloc:
            self.path = parts.path or b"/"
            self.uri = self.path + (b"?" + parts.query if parts.query else b"")


class _HTTPFactory(HTTPFactory):
    def buildProtocol(self, addr: Any) -> Any:  # noqa: N802 - Twisted's name
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = _Request
        return protocol


def close_loop(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Ends what is left on a loop that has stopped, then closes it."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=seconds))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()

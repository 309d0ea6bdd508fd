"""Asks engines whether they live: `GET http://<name>/health`, all side by side, each bounded.

A probe never runs on the thread that asks for it: one thread with an event loop runs them all, so slow
ones cannot take a place away from others. One deadline covers a whole attempt: resolving the name,
connecting to whichever of its addresses answers, and the status line. Names are resolved in the
background, and an attempt gives up waiting when its time is over: `getaddrinfo` cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from routing.instances.core import ProbeResult, StartProbe
from streams.discovery import split_address
from streams.resolver import Resolved, Resolver

log = logging.getLogger(__name__)

MAX_PARALLEL: Final = 1024
"""Probes under way at once, for the sake of file descriptors; the others wait for their turn."""
_PAUSE: Final = 0.1
_MAX_STATUS_LINE: Final = 1024


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How patiently an engine is asked after its registration is gone."""

    timeout: float = 1.0
    """Seconds for one attempt, resolving and connecting included."""
    attempts: int = 2


class Prober:
    """Runs probes on a thread of its own and hands each result to `report`, which must not wait."""

    def __init__(
        self,
        settings: ProbeSettings,
        report: Callable[[ProbeResult], None],
        resolver: Resolver | None = None,
    ) -> None:
        self._settings = settings
        self._report = report
        self._resolver = resolver or Resolver()
        self._lock = threading.Lock()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Owned by the loop's thread.
        self._turns = asyncio.Semaphore(MAX_PARALLEL)
        self._tasks: set[asyncio.Task[None]] = set()

    def start_probe(self, probe: StartProbe) -> None:
        """Returns at once. After `stop` nothing happens."""
        with self._lock:
            if self._stopped:
                return
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="health-probe", daemon=True
                )
                self._thread.start()
            self._loop.call_soon_threadsafe(self._launch, probe)

    def stop(self, timeout: float = 2.0) -> None:
        """Give up all probes and end the thread. Nothing is reported any more, nothing is waited for."""
        with self._lock:
            self._stopped = True
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout)

    # ---- on the loop's thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
            loop.run_until_complete(self._give_up())
        finally:
            loop.close()

    async def _give_up(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _launch(self, probe: StartProbe) -> None:
        task = asyncio.get_running_loop().create_task(self._probe(probe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, probe: StartProbe) -> None:
        try:
            async with self._turns:
                healthy, detail = await self._ask(probe.name)
        except Exception as error:
            log.exception("probing %s failed", probe.name)
            healthy, detail = False, f"{type(error).__name__}: {error}"
        self._report(ProbeResult(probe.name, probe.token, healthy, detail))

    async def _ask(self, name: str) -> tuple[bool, str]:
        try:
            host, port = split_address(name)
        except ValueError as error:
            return False, str(error)
        detail = ""
        for attempt in range(self._settings.attempts):
            if attempt:
                await asyncio.sleep(_PAUSE)
            healthy, detail = await self._attempt(host, port)
            if healthy:
                return True, detail
        return False, detail

    async def _attempt(self, host: str, port: int) -> tuple[bool, str]:
        """Whether `/health` answers 200 before the attempt's time is over, and what was seen."""
        timeout, slow = self._settings.timeout, "its name was not resolved"
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._addresses(host)
                slow = "no answer"
                with await _connect(addresses, port, deadline) as sock:
                    return _judged(await _status_line(sock, host, port))
        except TimeoutError:
            return False, f"{slow} within {timeout:g} s"
        except OSError as error:
            return False, os.strerror(error.errno) if error.errno else str(error)

    async def _addresses(self, host: str) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Resolved] = loop.create_future()

        def done(resolved: Resolved) -> None:
            with suppress(RuntimeError):  # the loop may have ended long before the name is resolved
                loop.call_soon_threadsafe(_settle, answer, resolved)

        self._resolver.resolve(host.strip("[]"), done)
        resolved = await answer
        if resolved.error is not None or not resolved.addresses:
            raise OSError(f"its name cannot be resolved: {resolved.error or 'it has no address'}")
        return resolved.addresses


def _settle(answer: asyncio.Future[Resolved], resolved: Resolved) -> None:
    if not answer.done():
        answer.set_result(resolved)


async def _connect(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    """A connection to the first address that takes one. Each has its share of the time that is left, so
    that one that is mute does not use up that of the next."""
    loop = asyncio.get_running_loop()
    refusal: OSError = TimeoutError()
    for position, address in enumerate(addresses):
        share = (deadline - loop.time()) / (len(addresses) - position)
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(share):
                await loop.sock_connect(sock, (address, port))
            return sock
        except OSError as error:
            refusal = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise refusal


async def _status_line(sock: socket.socket, host: str, port: int) -> bytes:
    """Asks, and reads the first line of the answer; what follows is of no interest."""
    loop = asyncio.get_running_loop()
    request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    await loop.sock_sendall(sock, request.encode("ascii", "replace"))
    received = b""
    while b"\n" not in received and len(received) < _MAX_STATUS_LINE:
        piece = await loop.sock_recv(sock, _MAX_STATUS_LINE)
        if not piece:
            break
        received += piece
    return received.partition(b"\n")[0].rstrip(b"\r")


def _judged(line: bytes) -> tuple[bool, str]:
    parts = line.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
        return False, "the answer is not HTTP"
    return parts[1] == b"200", f"status {parts[1].decode('ascii', 'replace')[:10]}"

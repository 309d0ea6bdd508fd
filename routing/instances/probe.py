"""Asks engines whether they live: `GET http://<name>/health`, several side by side, each bounded.

A probe never runs on the thread that asks for it. Only the status line of an answer is read, under
one deadline for the whole attempt: an engine that sends a byte a second does not count as alive.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from routing.instances.core import ProbeResult, StartProbe
from streams.discovery import split_address

log = logging.getLogger(__name__)

MAX_PARALLEL: Final = 64
_PAUSE: Final = 0.1
_MAX_STATUS_LINE: Final = 1024


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How patiently an engine is asked after its registration is gone."""

    timeout: float = 1.0
    """Seconds for one attempt, connecting included."""
    attempts: int = 2


class Prober:
    """Runs probes on threads of its own and hands each result to `report`."""

    def __init__(self, settings: ProbeSettings, report: Callable[[ProbeResult], None]) -> None:
        self._settings = settings
        self._report = report
        self._waiting: queue.SimpleQueue[StartProbe | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._open = 0
        """Probes that are waiting or running."""

    def start_probe(self, probe: StartProbe) -> None:
        """Returns at once. At most `MAX_PARALLEL` probes run at a time, the others wait."""
        with self._lock:
            if self._stop.is_set():
                return
            self._open += 1
            self._waiting.put(probe)
            if self._open > len(self._threads) and len(self._threads) < MAX_PARALLEL:
                thread = threading.Thread(target=self._work, name="health-probe", daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the threads. Probes that still wait are not started any more."""
        with self._lock:
            self._stop.set()
            threads = list(self._threads)
        for _ in threads:
            self._waiting.put(None)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (probe := self._waiting.get()) is not None and not self._stop.is_set():
            try:
                healthy, detail = self._ask(probe.name)
            except Exception as error:
                log.exception("probing %s failed", probe.name)
                healthy, detail = False, f"{type(error).__name__}: {error}"
            with self._lock:
                self._open -= 1
            if not self._stop.is_set():
                self._report(ProbeResult(probe.name, probe.token, healthy, detail))

    def _ask(self, name: str) -> tuple[bool, str]:
        try:
            host, port = split_address(name)
        except ValueError as error:
            return False, str(error)
        detail = ""
        for attempt in range(self._settings.attempts):
            if attempt and self._stop.wait(_PAUSE):
                break
            healthy, detail = ask_health(host, port, self._settings.timeout)
            if healthy:
                return True, detail
        return False, detail


def ask_health(host: str, port: int, timeout: float) -> tuple[bool, str]:
    """One attempt: whether `/health` answers 200 within `timeout` seconds, and what was seen."""
    deadline = time.monotonic() + timeout
    bare = host.strip("[]")
    try:
        with socket.create_connection((bare, port), timeout) as sock:
            request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
            sock.sendall(request.encode("ascii", "replace"))
            line = _status_line(sock, deadline)
    except TimeoutError:
        return False, f"no answer within {timeout:g} s"
    except (OSError, UnicodeError) as error:
        return False, str(error)
    parts = line.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
        return False, "the answer is not HTTP"
    return parts[1] == b"200", f"status {parts[1].decode('ascii', 'replace')[:10]}"


def _status_line(sock: socket.socket, deadline: float) -> bytes:
    received = b""
    while b"\n" not in received and len(received) < _MAX_STATUS_LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece = sock.recv(_MAX_STATUS_LINE)
        if not piece:
            break
        received += piece
    return received.partition(b"\n")[0].rstrip(b"\r")

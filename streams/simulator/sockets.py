"""The sockets of a publisher and the one thread that creates, uses and closes them.

Everybody else posts jobs: callables that run on that thread, in order. Methods marked *on the thread* may
only be called from jobs and callbacks.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import zmq

from streams.simulator.messages import Frames

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
SocketName = Literal["live", "replay"]
Job = Callable[[], None]

RETRY_S = 0.005
"""Pause before a full socket or a port that is not free yet is tried again."""
REBIND_S = 5.0
"""How long a port may stay taken after its socket was closed."""
_POST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """Where to listen and what to do for slow subscribers; see `PublisherConfig`."""

    endpoint: str
    replay_endpoint: str
    send_hwm: int
    lossless: bool


class SocketThread:
    """XPUB and ROUTER on TCP, from `start` to `close`.

    `on_subscription(joined)` and `on_request(identity, frames)` are called on the thread.
    """

    def __init__(
        self,
        settings: SocketSettings,
        context: Context,
        on_subscription: Callable[[bool], None],
        on_request: Callable[[bytes, Frames], None],
    ) -> None:
        self._settings = settings
        self._context = context
        self._on_subscription = on_subscription
        self._on_request = on_request
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: deque[tuple[Job, Future[None] | None]] = deque()
        self._promises: set[Future[None]] = set()
        self._timers: list[tuple[float, int, Job]] = []
        self._timer_ids = itertools.count()
        self._outgoing: deque[Frames] = deque()
        self._sockets: dict[SocketName, zmq.Socket[bytes]] = {}
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self.endpoint = settings.endpoint
        self.replay_endpoint = settings.replay_endpoint
        self._thread = threading.Thread(target=self._main, name="sim-publisher", daemon=True)
        self._started: Future[None] = Future()

    def start(self) -> None:
        """Return when both sockets are bound; raises `OSError` when they cannot be."""
        self._thread.start()
        self._started.result()

    # -- any thread -----------------------------------------------------------------------------------

    def post(self, job: Job, *, wait: bool = False) -> None:
        """Run `job` on the thread, after everything posted before; `wait` until it is done."""
        done = self.promise() if wait else None
        with self._lock:
            if self._closed:
                raise RuntimeError("the publisher is closed")
            self._jobs.append((job, done))
            self._wake()
        if done is not None:
            done.result(_POST_TIMEOUT_S)

    def promise(self) -> Future[None]:
        """A future for a job that takes several turns; cancelled when the thread ends before."""
        promise: Future[None] = Future()
        self._promises.add(promise)
        promise.add_done_callback(self._promises.discard)
        return promise

    @property
    def waiting(self) -> int:
        """Messages that slow subscribers hold up (only with `lossless`)."""
        return len(self._outgoing)

    def close(self) -> None:
        """Close the sockets and join the thread. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake()
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()
        for promise in list(self._promises):
            promise.cancel()

    # -- on the thread --------------------------------------------------------------------------------

    def send(self, frames: Frames) -> None:
        """Send a live message; while the socket is away, it is lost."""
        self._outgoing.append(frames)
        self._send_outgoing()

    def reply(self, identity: bytes, frames: Frames) -> None:
        """Send one frame set to a requester; lost while the socket is away or the requester is gone."""
        replay = self._sockets.get("replay")
        if replay is not None:
            replay.send_multipart([identity, *frames])

    def later(self, delay_s: float, job: Job) -> None:
        """Run `job` on the thread after `delay_s` seconds."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_ids), job))

    def drop(self, names: list[SocketName], down_s: float, done: Future[None]) -> None:
        """Close sockets and bind the same ports again after `down_s` seconds; `done` tells how it went."""
        for name in names:
            self._close_socket(name)
        deadline = time.monotonic() + down_s + REBIND_S
        self.later(down_s, partial(self._reopen, names, deadline, done))

    # -- inside ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self.endpoint = self._open("live", self.endpoint)
            self.replay_endpoint = self._open("replay", self.replay_endpoint)
            self._started.set_result(None)
            while not self._closed:
                self._turn()
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                log.exception("publisher %s ended", self.endpoint)
        finally:
            for name in list(self._sockets):
                self._close_socket(name)

    def _turn(self) -> None:
        ready = self._poll()
        with suppress(BlockingIOError):
            self._wake_in.recv(4096)
        for _ in range(len(self._jobs)):
            self._run(*self._jobs.popleft())
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._run(heapq.heappop(self._timers)[2], None)
        self._send_outgoing()
        for name, opened in list(self._sockets.items()):
            if opened in ready:
                read = self._read_subscriptions if name == "live" else self._read_requests
                self._run(partial(read, opened), None)

    def _run(self, job: Job, done: Future[None] | None) -> None:
        try:
            job()
        except Exception as error:
            if done is None:
                log.exception("publisher %s: a job failed", self.endpoint)
            else:
                done.set_exception(error)
        else:
            if done is not None:
                done.set_result(None)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough wake-ups are already waiting
            self._wake_out.send(b"\0")

    def _poll(self) -> dict[Any, int]:
        poller = zmq.Poller()
        poller.register(self._wake_in.fileno(), zmq.POLLIN)
        for each in self._sockets.values():
            poller.register(each, zmq.POLLIN)
        return dict(poller.poll(self._patience_ms()))

    def _patience_ms(self) -> int | None:
        if self._jobs:
            return 0
        if self._outgoing:
            return int(RETRY_S * 1000)
        if not self._timers:
            return None
        left = self._timers[0][0] - time.monotonic()
        return 0 if left <= 0 else int(left * 1000) + 1

    def _open(self, name: SocketName, endpoint: str) -> str:
        opened = self._context.socket(zmq.XPUB if name == "live" else zmq.ROUTER)
        try:
            opened.linger = 0
            opened.sndhwm = self._settings.send_hwm
            opened.setsockopt(zmq.IPV6, int("[" in endpoint))
            if name == "live":
                opened.setsockopt(zmq.XPUB_VERBOSER, 1)
                opened.setsockopt(zmq.XPUB_NODROP, int(self._settings.lossless))
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            opened.close(linger=0)
            raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from error
        self._sockets[name] = opened
        return str(opened.getsockopt_string(zmq.LAST_ENDPOINT))

    def _close_socket(self, name: SocketName) -> None:
        opened = self._sockets.pop(name, None)
        if opened is not None:
            opened.close(linger=0)

    def _reopen(self, names: list[SocketName], deadline: float, done: Future[None]) -> None:
        try:
            for name in names:
                if name not in self._sockets:
                    self._open(name, self.endpoint if name == "live" else self.replay_endpoint)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                done.set_exception(error)
            else:
                self.later(RETRY_S, partial(self._reopen, names, deadline, done))
            return
        done.set_result(None)

    def _send_outgoing(self) -> None:
        live = self._sockets.get("live")
        if live is None:
            self._outgoing.clear()
            return
        while self._outgoing:
            try:
                live.send_multipart(self._outgoing[0], flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outgoing.popleft()

    def _read_subscriptions(self, live: zmq.Socket[bytes]) -> None:
        while live.poll(0):
            self._on_subscription(live.recv()[:1] == b"\x01")

    def _read_requests(self, replay: zmq.Socket[bytes]) -> None:
        while replay.poll(0):
            identity, *frames = replay.recv_multipart()
            self._on_request(identity, frames)

"""The thread that follows one stream: it owns the sockets and brings what arrives to a Follower.

The loop blocks in poll until a socket, a command or a deadline needs it; there is no tick, so an idle
stream costs nothing. Other threads only post commands and read status.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from streams.follower import Follower, Surroundings
from streams.resolver import Resolved, Resolver, is_numeric
from streams.sockets import (
    Context,
    LiveSocket,
    MonitoredSocket,
    SnapshotSocket,
    join_endpoint,
    split_endpoint,
)
from streams.spec import StreamSpec
from streams.status import StreamStatus

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 32
"""Live messages taken before the loop looks at everything else again."""
MESSAGES_WHILE_BUILDING = 4
"""The same while a view is built: fewer than are merged in a turn, or it would never catch up."""
CRASH_PAUSE = 1.0
"""Seconds before a stream whose code failed unexpectedly starts anew."""


class Subscriber:
    """Follows one stream in a thread of its own. `start`, then `stop` and `join`."""

    def __init__(
        self, spec: StreamSpec, around: Surroundings, context: Context, resolver: Resolver, seed: int
    ) -> None:
        self.spec = spec
        self._around = around
        self._context = context
        self._resolver = resolver
        self._follower = Follower(spec, around, random.Random(seed))
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stream {spec.id}", daemon=True)
        self._poller = zmq.Poller()
        self._live: LiveSocket | None = None
        self._live_number: int | None = None
        self._peer: tuple[str, str] | None = None
        """Host and address of the live connection, for snapshots from the same host."""
        self._snapshot: SnapshotSocket | None = None
        self._snapshot_number: int | None = None

    # For other threads.

    def start(self) -> None:
        """Raises RuntimeError when the system has no thread for it."""
        try:
            self._thread.start()
        except RuntimeError:
            self._close_wake()
            raise

    def stop(self) -> None:
        """Ask the thread to end; returns at once."""
        self._stopping.set()
        self._wake()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end; False if the thread still runs."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def resync(self, reason: str, drop: bool) -> None:
        """Order a fresh snapshot; returns at once."""
        self._post(lambda: self._follower.resync(reason, drop))

    def status(self) -> StreamStatus:
        return self._follower.status()

    def _post(self, command: Callable[[], None]) -> None:
        """Have the thread do something soon."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        # Full: the thread will wake anyway. Closed: it has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"!")

    # The thread.

    def _run(self) -> None:
        self._poller.register(self._wake_reader, zmq.POLLIN)
        try:
            self._guarded(self._follower.start)
            while not self._stopping.is_set():
                self._guarded(self._turn)
        finally:
            self._close_live()
            self._close_snapshot()
            self._follower.close()
            self._close_wake()

    def _guarded(self, work: Callable[[], None]) -> None:
        """After a fault of ours end service, and do not spin. Nothing but `stop` may end the thread."""
        try:
            work()
        except Exception:
            log.exception("stream %s: unexpected failure, starting it anew", self.spec.id)
            try:
                self._follower.crashed()
            except Exception:
                log.exception("stream %s: failed again on the way to starting anew", self.spec.id)
            self._stopping.wait(CRASH_PAUSE)

    def _turn(self) -> None:
        """One round: open or close sockets as needed, work, wait, take what arrived."""
        seconds = self._follower.tick()
        self._match_sockets()
        self._follower.step()
        self._match_sockets()
        timeout = None if seconds is None else max(0, int(seconds * 1000) + (seconds > 0))
        ready = dict(self._poller.poll(timeout))
        if self._wake_reader.fileno() in ready:
            self._take_commands()
            self._match_sockets()
        self._take_links(self._live, self._follower.live_link, ready)
        self._take_links(self._snapshot, self._follower.replay_link, ready)
        if self._live is not None and self._live.socket in ready:
            self._take_live(self._live)
        if self._snapshot is not None and self._snapshot.socket in ready:
            self._take_snapshot(self._snapshot)

    def _match_sockets(self) -> None:
        """Open, close or replace sockets so that they are the ones the lifecycle asks for."""
        life = self._follower.life
        if life.live != self._live_number:
            self._close_live()
            self._live_number = life.live
            if life.live is not None:
                self._with_address(self.spec.endpoint, partial(self._open_live, life.live))
        wanted = None if life.fetch is None or life.fetch.building else life.fetch.number
        if wanted != self._snapshot_number:
            self._close_snapshot()
            self._snapshot_number = wanted
            if wanted is not None:
                self._with_address(self.spec.replay_endpoint, partial(self._open_snapshot, wanted))

    def _with_address(self, endpoint: str, use: Callable[[Resolved], None]) -> None:
        """Resolve an endpoint's host, then go on: at once for an address, as a command for a name."""
        host, _ = split_endpoint(endpoint)
        if is_numeric(host):
            use(Resolved((host,)))
        elif endpoint == self.spec.replay_endpoint and self._peer is not None and self._peer[0] == host:
            use(Resolved((self._peer[1],)))
        else:
            self._resolver.resolve(host, lambda found: self._post(lambda: use(found)))

    def _open_live(self, number: int, found: Resolved) -> None:
        if number != self._live_number or self._live is not None:
            return
        if found.error is not None:
            self._follower.live_unresolved(found.error)
            return
        host, port = split_endpoint(self.spec.endpoint)
        address = found.choose(number)
        self._peer = (host, address)
        limit = self._around.limits.max_message_bytes
        self._live = LiveSocket(self._context, join_endpoint(address, port), self.spec.topic, limit)
        self._register(self._live)

    def _open_snapshot(self, number: int, found: Resolved) -> None:
        if number != self._snapshot_number or self._snapshot is not None:
            return
        if found.error is not None:
            self._follower.replay_unresolved(found.error)
            return
        _, port = split_endpoint(self.spec.replay_endpoint)
        limit = self._around.limits.max_message_bytes
        self._snapshot = SnapshotSocket(self._context, join_endpoint(found.choose(number), port), limit)
        self._register(self._snapshot)

    def _take_commands(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._commands:
            self._commands.popleft()()

    def _take_links(
        self, pair: MonitoredSocket | None, tell: Callable[..., None], ready: dict[object, int]
    ) -> None:
        if pair is None or pair.monitor not in ready:
            return
        for link in pair.links():
            tell(link)
            self._match_sockets()
            if pair is not self._live and pair is not self._snapshot:
                return  # What else the monitor tells is not of the connection that took its place.

    def _take_live(self, live: LiveSocket) -> None:
        for _ in range(MESSAGES_WHILE_BUILDING if self._follower.building else MESSAGES_PER_TURN):
            frames = live.receive()
            if frames is None:
                return
            self._follower.live_message(frames)
            if self._follower.life.live != self._live_number or self._stopping.is_set():
                return

    def _take_snapshot(self, snapshot: SnapshotSocket) -> None:
        while (frames := snapshot.receive()) is not None:
            self._follower.snapshot_message(frames)
            fetch = self._follower.life.fetch
            if fetch is None or fetch.building or fetch.number != self._snapshot_number:
                return

    def _close_wake(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()

    def _register(self, pair: MonitoredSocket) -> None:
        self._poller.register(pair.socket, zmq.POLLIN)
        self._poller.register(pair.monitor, zmq.POLLIN)

    def _close_live(self) -> None:
        if self._live is not None:
            self._unregister(self._live)
            self._live = None

    def _close_snapshot(self) -> None:
        if self._snapshot is not None:
            self._unregister(self._snapshot)
            self._snapshot = None

    def _unregister(self, pair: MonitoredSocket) -> None:
        self._poller.unregister(pair.socket)
        self._poller.unregister(pair.monitor)
        pair.close()

"""The sockets of one stream, as its subscriber's thread uses them.

`LiveSocket` is the SUB side of the live channel, `SnapshotSocket` one request on the replay channel;
both bring the monitor that tells when the connection is up or lost. ZeroMQ reconnects by itself, but
not after a message over its size limit, so the subscriber makes a new live socket after every loss.
Endpoints are numeric here: libzmq would resolve a name in the thread that moves the bytes of all sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from streams.core.wire import SEQUENCE_BYTES

RECEIVE_HIGH_WATER_MARK = 256
"""Messages that ZeroMQ may queue for us; beyond it the engine's side drops, which shows as a gap."""
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""A frozen peer keeps its TCP connection open for ever; without heartbeats nobody would notice."""
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000
CONNECT_TIMEOUT_MS = 5_000
"""An address that answers nothing holds up an attempt for two minutes where the system decides."""
MAX_FRAMES = 8
"""Frames of one message that are kept; the protocol's longest has three."""

SMALLEST_CUT = 64 * 1024
"""libzmq applies its size limit to the handshake too, which must go through whatever the limit."""
COPY_BYTES = 64 * 1024
"""Larger frames are read in place: copying 134 MB would hold the interpreter lock for 50 ms."""

Part = bytes | memoryview

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_TRIED_AGAIN = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED

Context = zmq.Context[Any]
Socket = zmq.Socket[Any]


class Link(Enum):
    """What a monitor reports."""

    UP = "up"
    LOST = "lost"
    """It was up and is not any more."""
    REFUSED = "refused"
    """It could not be made; ZeroMQ tries again."""
    REJECTED = "rejected"
    """Somebody answered, but shook no hands with us. ZeroMQ may have given up for ever."""


@dataclass(frozen=True, slots=True)
class Frames:
    """One message. `size` and `count` also cover frames that were not kept."""

    parts: list[Part]
    count: int
    size: int


class MonitoredSocket:
    """A connecting socket and its monitor, closed together."""

    def __init__(self, context: Context, kind: int, endpoint: str, max_bytes: int) -> None:
        self.socket: Socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, cut_bytes(max_bytes))
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.monitor: Socket = self.socket.get_monitor_socket(_EVENTS)
        self._endpoint = endpoint
        self._was_up = False

    def connect(self) -> None:
        self.socket.connect(self._endpoint)

    def links(self) -> list[Link]:
        """What has happened to the connection since the last call; never blocks."""
        news = []
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._was_up = True
                news.append(Link.UP)
            elif self._was_up and event == zmq.EVENT_DISCONNECTED:
                self._was_up = False
                news.append(Link.LOST)
            elif not self._was_up:
                news.append(Link.REFUSED if event & _TRIED_AGAIN else Link.REJECTED)
        return news

    def receive(self) -> Frames | None:
        """One whole message, or None when there is none; never blocks."""
        try:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts, count, size = [_part(frame)], 1, len(frame)
        while frame.more:
            frame = self.socket.recv(copy=False)
            count += 1
            size += len(frame)
            if count <= MAX_FRAMES:
                parts.append(_part(frame))
        return Frames(parts, count, size)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host (IPv6 without brackets) and port of `tcp://host:port`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def join_endpoint(address: str, port: int) -> str:
    """`tcp://address:port` for a numeric address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def cut_bytes(max_bytes: int) -> int:
    """Size of a frame beyond which libzmq cuts the connection, for a limit of `max_bytes`.

    Twice the limit: up to there a message arrives and the error can name its size.
    """
    return max(2 * max_bytes, SMALLEST_CUT)


def _part(frame: zmq.Frame) -> Part:
    return frame.bytes if len(frame) < COPY_BYTES else frame.buffer


class LiveSocket(MonitoredSocket):
    """The live channel: SUB, connected and subscribed."""

    def __init__(self, context: Context, endpoint: str, topic: str, max_bytes: int) -> None:
        super().__init__(context, zmq.SUB, endpoint, max_bytes)
        self.socket.subscribe(topic)
        self.connect()


class SnapshotSocket(MonitoredSocket):
    """One snapshot request: a DEALER of its own, so that no late answer is read as the next one's."""

    def __init__(self, context: Context, endpoint: str, max_bytes: int) -> None:
        super().__init__(context, zmq.DEALER, endpoint, max_bytes)
        self.connect()
        self.socket.send_multipart([b"", bytes(SEQUENCE_BYTES)], zmq.NOBLOCK)

"""An engine whose every move the test makes: what it publishes, under which sequence, and when it answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import zmq

from streams.simulator.messages import END_MARKER, Event, Frames, encode_batch, live_frames, sequence_frame
from streams.spec import StreamSpec
from tests.streams.harness import SIZE, TIMEOUT, Portal
from tests.support.waiting import wait_until

TOPIC = "kv"


@dataclass
class Request:
    """One snapshot request that waits for its answer."""

    puppet: Puppet
    identity: bytes
    frames: Frames

    def send(self, *parts: bytes) -> None:
        """Send one frame set as it is."""
        self.puppet.replay.send_multipart([self.identity, *parts])

    def part(self, watermark: int, *events: Event) -> None:
        """Send a part of a snapshot."""
        self.send(b"", sequence_frame(watermark), self.puppet.encode(events))

    def end(self) -> None:
        self.send(b"", END_MARKER, b"")

    def answer(self, watermark: int, *events: Event) -> None:
        """Send a whole snapshot."""
        self.part(watermark, *events)
        self.end()


class Puppet:
    """XPUB and ROUTER in the hands of the test's thread. Use as a context manager."""

    def __init__(self, topic: str = TOPIC, dp_rank: int = 0, name: str = "puppet") -> None:
        self.topic = topic.encode()
        self.dp_rank = dp_rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.live = self._bind(zmq.XPUB, "tcp://127.0.0.1:0")
        self.replay = self._bind(zmq.ROUTER, "tcp://127.0.0.1:0")
        self.spec = StreamSpec(
            name, dp_rank, self._address(self.live), self._address(self.replay), SIZE, topic
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    # -- live channel ---------------------------------------------------------------------------------

    def wait_subscribed(self) -> None:
        """Wait for the next subscription; what is published from then on reaches it."""
        while True:
            assert self.live.poll(int(TIMEOUT * 1000)), "nobody subscribed"
            if self.live.recv() == b"\x01" + self.topic:
                return

    def encode(self, events: Sequence[Event]) -> bytes:
        return encode_batch(events, timestamp=time.time(), dp_rank=self.dp_rank)

    def publish(self, sequence: int, *events: Event) -> None:
        self.payload(sequence, self.encode(events))

    def payload(self, sequence: int, payload: bytes) -> None:
        self.live.send_multipart(live_frames(self.topic, sequence, payload))

    def frames(self, *frames: bytes) -> None:
        self.live.send_multipart(frames)

    def drop_live(self) -> None:
        """Cut the live connection and listen on the same port again."""
        self.live.close(linger=0)
        self.live = self._bind(zmq.XPUB, self.spec.endpoint)

    # -- replay channel -------------------------------------------------------------------------------

    def request(self) -> Request:
        """The next snapshot request."""
        assert self.replay.poll(int(TIMEOUT * 1000)), "no snapshot was requested"
        identity, *frames = self.replay.recv_multipart()
        return Request(self, identity, frames)

    def asked(self, timeout: float) -> bool:
        """Whether a request comes within `timeout` seconds."""
        return bool(self.replay.poll(int(timeout * 1000)))

    def drop_replay(self) -> None:
        self.replay.close(linger=0)
        self.replay = self._bind(zmq.ROUTER, self.spec.replay_endpoint)

    # -- inside ---------------------------------------------------------------------------------------

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.linger = 0
        if kind == zmq.XPUB:
            bound.setsockopt(zmq.XPUB_VERBOSER, 1)

        def listens() -> bool:
            try:
                bound.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                return False
            return True

        wait_until(listens, TIMEOUT, f"{endpoint} stays in use")
        return bound

    @staticmethod
    def _address(bound: zmq.Socket[Any]) -> str:
        return str(bound.getsockopt_string(zmq.LAST_ENDPOINT))


def synchronize(portal: Portal, puppet: Puppet, *events: Event, watermark: int = 0) -> None:
    """Let the portal follow the puppet alone, from this snapshot on."""
    portal.follow(puppet.spec)
    puppet.wait_subscribed()
    puppet.request().answer(watermark, *events)
    portal.wait_synchronized(puppet.spec)

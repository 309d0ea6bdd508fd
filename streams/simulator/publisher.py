"""A real engine publisher over TCP: XPUB for live messages, ROUTER for snapshots.

Sequence numbers are given out in the order of the calls, under a lock, before the message reaches the
thread that owns the sockets; `wait=True` blocks until that thread has handed the message to its socket.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import zmq

from streams.simulator.faults import Reply, SnapshotFault
from streams.simulator.messages import (
    SEQUENCE_END,
    Event,
    Frames,
    Snapshot,
    encode_batch,
    live_frames,
    snapshot_frames,
)
from streams.simulator.sockets import RETRY_S, Context, SocketName, SocketSettings, SocketThread

log = logging.getLogger(__name__)

Watermark = Literal["last", "next"]
"""Which sequence a snapshot reports: the last message it contains, or the next one to come."""

_FLOOD_SLICE = 200
"""Messages per turn of a flood, so that snapshot requests are still answered in between."""


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Where and how one rank publishes. Endpoints are `tcp://host:port`; port 0: the system chooses."""

    endpoint: str = "tcp://127.0.0.1:0"
    replay_endpoint: str = "tcp://127.0.0.1:0"
    topic: str = ""
    dp_rank: int = 0
    first_sequence: int = 0
    watermark: Watermark = "last"
    snapshot_parts: int = 1
    """Frame sets over which a snapshot reply is spread."""
    send_hwm: int = 100_000
    """Messages kept for a slow subscriber; beyond that they are dropped for it, as real engines do."""
    lossless: bool = False
    """Wait for slow subscribers instead of dropping."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_sequence < SEQUENCE_END:
            raise ValueError(f"first_sequence is {self.first_sequence}; allowed: 0 … 2**64-2")
        if self.snapshot_parts < 1:
            raise ValueError(f"snapshot_parts is {self.snapshot_parts}; allowed: 1 or more")
        if self.watermark not in ("last", "next"):
            raise ValueError(f"watermark is {self.watermark!r}; allowed: 'last' or 'next'")


class Publisher:
    """Publishes events of one rank and answers snapshot requests.

    Settings are those of `PublisherConfig`, given whole or as keywords. `endpoint` and `replay_endpoint`
    are the real addresses. `snapshot` is called on the publisher's thread for each request and returns a
    `Snapshot`, or just its events: then the watermark is the last sequence (an engine that has published
    nothing reports its next one), or always the next with `watermark="next"`.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        config: PublisherConfig | None = None,
        *,
        snapshot: Callable[[], Snapshot | Sequence[Event]] = tuple,
        clock: Callable[[], float] = time.time,
        context: Context | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.config = replace(config or PublisherConfig(), **settings)
        self.topic = self.config.topic.encode()
        self.snapshot = snapshot
        self._clock = clock
        self._rng = random.Random(seed)
        self._lock = threading.Condition()
        self._next = self.config.first_sequence
        self._published = False
        self._subscribers = 0
        self._replay_requests = 0
        self._fault: tuple[SnapshotFault, int | None] | None = None
        self._context: Context = context or zmq.Context()
        self._owns_context = context is None
        self._sockets = self._socket_thread()
        try:
            self._sockets.start()
        except BaseException:
            self.close()
            raise
        self.endpoint = self._sockets.endpoint
        self.replay_endpoint = self._sockets.replay_endpoint

    # -- publishing -----------------------------------------------------------------------------------

    def publish(self, events: Sequence[Event], *, timestamp: float | None = None, wait: bool = False) -> int:
        """Send one batch; returns its sequence."""
        return self.publish_payload(self.encode(events, timestamp=timestamp), wait=wait)

    def publish_payload(self, payload: bytes, *, wait: bool = False) -> int:
        """Send one message with any payload under the next sequence; returns that sequence."""
        with self._lock:
            sequence = self._take_sequence()
            self._sockets.post(partial(self._sockets.send, live_frames(self.topic, sequence, payload)))
        if wait:
            self.flush()
        return sequence

    def send_frames(self, frames: Frames, *, wait: bool = False) -> None:
        """Send any frames as they are; no sequence is counted."""
        self._sockets.post(partial(self._sockets.send, list(frames)))
        if wait:
            self.flush()

    def skip_sequence(self, count: int = 1) -> int:
        """Count `count` messages that are never sent; returns the sequence of the last of them."""
        if count < 1:
            raise ValueError(f"count is {count}; allowed: 1 or more")
        with self._lock:
            for _ in range(count):
                last = self._take_sequence()
        return last

    def set_sequence(self, sequence: int) -> None:
        """Continue at `sequence`, as a restarted engine does; nothing counts as published yet."""
        if not 0 <= sequence < SEQUENCE_END:
            raise ValueError(f"sequence is {sequence}; allowed: 0 … 2**64-2")
        with self._lock:
            self._next = sequence
            self._published = False

    def encode(self, events: Sequence[Event], *, timestamp: float | None = None) -> bytes:
        """One batch of this rank as a payload, stamped with the present time unless told otherwise."""
        now = self._clock() if timestamp is None else timestamp
        return encode_batch(events, timestamp=now, dp_rank=self.config.dp_rank)

    def flood(self, payloads: Sequence[bytes], messages: int, *, wait: bool = False) -> Future[None]:
        """Send `messages` messages as fast as the socket takes them, going round through `payloads`."""
        done = self._sockets.promise()
        self._sockets.post(partial(self._flood, list(payloads), 0, messages, done))
        if wait:
            done.result()
        return done

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until everything published before this call was handed to the socket."""
        deadline = time.monotonic() + timeout
        while True:
            self._sockets.post(lambda: None, wait=True)
            if not self._sockets.waiting:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._sockets.waiting} messages still wait for slow subscribers")
            time.sleep(RETRY_S)

    # -- observing ------------------------------------------------------------------------------------

    @property
    def next_sequence(self) -> int:
        """Sequence of the next message."""
        with self._lock:
            return self._next

    @property
    def last_sequence(self) -> int | None:
        """Sequence of the last message, lost and skipped ones included; None before the first."""
        with self._lock:
            return self._last()

    def current_watermark(self) -> int:
        """The watermark that a snapshot taken now carries."""
        with self._lock:
            last = self._last()
            return self._next if last is None or self.config.watermark == "next" else last

    @property
    def replay_requests(self) -> int:
        """How many snapshot requests have arrived."""
        with self._lock:
            return self._replay_requests

    @property
    def subscribers(self) -> int:
        """How many subscriptions are in force, over all topics."""
        with self._lock:
            return self._subscribers

    def wait_for_subscribers(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait for at least `count` subscriptions; what is published afterwards reaches them."""
        self._wait_for(lambda: self._subscribers >= count, f"{count} subscriptions", timeout)

    def wait_for_replay_requests(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until at least `count` snapshot requests have arrived since the start."""
        self._wait_for(lambda: self._replay_requests >= count, f"{count} snapshot requests", timeout)

    # -- faults ---------------------------------------------------------------------------------------

    def spoil_snapshots(self, fault: SnapshotFault | None, times: int | None = None) -> None:
        """Spoil the next `times` snapshot replies (None: all to come); a fault of None heals at once."""
        if times is not None and times < 1:
            raise ValueError(f"times is {times}; allowed: 1 or more, or None")
        with self._lock:
            self._fault = None if fault is None else (fault, times)

    def drop_connection(
        self, *, live: bool = True, replay: bool = True, down_s: float = 0.0, wait: bool = True
    ) -> Future[None]:
        """Close the socket(s), stay away for `down_s` seconds, bind the same port again.

        What is published meanwhile is counted and lost. With `wait` this returns when the port is bound
        again, otherwise the future tells; a port that somebody else took is an `OSError` after 5 s.
        """
        chosen: dict[SocketName, bool] = {"live": live, "replay": replay}
        names = [name for name, wanted in chosen.items() if wanted]
        done = self._sockets.promise()
        self._sockets.post(partial(self._drop, names, down_s, done))
        if wait:
            done.result()
        return done

    # -- end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close both sockets, join the thread, free the context. May be called twice."""
        self._sockets.close()
        self._term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------------

    def _socket_thread(self) -> SocketThread:
        config = self.config
        settings = SocketSettings(config.endpoint, config.replay_endpoint, config.send_hwm, config.lossless)
        return SocketThread(settings, self._context, self._subscribed, self._requested)

    def _term(self) -> None:
        if self._owns_context:
            self._context.term()

    def _take_sequence(self) -> int:
        sequence = self._next
        self._next = (sequence + 1) % SEQUENCE_END
        self._published = True
        return sequence

    def _last(self) -> int | None:
        return (self._next - 1) % SEQUENCE_END if self._published else None

    def _wait_for(self, predicate: Callable[[], bool], what: str, timeout: float) -> None:
        with self._lock:
            if not self._lock.wait_for(predicate, timeout):
                raise TimeoutError(f"no {what} on {self.endpoint} within {timeout:g} s")

    # From here on: on the thread that owns the sockets.

    def _subscribed(self, joined: bool) -> None:
        with self._lock:
            self._subscribers += 1 if joined else -1
            self._lock.notify_all()

    def _requested(self, identity: bytes, request: Frames) -> None:
        with self._lock:
            self._replay_requests += 1
            self._lock.notify_all()
        if len(request) == 2 and request[0] == b"" and len(request[1]) == 8:
            self._answer(identity)
        else:
            log.warning("snapshot request with frames of %s bytes ignored", [len(each) for each in request])

    def _answer(self, identity: bytes) -> None:
        taken = self.snapshot()
        if not isinstance(taken, Snapshot):
            taken = Snapshot(self.current_watermark(), taken)
        frames = snapshot_frames(
            taken, timestamp=self._clock(), dp_rank=self.config.dp_rank, parts=self.config.snapshot_parts
        )
        fault = self._take_fault()
        reply = Reply(frames) if fault is None else fault.spoil(frames, self._rng)
        for index, part in enumerate(reply.frames, start=1):
            if reply.delay_s:
                self._sockets.later(index * reply.delay_s, partial(self._sockets.reply, identity, part))
            else:
                self._sockets.reply(identity, part)

    def _take_fault(self) -> SnapshotFault | None:
        with self._lock:
            if self._fault is None:
                return None
            fault, times = self._fault
            left = None if times is None else times - 1
            self._fault = None if left == 0 else (fault, left)
            return fault

    def _flood(self, payloads: list[bytes], sent: int, messages: int, done: Future[None]) -> None:
        stop = sent if self._sockets.waiting else min(messages, sent + _FLOOD_SLICE)
        for index in range(sent, stop):
            with self._lock:
                sequence = self._take_sequence()
            self._sockets.send(live_frames(self.topic, sequence, payloads[index % len(payloads)]))
        if stop == messages and not self._sockets.waiting:
            done.set_result(None)
            return
        pause = RETRY_S if self._sockets.waiting else 0.0
        self._sockets.later(pause, partial(self._flood, payloads, stop, messages, done))

    def _drop(self, names: list[SocketName], down_s: float, done: Future[None]) -> None:
        if "live" in names:
            with self._lock:
                self._subscribers = 0
        self._sockets.drop(names, down_s, done)

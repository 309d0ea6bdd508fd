"""Desired streams ↔ running subscribers, and the one place where queries ask.

`set_desired` may be called at any time and from any thread; a stream whose spec stays the same is not
touched. A stream that goes, or is replaced, stops being served before `set_desired` returns.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import zmq

from streams.core.errors import StreamError
from streams.core.view import View
from streams.faults import WAITING
from streams.follower import Surroundings
from streams.index import BlockHoldings, BoardEntry, Index
from streams.report import NullMetrics, StreamMetrics
from streams.resolver import Resolver
from streams.spec import Limits, StreamId, StreamSpec
from streams.status import Match, StreamChange, StreamState, StreamStatus
from streams.subscriber import Subscriber

PARALLEL_DECODES = 2
"""Snapshots decoded at the same time; more would only share the same interpreter lock."""
MAX_SOCKETS = 8192
"""ZeroMQ's default of 1,023 is used up by the 127th stream."""


class TotalBlocksError(StreamError):
    """All streams together would map more blocks than allowed."""

    code = "total_blocks_exceeded"


class Directory:
    """See the module's text. `start`, then `set_desired`; `stop` joins every thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        on_change: Callable[[StreamChange], None] | None = None,
        metrics: StreamMetrics | None = None,
        resolver: Resolver | None = None,
        seed: int | None = None,
    ) -> None:
        self.limits = limits
        self._index = Index()
        self._around = Surroundings(
            index=self._index,
            limits=limits,
            permits=threading.Semaphore(PARALLEL_DECODES),
            admit=self._admit,
            on_change=on_change or (lambda change: None),
            metrics=metrics or NullMetrics(),
        )
        self._rng = random.Random(seed)
        self._resolver = resolver or Resolver()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._lock = threading.Lock()
        self._subscribers: dict[StreamId, Subscriber] = {}
        self._retired: list[Subscriber] = []
        self._stopped = False

    def start(self) -> None:
        self._index.slots.start()

    def set_desired(self, specs: Iterable[StreamSpec]) -> None:
        """Follow exactly these streams from now on. Raises ValueError on more than `max_streams`."""
        wanted = {spec.id: spec for spec in specs}
        if len(wanted) > self.limits.max_streams:
            raise ValueError(f"{len(wanted)} streams, max_streams allows {self.limits.max_streams}")
        with self._lock:
            if self._stopped:
                return
            for stream_id, subscriber in list(self._subscribers.items()):
                if wanted.get(stream_id) != subscriber.spec:
                    self._retire(self._subscribers.pop(stream_id))
            for stream_id, spec in sorted(wanted.items()):
                if stream_id not in self._subscribers:
                    self._follow(spec)
            self._retired = [gone for gone in self._retired if not gone.join(0)]

    def stop(self, timeout: float = 4.0) -> None:
        """End every thread and close every socket, within `timeout` seconds."""
        with self._lock:
            self._stopped = True
            everyone = [*self._subscribers.values(), *self._retired]
            for subscriber in everyone:
                subscriber.stop()
            deadline = time.monotonic() + timeout
            ended = [subscriber.join(max(0.0, deadline - time.monotonic())) for subscriber in everyone]
            self._subscribers.clear()
            self._retired.clear()
        self._index.slots.stop()
        if all(ended):
            self._context.term()

    def query(self, prompt: bytes) -> list[Match]:
        """What each stream holds of a prompt (token IDs as little-endian uint32). Takes no lock."""
        return self._index.query(prompt)

    def explore(self, prompt: bytes) -> list[BlockHoldings]:
        """Block by block what each stream holds of a prompt, also behind a missing block."""
        return self._index.explore(prompt)

    def statuses(self) -> tuple[StreamStatus, ...]:
        """All streams, in (instance, rank) order."""
        with self._lock:
            subscribers = sorted(self._subscribers.items())
        return tuple(subscriber.status() for _, subscriber in subscribers)

    def resync(
        self,
        *,
        instance_name: str | None = None,
        dp_rank: int | None = None,
        drop: bool = False,
        reason: str = "operator",
    ) -> tuple[StreamId, ...]:
        """Order a fresh snapshot of the streams that match (None matches all); tells which those are."""
        with self._lock:
            chosen = [
                subscriber
                for stream_id, subscriber in sorted(self._subscribers.items())
                if instance_name in (None, stream_id.instance_name) and dp_rank in (None, stream_id.dp_rank)
            ]
        for subscriber in chosen:
            subscriber.resync(reason, drop)
        return tuple(subscriber.spec.id for subscriber in chosen)

    def _follow(self, spec: StreamSpec) -> None:
        spec = replace(spec)  # An object of its own: the index tells owners apart by identity.
        seed = self._rng.getrandbits(64)
        subscriber = Subscriber(spec, self._around, self._context, self._resolver, seed)
        self._index.admit(BoardEntry(spec, None, WAITING[StreamState.CONNECTING]))
        try:
            subscriber.start()
        except RuntimeError:
            self._index.retire(spec)  # The next call tries again.
            raise
        self._subscribers[spec.id] = subscriber

    def _retire(self, subscriber: Subscriber) -> None:
        subscriber.stop()
        self._index.retire(subscriber.spec)
        self._retired.append(subscriber)

    def _admit(self, spec: StreamSpec, view: View) -> None:
        bound = self.limits.max_total_blocks
        if not bound:
            return
        others = sum(entry.blocks for entry in self._index.board.entries if entry.spec != spec)
        if others + view.mapped_blocks > bound:
            raise TotalBlocksError(
                f"all streams together would map more than {bound} blocks (max_total_blocks)"
            )

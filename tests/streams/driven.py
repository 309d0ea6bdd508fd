"""A stream without sockets whose clock the test turns, for behaviour that takes long in real time."""

from __future__ import annotations

import random
import threading
from array import array

from streams.core.view import View
from streams.follower import Follower, Surroundings
from streams.index import BoardEntry, Index
from streams.report import NullMetrics
from streams.simulator.messages import END_MARKER, Event, encode_batch, sequence_frame
from streams.sockets import Frames, Link
from streams.spec import Limits, StreamSpec
from streams.status import Match, StreamChange
from tests.streams.harness import SIZE, text

SPEC = StreamSpec("driven", 0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", SIZE, "kv")


class Driven:
    """A `Follower` between hands: the test brings links, messages and replies, and turns the clock."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 1000.0
        self.changes: list[StreamChange] = []
        self.index = Index()
        self.around = Surroundings(
            index=self.index,
            limits=limits or Limits(),
            permits=threading.Semaphore(2),
            admit=lambda spec, view: None,
            on_change=self.changes.append,
            metrics=NullMetrics(),
            clock=lambda: self.now,
            wall=lambda: self.now,
            sleep=lambda seconds: None,
        )
        self.index.slots.start()
        self.index.admit(BoardEntry(SPEC, None, None))
        self.follower = Follower(SPEC, self.around, random.Random(5))
        self.follower.start()

    def close(self) -> None:
        self.follower.close()
        self.index.slots.stop()

    def connect(self) -> None:
        self.follower.live_link(Link.UP)
        self.turn()

    def disconnect(self) -> None:
        self.follower.live_link(Link.LOST)

    def advance(self, seconds: float) -> None:
        """Let time pass in small steps, so that everything due happens when it is due."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.02)
            self.turn()

    def turn(self) -> None:
        """Do all the work there is now."""
        busy = True
        while busy:
            busy = self.follower.tick() == 0.0
            self.follower.step()
            busy = busy and self.follower.life.fetch is not None and self.follower.life.fetch.building

    @property
    def asking(self) -> bool:
        """Whether a snapshot request waits for its answer."""
        fetch = self.follower.life.fetch
        return fetch is not None and not fetch.building

    def wait_asking(self, within: float) -> bool:
        """Turn the clock until a snapshot is asked for, at most `within` seconds."""
        end = self.now + within
        while not self.asking and self.now < end:
            self.advance(0.02)
        return self.asking

    def live(self, sequence: int, *events: Event) -> None:
        payload = encode_batch(events, timestamp=self.now)
        parts = [b"kv", sequence_frame(sequence), payload]
        self.follower.live_message(Frames(parts, 3, sum(map(len, parts))))
        self.turn()

    def answer(self, watermark: int, *events: Event) -> None:
        """Answer the request under way with a whole snapshot."""
        assert self.asking
        payload = encode_batch(events, timestamp=self.now)
        for parts in ([b"", sequence_frame(watermark), payload], [b"", END_MARKER, b""]):
            self.follower.snapshot_message(Frames(parts, 3, sum(map(len, parts))))
        self.turn()

    def synchronize(self, watermark: int, *events: Event) -> None:
        self.connect()
        assert self.wait_asking(0.2)
        self.answer(watermark, *events)
        assert self.serving

    @property
    def serving(self) -> bool:
        return self.match().synchronized

    @property
    def losses(self) -> list[str]:
        return [str(c.fault.code) for c in self.changes if c.old == "synchronized" and c.fault]

    def resyncs(self) -> dict[str, int]:
        counters = self.follower.status().counters
        return {key.partition(":")[2]: n for key, n in counters.items() if key.startswith("resyncs:")}

    def match(self, *blocks: int) -> Match:
        return self.index.query(array("I", text(*blocks)).tobytes())[0]

    def holds(self, *blocks: int) -> tuple[int, int]:
        match = self.match(*blocks)
        return match.device_hit_tokens // SIZE, match.host_only_hit_tokens // SIZE

    @property
    def view(self) -> View:
        """The view in service."""
        entry = self.index.board.entries[0]
        assert entry.view is not None
        return entry.view.view

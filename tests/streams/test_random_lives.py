"""A stream through random lives: whatever links, messages and snapshots do, it never serves what the engine
did not hold at the sequence that it tells, and once the engine behaves it finds back to the truth in time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.lifecycle import LAST_RETRY
from streams.core.table import SLOTS
from streams.simulator.messages import END_MARKER, Event, encode_batch, sequence_frame
from streams.sockets import Frames, Link
from streams.spec import Limits
from tests.streams.driven import Driven
from tests.streams.harness import SIZE, packed
from tests.streams.model_engine import BLOCKS, EngineLife, Held, Path
from tests.support.waiting import wait_until

LARGEST = 100_000
"""Bytes of the largest message."""
IN_TIME = LAST_RETRY + 1.0
"""Seconds in which a stream serves again once its engine behaves."""


GOOD = {
    "publish": 30,
    "deliver": 30,
    "link_up": 30,
    "make_reply": 20,
    "send_reply": 30,
    "wait_a_little": 10,
}
"""What there is to do, and how often it is done."""
BAD = {
    "lose_messages": 2,
    "lose_link": 2,
    "lose_reply_link": 2,
    "refuse_link": 2,
    "repeat_a_message": 1,
    "fail_ourselves": 1,
    "resync": 2,
    "restart": 1,
    "restart_unseen": 1,
    "send_rubbish": 1,
    "spoil_reply": 2,
    "wait_long": 2,
}


def tokens(prompt: Path) -> bytes:
    return packed(token for token in prompt for _ in range(SIZE))


class Scene:
    """An engine, the network before it, and the stream that follows it; `act` does something at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.offloads = rng.random() < 0.3
        self.reports_next = rng.random() < 0.3
        self.room = rng.choice((6, len(BLOCKS)))
        limits = Limits(
            max_blocks_per_stream=rng.choice((self.room, 1000)),
            max_buffered_bytes=rng.choice((3_000, 1_000_000)),
            max_message_bytes=LARGEST,
            resync_interval_ms=rng.choice((1_000, 30_000)),
        )
        self.driven = Driven(limits)
        self.interval = limits.resync_interval_ms / 1000
        self.engine = self._born()
        self.connected: int | None = None
        """Number of the live connection that is up."""
        self.received: int | None = None
        """Last sequence that came over it."""
        self.wire: list[tuple[int, list[Event]]] = []
        self.fetch: int | None = None
        self.reply: tuple[int, list[Event]] | None = None
        """Watermark and events of the answer that is on its way to request `fetch`."""
        self.spoiled: int | None = None
        """The last request whose answer was spoiled."""
        self.watermarks: set[int] = set()
        """Of all replies of this life."""
        self.trouble = rng.choice((0.2, 1.0, 3.0))
        self.log: list[str] = []

    def _born(self) -> EngineLife:
        return EngineLife(self.rng, self.room, self.offloads)

    def act(self) -> None:
        weights = (*GOOD.values(), *(self.trouble * weight for weight in BAD.values()))
        name = self.rng.choices((*GOOD, *BAD), weights)[0]
        self.log.append(name)
        getattr(self, name)()
        self._match()
        self.check()

    def _match(self) -> None:
        """What a subscriber does with its sockets."""
        life = self.driven.follower.life
        if self.connected is not None and life.live != self.connected:
            self._hang_up()
        fetch = None if life.fetch is None or life.fetch.building else life.fetch.number
        if fetch != self.fetch:
            self.fetch, self.reply = fetch, None

    def _hang_up(self) -> None:
        self.connected = self.received = None
        self.wire.clear()

    # -- the engine and its messages

    def publish(self) -> None:
        events = self.engine.message()
        if self.connected is not None:
            self.wire.append((self.engine.last, events))

    def deliver(self) -> None:
        for _ in range(min(len(self.wire), self.rng.randint(1, 4))):
            if self.wire:
                self._bring(*self.wire.pop(0))
                self._match()

    def _bring(self, sequence: int, events: list[Event]) -> None:
        self.received = sequence
        self.driven.live(sequence, *events)

    def lose_messages(self) -> None:
        count = self.rng.randint(1, 3)
        if any(sequence in self.watermarks for sequence, _ in self.wire[:count]):
            return  # The watermark may be the next sequence: nothing in the protocol would tell.
        del self.wire[:count]

    def repeat_a_message(self) -> None:
        if self.received is not None:
            self._bring(self.rng.randint(max(0, self.received - 2), self.received), [])

    def send_rubbish(self) -> None:
        if self.connected is None:
            return
        coming = sequence_frame(self.engine.last + 1)
        good = encode_batch([], timestamp=self.driven.now)
        parts = self.rng.choice(
            (
                [b"kv", coming, b"rubbish"],
                [b"kv", coming, encode_batch([{"type": "BlockStored"}], timestamp=0.0)],
                [b"kv", coming, encode_batch([], timestamp=0.0, dp_rank=1)],
                [b"kv", b"short", good],
                [b"kv", coming],
                [b"kv", coming, good, b"more"],
                [b"kv-other", coming, good],
                [b"kv", coming, bytes(LARGEST + 1)],
                [b"kv", sequence_frame(2**64 - 2), good],
            )
        )
        self.driven.follower.live_message(Frames(parts, len(parts), sum(map(len, parts))))
        self.driven.turn()

    # -- connections

    def link_up(self) -> None:
        if self.connected is None and self.driven.follower.life.live is not None:
            self.connected = self.driven.follower.life.live
            self.driven.connect()

    def lose_link(self) -> None:
        if self.connected is not None:
            self._hang_up()
            self.driven.disconnect()

    def refuse_link(self) -> None:
        if self.connected is None and self.driven.follower.life.live is not None:
            self.driven.follower.live_link(self.rng.choice((Link.REFUSED, Link.REJECTED)))

    def lose_reply_link(self) -> None:
        if self.fetch is not None:
            self.driven.follower.replay_link(self.rng.choice((Link.LOST, Link.REFUSED)))

    def _begin_anew(self) -> None:
        self.engine = self._born()
        self.reply = None
        self.watermarks.clear()

    def restart(self) -> None:
        self._begin_anew()
        self.lose_link()

    def restart_unseen(self) -> None:
        """Behind a proxy that keeps the connection: the first message tells, if there was one before."""
        if self.received is not None:
            self._begin_anew()
            self.wire.clear()
            self._bring(0, self.engine.message())

    # -- snapshots

    def make_reply(self) -> None:
        """The engine takes the snapshot; until it arrives messages may come and go."""
        if self.fetch is not None:
            last = self.engine.last
            watermark = last + 1 if self.reports_next else max(last, 0)
            self.watermarks.add(watermark)
            self.reply = watermark, self.engine.snapshot()

    def send_reply(self) -> None:
        if self.reply is not None:
            watermark, events = self.reply
            cut = self.rng.choice((None, self.rng.randint(0, len(events))))
            for part in (events,) if cut is None else (events[:cut], events[cut:]):
                self._send(b"", sequence_frame(watermark), encode_batch(part, timestamp=self.driven.now))
            self._send(b"", END_MARKER, b"")
            self.driven.turn()

    def _send(self, *parts: bytes) -> None:
        self.driven.follower.snapshot_message(Frames(list(parts), len(parts), sum(map(len, parts))))

    def spoil_reply(self) -> None:
        fetch = self.driven.follower.life.fetch
        if fetch is None or self.fetch in (None, self.spoiled):
            return  # The halves of two spoiled replies would make one that lies.
        self.spoiled = self.fetch
        some = sequence_frame(7)
        good = encode_batch([], timestamp=0.0)
        faults = [
            [(b"x", some, good)],
            [(b"", some)],
            [(b"", b"short", good)],
            [(b"", END_MARKER, b"")],
            [(b"", some, good), (b"", sequence_frame(8), good)],
            [(b"", some, good), (b"", END_MARKER, b"x")],
            [(b"", some, b"rubbish"), (b"", END_MARKER, b"")],
            [(b"", some, good), (b"", some, bytes(LARGEST))],
            [(b"", some, good)],
        ]
        if fetch.floor:
            faults.append([(b"", sequence_frame(fetch.floor - 1), good), (b"", END_MARKER, b"")])
        for parts in self.rng.choice(faults):
            self._send(*parts)
        self.driven.turn()
        self.reply = None

    def fail_ourselves(self) -> None:
        self.driven.follower.crashed()

    def resync(self) -> None:
        self.driven.follower.resync("operator", drop=self.rng.random() < 0.3)
        self.driven.turn()

    # -- time

    def wait_a_little(self) -> None:
        self.driven.advance(self.rng.uniform(0.0, 0.5))

    def wait_long(self) -> None:
        self.driven.advance(self.rng.uniform(1.0, 8.0))

    # -- what must hold

    def check(self) -> None:
        status, match = self.driven.follower.status(), self.driven.match()
        assert (status.sequence, status.error) == (match.sequence, match.error)
        assert (match.error is None) is match.synchronized
        if not match.synchronized:
            assert (match.sequence, match.device_blocks, match.host_blocks) == (None, 0, 0)
            return
        wrong = [self._differences(held) for held in self._possible(match.sequence)]
        assert [] in wrong, (match.sequence, wrong, self.log[-40:])

    def _possible(self, sequence: int | None) -> list[Held]:
        """What the engine may have held when a view at this sequence was true."""
        assert sequence is not None
        states = [sequence] if sequence <= self.engine.last else []
        if self.reports_next or sequence == 0:
            states.append(sequence - 1)
        return [self.engine.after(state) for state in states]

    def _differences(self, held: Held) -> list[tuple[Path, str]]:
        """Prompts that are answered otherwise than by an engine that holds this."""
        most = self.engine.most(held)
        # Blocks on their way to the Host are in no snapshot: less may be known of them, but never more.
        least = (set(), set()) if self.offloads else self.engine.least(held)
        found = []
        for prompt in self.engine.prompts:
            ours = self.driven.index.explore(tokens(prompt))[0].tiers
            match = self.driven.index.query(tokens(prompt))[0]
            reached = ours.partition("-")[0]
            hits = (len(reached.replace("H", "")), reached.count("H"))
            fits = hits == (match.device_hit_tokens // SIZE, match.host_only_hit_tokens // SIZE)
            for end, tier in enumerate(ours, start=1):
                claims = tier in "DB", tier in "HB"
                for claim, may, must in zip(claims, most, least, strict=True):
                    fits = fits and (prompt[:end] in must) <= claim <= (prompt[:end] in may)
            if not fits:
                found.append((prompt, ours))
        return found

    def heal(self) -> None:
        """From now on the engine behaves."""
        self.lose_messages()
        if self.connected is not None:
            # What was lost on the wire shows with the next message.
            self.publish()
        self._behave(IN_TIME)
        assert self.driven.serving, (self.driven.follower.status(), self.log[-40:])
        self.driven.follower.resync("operator", drop=False)
        self._behave(1.0)
        self.offloads = False
        self.check()
        assert self.driven.match().sequence in (self.engine.last, self.engine.last + self.reports_next, 0)

    def _behave(self, seconds: float) -> None:
        end = self.driven.now + seconds
        while self.driven.now < end:
            self._match()
            self.link_up()
            self._match()
            self.make_reply()
            self.send_reply()
            while self.wire:
                self.deliver()
            self.driven.advance(0.05)
            self.check()


def run(rng: random.Random, acts: int) -> None:
    scene = Scene(rng)
    try:
        for _ in range(acts):
            scene.act()
        scene.heal()
        scene.driven.follower.close()
        index = scene.driven.index
        wait_until(lambda: index.slots.free == SLOTS, message="a slot is not freed", interval=0.001)
        assert len(index.table) == 0
    finally:
        scene.driven.close()


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 150))
def test_any_life_is_served_truly_and_ends_well(rng: random.Random, acts: int) -> None:
    run(rng, acts)


@pytest.mark.parametrize("seed", range(20))
def test_long_lives_are_served_truly_and_end_well(seed: int) -> None:
    run(random.Random(seed), 2_000)

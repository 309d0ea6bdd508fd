"""What other threads may see of a stream between any two of its steps.

Its thread can lose the interpreter after every line. So this looks at the stream after every line, as
somebody does who reads the status first and then asks: what was told must already be so.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import streams
from streams.core.interpret import Expected
from streams.core.sequence import Cursor
from streams.core.table import SLOTS
from streams.core.view import as_orphan
from streams.core.wire import decode_batch
from streams.faults import WAITING
from streams.index import BoardEntry, Index
from streams.simulator.messages import all_blocks_cleared, encode_batch
from streams.slots import CLEAR_PIECE
from streams.status import StreamState
from tests.streams.driven import SPEC, Driven
from tests.streams.harness import SIZE, Portal, copy, packed, store, text
from tests.streams.puppet import Puppet, synchronize

CODE = Path(streams.__file__).parent
Seen = tuple[bool, int | None, int]
"""Synchronized, sequence, blocks on the device."""


@contextmanager
def after_every_line(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` after each line that the streams' code runs, and not from within itself. What it raises
    first is raised at the end: in the middle of a line that takes a lock, nobody would release it."""
    raised: list[AssertionError] = []

    def line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            sys.settrace(None)
            try:
                look()
            except AssertionError as error:
                raised.append(error)
            sys.settrace(call)
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if Path(frame.f_code.co_filename).is_relative_to(CODE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
    if raised:
        raise raised[0]


class Onlooker:
    """Collects what the status told and what queries answered, each time it is another thing."""

    def __init__(self, driven: Driven) -> None:
        self._driven = driven
        self.told: list[Seen] = []
        self.answered: list[Seen] = []
        self.snapshots: list[tuple[int | None, int]] = []
        """What a query answered when one more snapshot was told: sequence, blocks on the device."""

    def look(self) -> None:
        status, match = self._driven.follower.status(), self._driven.match()
        synchronized = status.state is StreamState.SYNCHRONIZED
        note(self.told, (synchronized, status.sequence, status.device_blocks))
        note(self.answered, (match.synchronized, match.sequence, match.device_blocks))
        assert self.told == self.answered[: len(self.told)], "the status told what queries did not answer yet"
        assert (status.error is None) is synchronized
        assert (match.error is None) is match.synchronized
        if synchronized:
            assert status.last_snapshot is not None
            if status.last_snapshot.count > len(self.snapshots):
                self.snapshots.append((match.sequence, match.device_blocks))


def note(seen: list[Seen], now: Seen) -> None:
    if not seen or seen[-1] != now:
        seen.append(now)


def start(driven: Driven) -> None:
    driven.synchronize(20, store(1))


def live(driven: Driven) -> None:
    driven.live(driven.match().sequence + 1, store(7, 8))  # type: ignore[operator]


def calibrate(driven: Driven) -> None:
    driven.follower.resync("operator", drop=False)
    assert driven.wait_asking(1.0)
    driven.answer(40, store(1, 2, 3))
    driven.advance(0.5)  # the messages that the snapshot has overtaken are waited for


def confirm(driven: Driven) -> None:
    driven.follower.resync("calibration", drop=False)
    assert driven.wait_asking(1.0)
    driven.answer(40, store(1, 2, 3))


def drop(driven: Driven) -> None:
    driven.follower.resync("operator", drop=True)
    assert driven.wait_asking(1.0)
    driven.answer(50, store(4))


def lose_a_message(driven: Driven) -> None:
    driven.live(99, store(5))
    assert driven.wait_asking(1.0)
    driven.answer(99, store(5, 6))


def redefine(driven: Driven) -> None:
    driven.live(100, all_blocks_cleared(), store(*range(1, 30)))


def disconnect(driven: Driven) -> None:
    driven.disconnect()
    driven.connect()
    assert driven.wait_asking(1.0)
    driven.answer(3, store(9))


STEPS = (start, live, calibrate, confirm, drop, live, lose_a_message, redefine, live, disconnect, live)


def test_the_status_never_tells_what_a_query_does_not_answer_yet(driven: Driven) -> None:
    onlooker = Onlooker(driven)
    with after_every_line(onlooker.look):
        for step in STEPS:
            step(driven)
    onlooker.look()
    assert onlooker.told == onlooker.answered
    assert len(onlooker.told) > len(STEPS), "every step was seen"
    assert onlooker.snapshots == [(20, 1), (40, 3), (40, 3), (50, 1), (99, 2), (3, 1)]
    assert {told[0] for told in onlooker.told} == {True, False}


# -- streams that come and go


def test_a_stream_that_is_replaced_is_answered_for_by_one_life_at_a_time(
    portal: Portal, make_puppet: Callable[..., Puppet]
) -> None:
    """Another process took the address over: its stream is never shown with what the old one held."""
    old, new = make_puppet(name="engine"), make_puppet(name="engine")
    old.spec = replace(old.spec, incarnation="old")
    new.spec = replace(new.spec, incarnation="new")
    synchronize(portal, old, store(1, 2))
    seen: list[list[tuple[str | None, bool, int]]] = []

    def look() -> None:
        matches = portal.directory.query(packed(text(1, 2)))
        now = [(match.spec.incarnation, match.synchronized, match.device_hit_tokens) for match in matches]
        if not seen or seen[-1] != now:
            seen.append(now)

    with after_every_line(look):
        portal.follow(new.spec)
    look()
    assert seen == [[("old", True, 2 * SIZE)], [], [("new", False, 0)]]


def test_what_a_former_owner_of_a_stream_still_says_is_never_shown(driven: Driven) -> None:
    """A stream that is followed again may have its first thread in the middle of anything."""
    start(driven)
    again = replace(SPEC)
    driven.index.retire(SPEC)
    driven.index.admit(BoardEntry(again, None, WAITING[StreamState.CONNECTING]))

    def look() -> None:
        (entry,) = driven.index.board.entries
        assert entry.spec is again
        assert entry.view is None

    with after_every_line(look):
        for step in (live_on, calibrate, lose_a_message, redefine, disconnect):
            step(driven)
        driven.follower.close()
    look()


def live_on(driven: Driven) -> None:
    driven.live(21, store(7, 8))


def test_a_slot_is_free_only_when_nothing_of_its_last_view_is_left() -> None:
    """After every line of the janitor; on the way a new view takes whatever is free."""
    index = Index()
    index.slots._free = deque(range(2))  # of which one serves and one is to come
    view = index.new_view(SPEC, 10_000, Cursor(0, 0.0))
    assert view is not None
    events = [event for block in range(CLEAR_PIECE + 10) for event in (store(block), copy(block))]
    events.append({**store(1), "block_hashes": [7]})  # the same content once more
    view.apply(decode_batch(encode_batch(events, timestamp=0.0), Expected(SIZE)).events, as_orphan)
    slot = view.lease.slot
    del view
    lengths: list[int] = []

    def look() -> None:
        bits = 1 << slot | 1 << SLOTS + slot
        left = sum(1 for shard in index.table.shards for mask in shard.values() if mask & bits)
        if not lengths or lengths[-1] != left:
            lengths.append(left)
        if slot in index.slots._free:
            assert not left
            assert not any(index.table._extra[slot])

    index.slots._retired.put(None)
    with after_every_line(look):
        index.slots._run()
    assert slot in index.slots._free
    assert lengths[-1] == 0
    assert len(lengths) > 3, "it was cleared in pieces"

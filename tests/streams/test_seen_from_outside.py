"""What other threads may see of a stream between any two of its steps.

Its thread can lose the interpreter after every line. So this looks at the stream after every line, as
somebody does who reads the status first and then asks: what was told must already be so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import streams
from streams.simulator.messages import all_blocks_cleared
from streams.status import StreamState
from tests.streams.driven import Driven
from tests.streams.harness import store

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
        return (
            line
            if "/streams/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename
            else None
        )

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

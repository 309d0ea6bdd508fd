"""A new view under construction: a snapshot, then the live messages that arrived meanwhile.

From the request for a snapshot on, live messages are held back (`hold`). When the reply is complete,
`steps` decodes it into a fresh view that no query sees, lets it inherit what the one before knew of blocks,
and applies what was held back. From the moment the new view has caught up, live messages go to it
directly (`follow`); what still differs from the view in service then is drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streams.core.errors import StreamError
from streams.core.events import Batch, Skipped
from streams.core.handover import Drift, compare, inherit
from streams.core.interpret import Expected
from streams.core.sequence import Verdict
from streams.core.view import OnUnknown, View, as_orphan
from streams.core.wire import decode_steps
from streams.index import IndexedView
from streams.wording import counted

MERGE_PIECE = 32
"""Held-back messages applied between two pauses; more than a turn of the subscriber takes in."""


class BufferOverflowError(StreamError):
    """More live messages arrived during a snapshot than may be held back."""

    code = "buffer_overflow"


class SequenceGapError(StreamError):
    """Messages are missing between the snapshot and the live run."""

    code = "sequence_gap"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """How a view is to be built."""

    expected: Expected
    on_unknown: OnUnknown
    """Judges what the held-back messages do not explain."""
    admit: Callable[[], None]
    """Raises StreamError when the view has grown too large."""
    old: View | None = None
    """The view to inherit from; it may go on serving and changing."""
    is_level: Callable[[], bool] = lambda: True
    """Whether `old` has received all that the snapshot contains, or never will. A snapshot may overtake
    live messages; compared with it too early, a healthy view would seem to have drifted."""


class Rebuild:
    """One attempt at a new view. Used by one thread; the new view's slot is freed with this object."""

    def __init__(self, max_buffered_bytes: int) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        self._held: deque[tuple[int, Batch, int]] = deque()
        self._held_bytes = 0
        self.caught_up = False
        self.waiting = False
        """The next step can do nothing yet."""
        self.drift = Drift()
        self.warnings: list[Skipped] = []
        """What was skipped in the snapshot."""
        self.target: IndexedView | None = None

    def hold(self, sequence: int, batch: Batch, wire_bytes: int) -> None:
        """Keep a live message until the snapshot is decoded. Raises BufferOverflowError."""
        cost = wire_bytes + batch.cost
        self._held.append((sequence, batch, cost))
        self._held_bytes += cost
        if self._held_bytes > self._max_buffered_bytes:
            held = counted(len(self._held), "live message")
            raise BufferOverflowError(
                f"{held} ({self._held_bytes} bytes) arrived during the snapshot, "
                f"max_buffered_bytes allows {self._max_buffered_bytes}"
            )

    def steps(
        self, payloads: Sequence[bytes | memoryview], target: IndexedView, plan: BuildPlan
    ) -> Iterator[None]:
        """Build `target` in bounded steps, each to be taken inside the ingest gate. Raises StreamError."""
        self.target = target
        for payload in payloads:
            yield from self._load(payload, target, plan)
        if plan.old is not None:
            for _ in inherit(plan.old, target.view):
                target.flush()
                yield
            target.flush()
        yield from self._merge(target, plan.on_unknown)
        self.caught_up = True
        if plan.old is None:
            return
        while not plan.is_level():
            self.waiting = True
            yield
        self.waiting = False
        yield from compare(plan.old, target.view, self.drift)

    def follow(self, sequence: int, batch: Batch, on_unknown: OnUnknown) -> None:
        """Apply a live message to a view that has caught up. Raises StreamError."""
        if self.target is not None:
            _advance(self.target, sequence, batch, on_unknown)

    def _load(self, payload: bytes | memoryview, target: IndexedView, plan: BuildPlan) -> Iterator[None]:
        steps = decode_steps(payload, plan.expected)
        while True:
            try:
                events = next(steps)
            except StopIteration as stop:
                self.warnings.extend(stop.value.warnings)
                return
            target.apply(events, as_orphan)
            plan.admit()
            yield

    def _merge(self, target: IndexedView, on_unknown: OnUnknown) -> Iterator[None]:
        applied = 0
        while self._held:
            sequence, batch, cost = self._held.popleft()
            self._held_bytes -= cost
            _advance(target, sequence, batch, on_unknown)
            applied += 1
            if applied % MERGE_PIECE == 0:
                yield


def _advance(target: IndexedView, sequence: int, batch: Batch, on_unknown: OnUnknown) -> None:
    before = target.cursor.last
    # Whatever was received after the request may be older than the watermark, however late it is.
    verdict = target.cursor.judge(sequence, now=target.cursor.stale_until)
    if verdict is Verdict.CONTAINED:
        return
    if verdict in (Verdict.GAP, Verdict.REGRESSED):
        raise SequenceGapError(f"message {sequence} arrived after {before}: what lies between is missing")
    target.apply(batch.events, as_orphan if verdict is Verdict.REPEATED else on_unknown)
    target.view.enforce_bound()
    target.cursor.last = sequence

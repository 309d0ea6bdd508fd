"""One stream between its sockets and the index: messages in, views out. Owned by one thread.

`core.lifecycle` says what must be true of the stream; a Follower makes it true in the index: it decodes
messages, applies them to the view in service, builds new views from snapshots and puts them before
queries. It has no socket; the subscriber brings it what arrived.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from streams import faults
from streams.core.errors import DecodeError, StreamError
from streams.core.events import AllBlocksCleared, Batch, Event
from streams.core.interpret import Expected
from streams.core.lifecycle import Fetch, Lifecycle, Timing
from streams.core.reply import SnapshotReply
from streams.core.sequence import Cursor, Verdict
from streams.core.view import View, as_orphan
from streams.core.wire import decode_sequence, decode_steps
from streams.index import BoardEntry, Index, IndexedView
from streams.pacing import Pacer
from streams.rebuild import BufferOverflowError, BuildPlan, Rebuild, SequenceGapError
from streams.report import StreamMetrics, StreamReport
from streams.resolver import is_numeric
from streams.sockets import Frames, Link, split_endpoint
from streams.spec import Limits, StreamSpec
from streams.status import Fault, StreamChange, StreamState, StreamStatus
from streams.wording import counted

LIVE_FRAMES = 3
RETRY = 0.01
"""Seconds between two looks for a free slot, a permit to decode, or late live messages."""
OVERTAKEN = 0.25
"""Seconds within which live messages that a snapshot has overtaken arrive; later ones are lost."""

_T = TypeVar("_T")
_Shown = tuple[StreamState, Fault | None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a stream shares with the others, and whom it tells."""

    index: Index
    limits: Limits
    permits: threading.Semaphore
    """How many snapshots may be decoded at once."""
    admit: Callable[[StreamSpec, View], None]
    """Raises StreamError when a growing view of that stream would exceed `max_total_blocks`."""
    on_change: Callable[[StreamChange], None]
    metrics: StreamMetrics
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class MessageTooLargeError(StreamError):
    """A live message over the size limit."""

    code = "message_too_large"


_BAD_MESSAGES = (DecodeError, MessageTooLargeError, BufferOverflowError)
"""Faults of the live channel itself."""


class Follower:
    """See the module's text."""

    def __init__(self, spec: StreamSpec, around: Surroundings, rng: random.Random) -> None:
        self.spec = spec
        self._around = around
        limits = around.limits
        timing = Timing(limits.replay_timeout_ms / 1000, limits.resync_interval_ms / 1000)
        self.life = Lifecycle(timing, rng)
        self._expected = Expected(spec.block_size, spec.dp_rank)
        self._topic = spec.topic.encode()
        self._served: IndexedView | None = None
        self._remembered: View | None = None
        """The last view of this life, for what it knew; it may be out of service."""
        self._rebuild: Rebuild | None = None
        self._reply: SnapshotReply | None = None
        self._steps: Iterator[None] | None = None
        self._last_digest: tuple[int, bytes] | None = None
        self._pacer = Pacer(around.clock())
        self._worked = 0.0
        self.report = StreamReport(spec, around.wall, around.on_change, around.metrics)
        self._shown: _Shown | None = None
        self._last_fetch = 0

    # What the subscriber brings.

    def start(self) -> None:
        self.life.start(self._around.clock())
        self.settle()

    def live_link(self, link: Link) -> None:
        """News of the live connection."""
        now = self._around.clock()
        if link is Link.UP:
            self.life.live_up(now)
        elif link is Link.LOST:
            self.life.live_down(faults.live_lost(self.spec, self._around.limits), now)
        elif link is Link.REJECTED:
            self.life.unreachable(faults.live_rejected(self.spec), now)
        elif is_numeric(split_endpoint(self.spec.endpoint)[0]):
            self.life.live_down(faults.live_refused(self.spec), now)
        else:
            self.life.unreachable(faults.live_refused(self.spec), now)
        self.settle()

    def live_unresolved(self, reason: str) -> None:
        """The name in the live endpoint means no address."""
        self.life.unreachable(faults.unresolved(self.spec.endpoint, reason), self._around.clock())
        self.settle()

    def replay_unresolved(self, reason: str) -> None:
        """The name in the replay endpoint means no address."""
        self.life.fetch_failed(faults.unresolved(self.spec.replay_endpoint, reason), self._around.clock())
        self.settle()

    def replay_link(self, link: Link) -> None:
        """News of the snapshot request's connection."""
        if link is Link.UP or self.life.fetch is None or self.life.fetch.building:
            return
        lost = link is Link.LOST
        fault = (
            faults.replay_lost(self.spec, self._around.limits) if lost else faults.replay_refused(self.spec)
        )
        self.life.fetch_failed(fault, self._around.clock())
        self.settle()

    def live_message(self, frames: Frames) -> None:
        """One message of the live channel."""
        if frames.parts[0] != self._topic:
            self.report.count("warnings:other_topic")
            return
        self.report.received(frames.size)
        try:
            self._take_live(frames)
        except StreamError as error:
            self.life.fail(_fault(error), self._around.clock(), live_caused=isinstance(error, _BAD_MESSAGES))
        self.settle()

    def snapshot_message(self, frames: Frames) -> None:
        """One frame set of the reply to the snapshot request under way."""
        fetch = self.life.fetch
        if fetch is None or fetch.building or self._reply is None:
            return
        try:
            if self._reply.add(frames.parts, frames.count, frames.size):
                self._reply_complete(self._reply)
        except StreamError as error:
            self.life.fetch_failed(_fault(error), self._around.clock())
        self.settle()

    def resync(self, reason: str, drop: bool) -> None:
        """Fetch a snapshot now; with `drop`, stop serving first."""
        self._last_digest = None
        self.life.resync(reason, self._around.clock(), drop=drop)
        self.settle()

    def tick(self) -> float | None:
        """Do what is due; returns the seconds until there is something to do again (0: at once)."""
        now = self._around.clock()
        self.life.tick(now)
        self.settle()
        if self._steps is not None:
            return RETRY if self._rebuild is not None and self._rebuild.waiting else 0.0
        if self.life.fetch is not None and self.life.fetch.building:
            return 0.0 if self._begin_build() else RETRY
        deadline = self.life.next_deadline()
        return None if deadline is None else max(0.0, deadline - now)

    @property
    def building(self) -> bool:
        """Whether `step` has work to do."""
        return self._steps is not None

    def step(self) -> None:
        """Do one bounded piece of building a new view, if one is being built."""
        if self._steps is None:
            return
        try:
            done = self._gated(self._next_step)
        except StreamError as error:
            self._rebuild_failed(error)
        else:
            if done:
                self._publish_rebuilt()
            self.settle()

    def crashed(self) -> None:
        """A fault of ours must not leave an untrue view in service."""
        fault = Fault("internal_error", "kvportal failed on this stream; the log has the details")
        self.life.crashed(fault, self._around.clock())
        self.settle()

    def close(self) -> None:
        """Take the stream away from queries."""
        self._stop_building()
        self._around.index.retire(self.spec)
        self._served = self._remembered = None

    # Live messages.

    def _take_live(self, frames: Frames) -> None:
        limit = self._around.limits.max_message_bytes
        if frames.size > limit:
            raise MessageTooLargeError(
                f"a live message of {frames.size} bytes, max_message_bytes allows {limit}"
            )
        if frames.count != LIVE_FRAMES:
            raise DecodeError(f"a live message has {frames.count} frames, it must have {LIVE_FRAMES}")
        sequence = decode_sequence(frames.parts[1])
        forward = self.life.receive(sequence)
        if self._served is not None and forward:
            if self._served.cursor.is_late(sequence, self._around.clock()):
                return  # Not worth decoding.
        self._worked = 0.0
        batch = self._decode(frames.parts[2])
        self.report.decoded(batch)
        if batch.clears:
            self._redefine(sequence, batch)
        elif not forward:
            self._regressed(sequence)
        else:
            self._follow(sequence, batch, frames.size)
        self._throttle()

    def _decode(self, payload: bytes | memoryview) -> Batch:
        """Decode a message in as many holds of the gate as its size needs."""
        steps = decode_steps(payload, self._expected)
        events: list[Event] = []

        def advance() -> Batch | None:
            try:
                events.extend(next(steps))
            except StopIteration as stop:
                return Batch(stop.value.timestamp, tuple(events), stop.value.warnings)
            return None

        while (batch := self._gated(advance)) is None:
            pass
        return batch

    def _follow(self, sequence: int, batch: Batch, wire_bytes: int) -> None:
        """Let the view in service, and the one being built, continue with a message."""
        served, rebuild = self._served, self._rebuild
        if served is not None:
            self._continue(served, sequence, batch)
        if rebuild is None or self._rebuild is not rebuild:
            return
        try:
            if rebuild.caught_up:
                self._gated(lambda: rebuild.follow(sequence, batch, self._is_fresh_orphan))
            else:
                rebuild.hold(sequence, batch, wire_bytes)
        except StreamError as error:
            self._rebuild_failed(error)

    def _continue(self, served: IndexedView, sequence: int, batch: Batch) -> None:
        before = served.cursor.last
        verdict = served.cursor.judge(sequence, self._around.clock())
        if verdict is Verdict.GAP:
            self.report.count("gaps")
            self.life.fail(faults.gap(before, sequence), self._around.clock())
            self.settle()
        elif verdict is Verdict.REGRESSED:
            self._regressed(sequence)
        elif verdict is not Verdict.CONTAINED:
            judge = as_orphan if verdict is Verdict.REPEATED else self._is_orphan
            ignored = served.view.ignored_removals
            for piece in _pieces(batch.events):
                self._gated(partial(served.apply, piece, judge))
            served.view.enforce_bound()
            served.cursor.last = sequence
            self.report.visible(batch)
            if served.view.ignored_removals > ignored:
                self.report.count("warnings:unknown_removal", served.view.ignored_removals - ignored)

    def _regressed(self, sequence: int) -> None:
        self.life.fail(faults.regressed(sequence), self._around.clock(), restarted=True)
        self.settle()

    def _rebuild_failed(self, error: StreamError) -> None:
        """The view being built cannot be finished; one in service goes on."""
        now = self._around.clock()
        if isinstance(error, SequenceGapError):
            self.report.count("gaps")
        fault = _fault(error)
        if isinstance(error, DecodeError):
            # Live messages are decoded before they reach a rebuild.
            fault = Fault(fault.code, f"in the snapshot: {fault.sentence}")
        if self._served is None:
            self.life.fail(fault, now, live_caused=isinstance(error, BufferOverflowError))
        else:
            self.life.fetch_failed(fault, now)
        self.settle()

    def _redefine(self, sequence: int, batch: Batch) -> None:
        """The batch defines the whole state: what follows its last AllBlocksCleared, and nothing else."""
        now = self._around.clock()
        view = self._new_view(Cursor(sequence, stale_until=now))
        if view is None:
            # Nothing of the old view is true any more, so its slot can be had.
            self.life.fail(faults.NO_SLOT, now)
            self.settle()
            return
        last = max(i for i, event in enumerate(batch.events) if isinstance(event, AllBlocksCleared))
        for piece in _pieces(batch.events[last + 1 :]):
            self._gated(partial(view.apply, piece, as_orphan))
        view.view.enforce_bound()
        if self._served is not None and sequence > self._served.cursor.last + 1:
            self.report.count("gaps")
        self._last_digest = None
        self.report.detail = f"full state on the live channel, message {sequence}"
        self.life.redefined(now)
        self._stop_building()
        self._serve(view)
        self.report.visible(batch)

    def _is_orphan(self, block_hash: int) -> bool:
        return self.life.is_orphan(block_hash, self._around.clock())

    def _is_fresh_orphan(self, block_hash: int) -> bool:
        return self.life.is_orphan(block_hash, self._around.clock(), fresh=True)

    # Snapshots.

    def _reply_complete(self, reply: SnapshotReply) -> None:
        now = self._around.clock()
        fetch = self.life.fetch
        if fetch is None or not self.life.accept(reply.watermark, now):
            return
        if self._served is not None and reply.digest == self._last_digest:
            self.report.detail = f"confirmed by an unchanged snapshot at watermark {reply.watermark}"
            self._report_snapshot(reply, fetch)
            self.life.published(now)

    def _begin_build(self) -> bool:
        """Start building once a slot and a permit to decode can be had."""
        reply, rebuild, around = self._reply, self._rebuild, self._around
        if reply is None or rebuild is None or not around.permits.acquire(blocking=False):
            return False
        stale_until = around.clock() + around.limits.replay_timeout_ms / 1000
        target = self._new_view(Cursor(reply.watermark, stale_until))
        if target is None:
            around.permits.release()
            return False
        plan = BuildPlan(
            self._expected,
            self._is_fresh_orphan,
            admit=lambda: self._admit(target.view),
            old=self._remembered if self.life.same_life else None,
            is_level=partial(self._is_level, target, around.clock() + OVERTAKEN),
        )
        self._steps = rebuild.steps(reply.payloads, target, plan)
        return True

    def _is_level(self, target: IndexedView, deadline: float) -> bool:
        served = self._served
        if served is None or served.cursor.last >= target.cursor.last:
            return True
        return self._around.clock() >= deadline

    def _admit(self, view: View) -> None:
        view.enforce_bound()
        self._around.admit(self.spec, view)

    def _new_view(self, cursor: Cursor) -> IndexedView | None:
        return self._around.index.new_view(self.spec, self._around.limits.max_blocks_per_stream, cursor)

    def _next_step(self) -> bool:
        """One step inside the gate; True when there is none left."""
        steps = self._steps
        return steps is None or next(steps, _DONE) is _DONE

    def _publish_rebuilt(self) -> None:
        rebuild, reply, fetch, now = self._rebuild, self._reply, self.life.fetch, self._around.clock()
        if rebuild is None or reply is None or fetch is None or rebuild.target is None:
            return
        target = rebuild.target
        target.cursor.stale_until = now + self._around.limits.replay_timeout_ms / 1000
        if self._served is not None:
            self.report.count("drift:absent", rebuild.drift.absent)
            self.report.count("drift:unclaimed", rebuild.drift.unclaimed)
        self.report.skipped(rebuild.warnings)
        blocks = len(target.view.device) + len(target.view.host)
        self.report.detail = f"snapshot at watermark {reply.watermark}, {counted(blocks, 'block')}"
        self._last_digest = reply.digest
        self.life.published(now)
        self._stop_building()
        self._serve(target, partial(self._report_snapshot, reply, fetch))

    def _report_snapshot(self, reply: SnapshotReply, fetch: Fetch) -> None:
        self.report.snapshot(reply, self._around.clock() - fetch.requested_at)

    def _serve(self, view: IndexedView, report: Callable[[], None] | None = None) -> None:
        self._remembered = view.view
        self._show(view, report)

    def _stop_building(self) -> None:
        if self._steps is not None:
            self._steps = None
            self._around.permits.release()
        self._rebuild = None
        self._reply = None

    # Making the world match the machine.

    def settle(self) -> None:
        """Make view, rebuild and board match what the lifecycle says. Called after every input."""
        if not self.life.same_life:
            self._remembered = None
            self._last_digest = None
        fetch = self.life.fetch
        if fetch is None:
            self._stop_building()
        elif fetch.number != self._last_fetch:
            self._stop_building()
            self._last_fetch = fetch.number
            self.report.count(f"resyncs:{fetch.reason}")
            self._reply = SnapshotReply(self._around.limits.max_message_bytes)
            self._rebuild = Rebuild(self._around.limits.max_buffered_bytes)
        self._show(self._served if self.life.serving else None)

    def _show(self, served: IndexedView | None, report: Callable[[], None] | None = None) -> None:
        """Have queries answer from `served`, and tell of it, if anything changed.

        Queries come first and `report` second: what the status says is already true of a query, and
        a stream that is synchronized already has its snapshot.
        """
        shown = (self._state(served), self._fault(served))
        if served is self._served and shown == self._shown:
            return
        self._around.index.show(BoardEntry(self.spec, served, shown[1]))
        if report is not None:
            report()
        self._served, self._shown = served, shown
        self.report.tell(*shown)

    def _state(self, served: IndexedView | None) -> StreamState:
        """Synchronized while, and only while, there is a view in service: others look at any moment."""
        if served is not None:
            return StreamState.SYNCHRONIZED
        state = self.life.state
        return StreamState.SYNCING if state is StreamState.SYNCHRONIZED else state

    def _fault(self, served: IndexedView | None) -> Fault | None:
        if served is not None:
            return None
        return self.life.error or faults.WAITING.get(self._state(None), faults.UNEXPLAINED)

    # Working inside the gate, and not too much of it.

    def _gated(self, work: Callable[[], _T]) -> _T:
        with self._around.index.gate:
            started = time.perf_counter()
            try:
                result = work()
            finally:
                worked = time.perf_counter() - started
                self._worked += worked
        pause = self._pacer.pause(worked)
        if pause:
            self._around.sleep(pause)
        return result

    def _throttle(self) -> None:
        worked, self._worked = self._worked, 0.0
        seconds = self._pacer.throttle(worked, self._around.clock())
        if seconds > 0:
            self.report.throttled(seconds)
            self._around.sleep(seconds)

    # What people see.

    def status(self) -> StreamStatus:
        """A picture of the stream; may be called from any thread."""
        served = self._served
        view = None if served is None else served.view
        return StreamStatus(
            spec=self.spec,
            state=self._state(served),
            since=self.report.since,
            error=self._fault(served),
            warning=self.life.warning or self.report.notice,
            sequence=None if served is None else served.cursor.last,
            device_blocks=0 if view is None else len(view.device),
            host_blocks=0 if view is None else len(view.host),
            mapped_blocks=0 if view is None else view.mapped_blocks,
            last_event_at=self.report.last_event_at,
            lag_seconds=self.report.lag,
            last_snapshot=self.report.last_snapshot,
            counters=dict(self.report.counters),
        )


_DONE = object()
APPLY_PIECE = 64
"""Events applied in one hold of the gate; a large batch has many, a usual one a few."""


def _pieces(events: tuple[Event, ...]) -> Generator[tuple[Event, ...], None, None]:
    for start in range(0, len(events), APPLY_PIECE):
        yield events[start : start + APPLY_PIECE]


def _fault(error: StreamError) -> Fault:
    return Fault(error.code, str(error))

"""Remembers decisions: the latest in memory, all of them in the database when it keeps up.

`record` and `feedback` cost a few microseconds for a decision (most of it is the short explanation),
never wait and never fail: what they are given goes into a ring and a bounded queue. One thread takes
the queue to the sink in batches. While the sink fails, records wait; when the queue is full, new ones
are dropped and counted. A share of the decisions, evenly spread, keeps its full explanation; the rest
keep their best candidates.

Lifetime: `DecisionLog(sink)`, `start()`, then `record` from any thread, `stop()`. Without a sink there
is only memory, and no thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final, Protocol

from routing.records import DecisionRecord, Selection, record_of
from streams.wording import counted

log = logging.getLogger(__name__)

REMEMBERED: Final = 1000
QUEUED: Final = 10_000
PROMPT_BYTES: Final = 64 * 1024 * 1024
"""Prompts waiting to be written, in all."""
BATCH: Final = 500
FLUSH_SECONDS: Final = 0.5
"""How long the first record of a batch waits for others."""
PRUNE_SECONDS: Final = 60.0
RETRY_SECONDS: Final = (1.0, 30.0)
"""First and longest pause after the sink failed."""


@dataclass(frozen=True, slots=True)
class Written:
    """A decision to be written, with its prompt when prompts are recorded."""

    record: DecisionRecord
    prompt: bytes | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an engine really had cached."""

    decision_id: str
    cached_tokens: int


Entry = Written | Feedback


class RefusedError(Exception):
    """The sink will never take this batch; it must not be offered again."""


class Sink(Protocol):
    """Where the writer thread takes things. Any exception but `RefusedError` means: later again."""

    def write(self, entries: Sequence[Entry]) -> None:
        """All of it or nothing. A feedback may follow the record it belongs to, in the same batch."""

    def prune(self, now: float) -> None:
        """Delete what is beyond the retention limits. `now`: wall clock, seconds since the epoch."""

    def close(self) -> None:
        """The thread ends; let go of connections."""


@dataclass(frozen=True, slots=True)
class LogHealth:
    """How the log is doing."""

    queued: int
    written: int
    dropped: int
    """Records and feedbacks that never reached the database, since the start."""
    error: str | None
    """What the database said, while it fails."""


class DecisionLog:
    """The ring, the queue and the writer thread. `record` and `feedback` may be called from anywhere."""

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        explain_share: float = 0.05,
        record_prompts: bool = False,
        remembered: int = REMEMBERED,
        queued: int = QUEUED,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sink = sink
        self._explain_share = explain_share
        self._record_prompts = record_prompts
        self._remembered = remembered
        self._capacity = queued
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._ring: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._queue: deque[Entry] = deque()
        self._prompt_bytes = 0
        self._seen = 0
        self._written = 0
        self._dropped = 0
        self._error: str | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- from any thread

    def record(self, selection: Selection, prompt: bytes = b"") -> None:
        """Remember a decision."""
        try:
            full = self._is_sampled()
            record = record_of(selection, full=full)
        except Exception:
            log.exception("decision %s could not be recorded", selection.decision_id)
            with self._lock:
                self._dropped += 1
            return
        with self._lock:
            self._ring[record.decision_id] = record
            if len(self._ring) > self._remembered:
                self._ring.popitem(last=False)
            keep = self._record_prompts and full and self._prompt_bytes + len(prompt) <= PROMPT_BYTES
            self._put(Written(record, prompt if keep else None))

    def feedback(self, decision_id: str, cached_tokens: int) -> None:
        """Complete a decision with what its engine had cached."""
        with self._lock:
            record = self._ring.get(decision_id)
            if record is not None:
                self._ring[decision_id] = replace(record, cached_tokens=cached_tokens)
            self._put(Feedback(decision_id, cached_tokens))

    def recent(self, most: int = REMEMBERED) -> tuple[DecisionRecord, ...]:
        """The latest decisions, newest first."""
        with self._lock:
            records = list(self._ring.values())
        return tuple(reversed(records[-most:])) if most > 0 else ()

    def find(self, decision_id: str) -> DecisionRecord | None:
        """A decision that is still in memory."""
        with self._lock:
            return self._ring.get(decision_id)

    def health(self) -> LogHealth:
        with self._lock:
            return LogHealth(len(self._queue), self._written, self._dropped, self._error)

    def _is_sampled(self) -> bool:
        with self._lock:
            self._seen += 1
            return int(self._seen * self._explain_share) > int((self._seen - 1) * self._explain_share)

    def _put(self, entry: Entry) -> None:
        """Under the lock."""
        if self._sink is None:
            return
        if len(self._queue) >= self._capacity:
            self._dropped += 1
            return
        self._queue.append(entry)
        self._prompt_bytes += _prompt_size(entry)
        self._wake.set()

    # ---- life

    def start(self) -> None:
        """Start the writer thread, if there is a sink."""
        if self._sink is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._sink,), name="decision-log", daemon=True
            )
            self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Offer the sink what is queued once more, then join the thread. What is left is dropped."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                lost = counted(len(self._queue), "entry", "entries")
                log.warning("the database still holds up the decision log; lost: %s", lost)
                return
        with self._lock:
            self._dropped += len(self._queue)
            self._queue.clear()

    # ---- the writer thread

    def _run(self, sink: Sink) -> None:
        pause, prune_at = 0.0, 0.0
        while not self._stopping.is_set():
            if pause:
                self._stopping.wait(pause)
            else:
                self._wake.wait(PRUNE_SECONDS)
                self._stopping.wait(FLUSH_SECONDS)
            ok = self._drain(sink)
            if ok and time.monotonic() >= prune_at and not self._stopping.is_set():
                prune_at = time.monotonic() + PRUNE_SECONDS
                ok = self._attempt(partial(sink.prune, self._wall_clock()))
            pause = 0.0 if ok else min(max(pause * 2, RETRY_SECONDS[0]), RETRY_SECONDS[1])
        if not pause:  # what came in while the sink was busy with something else
            self._drain(sink)
        sink.close()

    def _drain(self, sink: Sink) -> bool:
        """Write until the queue is empty. False: the sink failed, and the rest waits."""
        while batch := self._next_batch():
            if not self._attempt(partial(self._write, sink, batch)):
                return False
        return True

    def _next_batch(self) -> list[Entry]:
        with self._lock:
            if not self._queue:
                self._wake.clear()
            return list(islice(self._queue, BATCH))

    def _write(self, sink: Sink, batch: Sequence[Entry]) -> None:
        """Write the next entries of the queue; of a batch that is refused, everything that is not itself
        the reason."""
        try:
            sink.write(batch)
        except RefusedError as error:
            if len(batch) > 1:
                for entry in batch:
                    self._write(sink, [entry])
            else:
                log.warning("the database refused a decision: %s", error)
                self._settle(batch, dropped=1)
        else:
            self._settle(batch, written=len(batch))

    def _settle(self, batch: Sequence[Entry], *, written: int = 0, dropped: int = 0) -> None:
        """The next entries of the queue are done with, at once: a failure after them must not have them
        offered again."""
        with self._lock:
            self._written += written
            self._dropped += dropped
            for _ in batch:
                self._prompt_bytes -= _prompt_size(self._queue.popleft())

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:
            if self._error is None:
                log.exception(
                    "decisions cannot be written; they wait, and are dropped when the queue is full"
                )
            self._error = f"{type(error).__name__}: {error}"
            return False
        if self._error is not None:
            log.info("decisions are written again")
        self._error = None
        return True


def _prompt_size(entry: Entry) -> int:
    return len(entry.prompt) if isinstance(entry, Written) and entry.prompt is not None else 0

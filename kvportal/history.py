"""The one thread that talks to the database for the running portal.

Streams, commands and the sampler hand their records over and go on: a record is put in a bounded
queue and never waits for the database. When the database fails, the records stay queued and are
written later; when the queue is full, state changes are dropped and counted, audit records only
beyond a bound of their own. Regular work (the replica's row, orders waiting in the database,
retention) runs on the same thread as *chores*.

Lifetime: `History(replica)`, `add_chore(...)`, `start()`; then `record_*` from any thread; `stop()`
writes what is queued and joins the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django.db import DataError, Error, IntegrityError, connection, transaction

from kvportal import records
from streams.models import ResyncRequest
from streams.resync import ResyncOrder, ResyncOutcome
from streams.spec import StreamId
from streams.status import StreamChange

log = logging.getLogger(__name__)

CHANGE_CAPACITY = 10_000
AUDIT_CAPACITY = 10_000
BATCH = 500
RETRY_SECONDS = (1.0, 30.0)
"""First and longest pause after a failure of the database."""
SILENT_SECONDS = 10.0
"""A database that has not answered for so long counts as failing: a connection into a network that
swallows everything raises nothing for many minutes."""
LOG_EVERY_SECONDS = 60.0
CHANGES_PER_MINUTE = 60
"""State changes of one stream that are written per minute; a flapping stream must not push the
history of all others out."""

Audit = ResyncOrder | ResyncOutcome


@dataclass(frozen=True, slots=True)
class HistoryHealth:
    """How the history is doing, for the page and the metrics."""

    queued: int
    dropped: int
    """Records lost since the start because the queue was full, or because the database refused them."""
    suppressed: int
    """State changes of flapping streams that were left out on purpose."""
    error: str | None
    """What the database said, while it fails, or that it says nothing; None when all is well."""


@dataclass
class Chore:
    """Regular work: `run` gets the wall clock; every `interval` seconds, the first time at once."""

    name: str
    interval: float
    run: Callable[[float], object]
    due: float = 0.0


class FlapFilter:
    """Lets so many state changes of each stream pass per minute; the last of them says so. Pure: the
    clock is the records' own."""

    def __init__(self, per_minute: int = CHANGES_PER_MINUTE) -> None:
        self._per_minute = per_minute
        self._minute = -1
        self._seen: dict[StreamId, int] = {}

    def admit(self, change: StreamChange) -> StreamChange | None:
        minute = int(change.at // 60)
        if minute != self._minute:
            self._minute, self._seen = minute, {}
        count = self._seen[change.spec.id] = self._seen.get(change.spec.id, 0) + 1
        if count < self._per_minute:
            return change
        note = f"{change.detail} (changes too often: the rest of this minute is not recorded)".strip()
        return replace(change, detail=note) if count == self._per_minute else None


class History:
    """The writer thread and its queues."""

    def __init__(
        self,
        replica: str,
        *,
        change_capacity: int = CHANGE_CAPACITY,
        audit_capacity: int = AUDIT_CAPACITY,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica = replica
        self._clock = clock
        self._monotonic = monotonic
        self._changes: deque[StreamChange] = deque()
        self._audits: deque[Audit] = deque()
        self._change_capacity = change_capacity
        self._audit_capacity = audit_capacity
        self._chores: list[Chore] = []
        self._flaps = FlapFilter()
        self._lock = threading.Lock()
        self._dropped = 0
        self._suppressed = 0
        self._error: str | None = None
        self._asked_at: float | None = None
        """Since when the thread has been at the work that it does now."""
        self._retry_in = 0.0
        self._quiet_until = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._farewell: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None

    # ---- called from any thread; never blocks

    def record_change(self, change: StreamChange) -> None:
        with self._lock:
            # Judged once, as it comes: what waits for a database that is away is tried again and again.
            kept = self._flaps.admit(change)
            self._suppressed += kept is None
        if kept is not None:
            self._put(self._changes, self._change_capacity, kept)

    def record_order(self, order: ResyncOrder) -> None:
        self._put(self._audits, self._audit_capacity, order)

    def record_outcome(self, outcome: ResyncOutcome) -> None:
        self._put(self._audits, self._audit_capacity, outcome)

    def _put(self, queue: deque, capacity: int, record: StreamChange | Audit) -> None:
        with self._lock:
            if len(queue) >= capacity:
                self._dropped += 1
                return
            queue.append(record)
        self._wake.set()

    def health(self) -> HistoryHealth:
        asked_at, error = self._asked_at, self._error
        if error is None and asked_at is not None and self._monotonic() - asked_at > SILENT_SECONDS:
            error = f"no answer for more than {SILENT_SECONDS:g} s"
        with self._lock:
            queued = len(self._changes) + len(self._audits)
            return HistoryHealth(queued, self._dropped, self._suppressed, error)

    # ---- life

    def add_chore(self, name: str, interval: float, run: Callable[[float], object]) -> None:
        """Register regular work; before `start`."""
        self._chores.append(Chore(name, interval, run))

    def hurry(self, name: str) -> None:
        """Do a chore as soon as possible, rather than when it is due. Callable from any thread."""
        for chore in self._chores:
            if chore.name == name:
                chore.due = 0.0
        self._wake.set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 2.0, farewell: Callable[[], object] | None = None) -> None:
        """Write what is queued, once, then do `farewell` on the same thread, and end it."""
        self._farewell = farewell
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning("the history's last records were not written: the database does not answer")

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._retry_in:
                    # While the database fails new records must not hurry the next try.
                    self._sleep(self._retry_in)
                else:
                    self._wake.wait(self._pause())
                    self._wake.clear()
                self.step()
            self._retry_in = 0.0
            if self._guarded(self._write_queued) and self._farewell is not None:
                self._guarded(self._farewell)
        finally:
            connection.close()

    def _pause(self) -> float | None:
        if not self._chores:
            return None
        return max(0.0, min(chore.due for chore in self._chores) - self._monotonic())

    def _sleep(self, seconds: float) -> None:
        deadline = self._monotonic() + seconds
        while not self._stopping and (left := deadline - self._monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()

    # ---- one round

    def step(self) -> bool:
        """Write what is queued and do the chores that are due; whether the database played along."""
        return self._guarded(self._write_queued) and all(
            self._guarded(partial(self._do, chore)) for chore in self._chores
        )

    def _do(self, chore: Chore) -> None:
        now = self._monotonic()
        if now >= chore.due:
            chore.due = now + chore.interval
            chore.run(self._clock())

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Does `work`; whether the database played along. Work that asked it nothing says nothing about a
        database that failed before."""
        self._asked_at = self._monotonic()
        answered = _Answered()
        try:
            with connection.execute_wrapper(answered):
                work()
        except Error as error:
            self._failed(error)
            return False
        except Exception:
            # A mistake in a chore must not end the thread that all others need.
            log.exception("the history could not do part of its work")
            return True
        finally:
            self._asked_at = None
        if answered:
            if self._error is not None:
                log.info("the database answers again")
            self._error, self._retry_in = None, 0.0
        return True

    def _failed(self, error: Error) -> None:
        first, longest = RETRY_SECONDS
        self._error = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        self._retry_in = min(longest, max(first, self._retry_in * 2))
        if self._monotonic() >= self._quiet_until:
            self._quiet_until = self._monotonic() + LOG_EVERY_SECONDS
            log.warning("the database fails, records are kept for later: %s", self._error)
        if not connection.in_atomic_block:
            connection.close()

    def _write_queued(self) -> None:
        while audits := self._take(self._audits):
            self._write(self._audits, audits, _write_audits)
        while changes := self._take(self._changes):
            self._write(self._changes, changes, lambda batch: records.write_changes(self.replica, batch))

    def _take(self, queue: deque) -> list:
        with self._lock:
            return [queue.popleft() for _ in range(min(BATCH, len(queue)))]

    def _write(self, queue: deque, batch: list, write: Callable[[list], None]) -> None:
        try:
            with transaction.atomic():
                write(batch)
        except (DataError, IntegrityError, ValueError) as error:
            if len(batch) > 1:
                self._write_singly(queue, batch, write)
                return
            # Not the database's fault: the same record would fail for ever.
            with self._lock:
                self._dropped += 1
            log.warning("the database refuses a record, which is lost: %s (%s)", batch[0], error)
        except Error:
            with self._lock:
                queue.extendleft(reversed(batch))
            raise

    def _write_singly(self, queue: deque, batch: list, write: Callable[[list], None]) -> None:
        for position, record in enumerate(batch):
            try:
                self._write(queue, [record], write)
            except Error:
                with self._lock:
                    queue.extend(batch[position + 1 :])
                raise


class _Answered:
    """Around the queries of a connection: true once one of them was answered."""

    def __init__(self) -> None:
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def __call__(self, execute: Callable[..., Any], *query: Any) -> Any:
        result = execute(*query)
        self._any = True
        return result


def _write_audits(batch: list[Audit]) -> None:
    for record in batch:
        if isinstance(record, ResyncOrder):
            ResyncRequest.record(record)
        else:
            records.write_outcome(record)

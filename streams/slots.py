"""Slots of the table and who may use them: leases.

A query takes the board (an immutable tuple of views) once and then reads the table without a lock. A
slot whose view was swapped out must therefore stay as it is until the last query that took a board
with it is done; recycled earlier, an answer could mix two views. So every view holds a Lease, boards
hold views, and the slot is retired when the lease is garbage: the last reader's reference is what
keeps it. A lease's finalizer only posts; the janitor thread clears the slot's bits in small pieces
under the ingest gate and then frees it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue

from streams.core.content_key import ContentKey
from streams.core.table import SLOTS, Table
from streams.core.view import View

CLEAR_PIECE = 1024
"""Keys cleared per hold of the gate."""


class Lease:
    """The right to use a slot, for as long as anything refers to it."""

    __slots__ = ("_retired", "_view", "slot")

    def __init__(self, slot: int, view: View, retired: SimpleQueue[tuple[int, View] | None]) -> None:
        self.slot = slot
        self._view = view
        self._retired = retired

    def __del__(self) -> None:
        # May run anywhere, also inside another thread's critical section: SimpleQueue.put is
        # reentrant, a lock would not be.
        self._retired.put((self.slot, self._view))


class SlotPool:
    """Hands out leases and recycles slots."""

    def __init__(self, table: Table, gate: threading.Lock) -> None:
        self._table = table
        self._gate = gate
        self._free: deque[int] = deque(range(SLOTS))
        self._retired: SimpleQueue[tuple[int, View] | None] = SimpleQueue()
        self._janitor: threading.Thread | None = None
        self._stopping = False

    @property
    def free(self) -> int:
        return len(self._free)

    def lease(self, view: View) -> Lease | None:
        """A lease for a view that holds nothing yet; None while every slot is in use."""
        try:
            return Lease(self._free.popleft(), view, self._retired)
        except IndexError:
            return None

    def start(self) -> None:
        self._janitor = threading.Thread(target=self._run, name="slot-janitor", daemon=True)
        self._janitor.start()

    def stop(self) -> None:
        """End the janitor at once: clearing full views takes seconds, and the table is used no more."""
        if self._janitor is not None:
            self._stopping = True
            self._retired.put(None)
            self._janitor.join()
            self._janitor = None

    def _run(self) -> None:
        while (retired := self._retired.get()) is not None:
            slot, view = retired
            for keys in _pieces(view):
                if self._stopping:
                    return
                with self._gate:
                    self._table.clear(slot, keys)
            with self._gate:
                self._table.forget(slot)
            del retired, view
            self._free.append(slot)


def _pieces(view: View) -> Iterator[tuple[ContentKey, ...]]:
    """The content keys that a view holds, piece by piece."""
    for held in (view.device, view.host):
        keys = iter(held.values())
        while piece := tuple(islice(keys, CLEAR_PIECE)):
            yield piece

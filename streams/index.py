"""The index of all streams: one table, the views in service, and queries against them.

Writers (subscriber threads) change the table only inside the *ingest gate*, one lock, and put a view in
service by publishing a new board. Readers take no lock at all: they read the board once, which fixes
the set of views for that answer, and look prompts up in the table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from streams.core.events import Event
from streams.core.query import holdings, match_prefix
from streams.core.sequence import Cursor
from streams.core.table import SLOTS, Table
from streams.core.view import OnUnknown, View
from streams.slots import Lease, SlotPool
from streams.spec import StreamId, StreamSpec
from streams.status import Fault, Match


class IndexedView:
    """A view with its place in the table and in its stream. Written by one thread."""

    __slots__ = ("_table", "cursor", "lease", "view")

    def __init__(self, view: View, lease: Lease, table: Table, cursor: Cursor) -> None:
        self.view = view
        self.lease = lease
        self.cursor = cursor
        self._table = table

    def apply(self, events: Iterable[Event], on_unknown: OnUnknown) -> None:
        """Apply events to the view and the table; call it inside the gate.

        Also after an exception the table agrees with the view: the janitor clears a slot by the
        keys that its view still holds.
        """
        try:
            self.view.apply(events, on_unknown)
        finally:
            self.flush()

    def flush(self) -> None:
        """Bring what changed in the view to the table; call it inside the gate."""
        delta = self.view.take_delta()
        if delta:
            self._table.apply(self.lease.slot, delta)


@dataclass(frozen=True, slots=True)
class BoardEntry:
    """One stream as queries see it: either a view in service, or the reason why there is none."""

    spec: StreamSpec
    view: IndexedView | None
    fault: Fault | None

    @property
    def blocks(self) -> int:
        return 0 if self.view is None else self.view.view.mapped_blocks


class Board:
    """The views in service at one moment, in (instance, rank) order. Immutable."""

    __slots__ = ("entries", "groups")

    def __init__(self, entries: dict[StreamId, BoardEntry]) -> None:
        self.entries = tuple(entries[stream_id] for stream_id in sorted(entries))
        self.groups: dict[tuple[int, int], list[int]] = {}
        """(block_size, hash_seed) → the slots of the views whose keys are made that way."""
        for entry in self.entries:
            if entry.view is not None:
                how = (entry.spec.block_size, entry.spec.hash_seed)
                self.groups.setdefault(how, []).append(entry.view.lease.slot)


@dataclass(frozen=True, slots=True)
class BlockHoldings:
    """What one stream holds of a prompt, block by block."""

    spec: StreamSpec
    tiers: str
    """One letter a whole block: `D` Device, `H` Host alone, `B` both, `-` neither."""
    fault: Fault | None


class Index:
    """See the module's text."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.table = Table()
        self.slots = SlotPool(self.table, self.gate)
        self._owners: dict[StreamId, StreamSpec] = {}
        self._entries: dict[StreamId, BoardEntry] = {}
        self._entries_lock = threading.Lock()
        self._board = Board({})

    @property
    def board(self) -> Board:
        return self._board

    def new_view(self, spec: StreamSpec, max_blocks: int, cursor: Cursor) -> IndexedView | None:
        """An empty view in a slot of its own, unseen by queries; None while no slot is free."""
        view = View(spec.block_size, spec.hash_seed, max_blocks)
        lease = self.slots.lease(view)
        return None if lease is None else IndexedView(view, lease, self.table, cursor)

    def admit(self, entry: BoardEntry) -> None:
        """Begin to show a stream. From now on its place belongs to this very spec object.

        Not to any equal one: a stream may be retired and followed again while the thread of its
        first life still has something to say.
        """
        with self._entries_lock:
            self._owners[entry.spec.id] = entry.spec
        self.show(entry)

    def show(self, entry: BoardEntry) -> None:
        """Put one stream's new state before queries, in one step. Ignored from a former owner."""
        with self._entries_lock:
            if self._owners.get(entry.spec.id) is entry.spec:
                self._entries[entry.spec.id] = entry
                self._board = Board(self._entries)

    def retire(self, spec: StreamSpec) -> None:
        """Show a stream no longer, whatever its thread may still have to say."""
        with self._entries_lock:
            if self._owners.get(spec.id) is spec:
                del self._owners[spec.id], self._entries[spec.id]
                self._board = Board(self._entries)

    def query(self, prompt: bytes) -> list[Match]:
        """What each stream holds of a prompt, given as packed token IDs. In (instance, rank) order.

        All messages up to the sequence in a match are in its numbers; later ones may be.
        """
        board = self._board
        # Before the look-up: a message may arrive during it, and its sequence would promise too much.
        sequences = [None if entry.view is None else entry.view.cursor.last for entry in board.entries]
        hits: dict[int, tuple[int, int]] = {}
        for (block_size, hash_seed), slots in board.groups.items():
            found = match_prefix(self.table, prompt, block_size, hash_seed, slots)
            hits.update(zip(slots, found, strict=True))
        return [
            _match(entry, sequence, hits) for entry, sequence in zip(board.entries, sequences, strict=True)
        ]

    def explore(self, prompt: bytes) -> list[BlockHoldings]:
        """Block by block, also behind the first missing one, what each stream holds of a prompt."""
        board = self._board
        masks = {how: holdings(self.table, prompt, *how) for how in board.groups}
        answer = []
        for entry in board.entries:
            if entry.view is None:
                answer.append(BlockHoldings(entry.spec, "", entry.fault))
                continue
            slot = entry.view.lease.slot
            keyed = masks[entry.spec.block_size, entry.spec.hash_seed]
            tiers = "".join("-DHB"[(mask >> slot & 1) + 2 * (mask >> SLOTS + slot & 1)] for _, mask in keyed)
            answer.append(BlockHoldings(entry.spec, tiers, None))
        return answer


def _match(entry: BoardEntry, sequence: int | None, hits: dict[int, tuple[int, int]]) -> Match:
    spec, view = entry.spec, entry.view
    if view is None:
        return Match(spec, False, None, 0, 0, 0, 0, entry.fault)
    device, host_only = hits[view.lease.slot]
    return Match(
        spec,
        True,
        sequence,
        device * spec.block_size,
        host_only * spec.block_size,
        len(view.view.device),
        len(view.view.host),
        None,
    )

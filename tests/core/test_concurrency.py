"""Writers that swap views all the time against readers without a lock.

Every writer stores the same prompt, so all of them change the same masks. A view holds the whole
prompt either on Device or on Host, so an answer that mixes two views, or misses an update, is neither.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest

from streams.core.content_key import ContentKey, pack_tokens
from streams.core.events import BlockHash, BlockStored, Tier
from streams.core.sequence import Cursor
from streams.core.table import SLOTS, Table
from streams.core.view import as_orphan
from streams.index import BoardEntry, Index, IndexedView
from streams.spec import StreamSpec
from tests.support.waiting import wait_until

BLOCKS, BLOCK_SIZE, WRITERS, READERS = 48, 2, 3, 2
PROMPT = pack_tokens(range(BLOCKS * BLOCK_SIZE))
WHOLE = BLOCKS * BLOCK_SIZE
HASHES = tuple(map(BlockHash, range(BLOCKS)))


class Torn(Exception):
    """An answer or a table that no sequence of whole views explains."""


class Stress:
    """Runs writers and readers until the operations are done or something is wrong."""

    def __init__(self, index: Index, operations: int) -> None:
        self.index = index
        self.operations = operations
        self.done = 0
        self.answers = 0
        self.faults: list[str] = []
        self._threads = [
            *(threading.Thread(target=self._guard, args=(self._write, n)) for n in range(WRITERS)),
            *(threading.Thread(target=self._guard, args=(self._read,)) for _ in range(READERS)),
        ]

    def run(self) -> None:
        self.index.slots.start()
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                thread.join()
        finally:
            self.index.slots.stop()
        if self.faults:
            raise Torn(self.faults[0])

    @property
    def _over(self) -> bool:
        return self.done >= self.operations or bool(self.faults)

    def _guard(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Torn as torn:
            self.faults.append(str(torn))

    def _write(self, number: int) -> None:
        spec = StreamSpec(f"writer-{number}", 0, "tcp://x:1", "tcp://x:2", BLOCK_SIZE)
        self.index.admit(BoardEntry(spec, None, None))
        for turn in count():
            view = self._build(spec, Tier(turn % 2))
            if self._over:
                return
            self.index.show(BoardEntry(spec, view, None))
            self._check_own_bits(view, Tier(turn % 2))
            self.done += BLOCKS

    def _build(self, spec: StreamSpec, tier: Tier) -> IndexedView | None:
        view = None
        while view is None and not self._over:
            view = self.index.new_view(spec, 1000, Cursor(0, 0.0))
        if view is not None:
            for start in range(0, BLOCKS, 8):
                parent = HASHES[start - 1] if start else None
                tokens = PROMPT[start * BLOCK_SIZE * 4 : (start + 8) * BLOCK_SIZE * 4]
                with self.index.gate:
                    view.apply([BlockStored(HASHES[start : start + 8], parent, tokens, tier)], as_orphan)
        return view

    def _check_own_bits(self, view: IndexedView | None, tier: Tier) -> None:
        """Only this thread changes these bits, so each of them must be there."""
        if view is None:
            return
        held = view.view.device if tier is Tier.DEVICE else view.view.host
        bit = 1 << view.lease.slot + SLOTS * tier
        if not all(self.index.table.mask(key) & bit for key in held.values()):
            raise Torn("an update was lost")

    def _read(self) -> None:
        while not self._over:
            for match in self.index.query(PROMPT):
                hits = (match.device_hit_tokens, match.host_only_hit_tokens)
                if match.synchronized and hits not in ((WHOLE, 0), (0, WHOLE)):
                    raise Torn(f"{match.spec.instance_name} answered {hits}")
                self.answers += 1


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def without_gate() -> Index:
    index = Index()
    index.gate = index.slots._gate = nullcontext()  # type: ignore[assignment]
    return index


def without_leases() -> Index:
    """Frees a slot as soon as its view is swapped out, whoever still reads it."""

    class Careless(Index):
        def show(self, entry: BoardEntry) -> None:
            before = self._entries.get(entry.spec.id)
            super().show(entry)
            if before is not None and before.view is not None:
                view = before.view
                self.slots._retired.put((view.lease.slot, view.view))
                view.lease._retired = _Nowhere()  # type: ignore[assignment]

    index = Careless()
    # Few slots, so that a freed one is soon used again.
    for _ in range(SLOTS - 2 * WRITERS):
        index.slots._free.popleft()
    return index


class _Nowhere:
    def put(self, item: object) -> None:
        pass


@pytest.mark.parametrize("interval", [0.0005, 0.00001])
def test_no_update_is_lost_and_no_answer_mixes_two_views(interval: float) -> None:
    stress = Stress(Index(), operations=1_200_000)
    with switch_interval(interval):
        stress.run()
    assert stress.done >= 1_000_000
    assert stress.answers > 1000


@pytest.mark.parametrize("broken", [without_gate, without_leases])
def test_the_same_stress_fails_without_the_gate_or_the_leases(broken: Any) -> None:
    with switch_interval(0.00001), pytest.raises(Torn):
        Stress(broken(), operations=20_000_000).run()


def test_a_slot_is_not_reused_while_a_reader_still_has_its_board() -> None:
    index = Index()
    index.slots.start()
    try:
        spec = StreamSpec("a", 0, "tcp://x:1", "tcp://x:2", BLOCK_SIZE)
        stress = Stress(index, operations=1)
        first = stress._build(spec, Tier.DEVICE)
        index.admit(BoardEntry(spec, first, None))
        board = index.board
        del first
        index.show(BoardEntry(spec, None, None))
        assert index.slots.free == SLOTS - 1
        key = next(iter(board.entries[0].view.view.device.values()))  # type: ignore[union-attr]
        assert index.table.mask(key)
        del board
        wait_until(lambda: index.slots.free == SLOTS)
        assert len(index.table) == 0
    finally:
        index.slots.stop()


def test_stopping_does_not_wait_until_everything_is_cleared() -> None:
    """Clearing the full views of many streams takes longer than a stop may."""

    class Watched(Table):
        __slots__ = ()

        def clear(self, slot: int, keys: Iterable[ContentKey]) -> None:
            cleared.append(slot)
            stopped.wait(20)
            super().clear(slot, keys)

    index, cleared, stopped = Index(), [], threading.Event()  # type: ignore[var-annotated]
    index.table = index.slots._table = Watched()
    spec = StreamSpec("a", 0, "tcp://x:1", "tcp://x:2", BLOCK_SIZE)
    for _ in range(8):
        assert Stress(index, operations=1)._build(spec, Tier.DEVICE) is not None
    index.slots.start()
    stopping = threading.Thread(target=index.slots.stop)
    stopping.start()
    wait_until(lambda: index.slots._stopping and cleared)
    stopped.set()
    stopping.join()
    assert len(cleared) == 1

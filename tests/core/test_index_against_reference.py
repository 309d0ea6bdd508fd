"""The index against a naive model, and proof that the comparison notices a broken index."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.events import BlockHash, BlockRemoved, Tier
from streams.core.table import Delta, Table
from streams.core.view import Stray, View
from tests.core.harness import Differential


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_any_events_leave_the_index_as_the_model_says(rng: random.Random, batches: int) -> None:
    Differential(rng).run(batches)


@pytest.mark.parametrize("seed", range(8))
def test_long_runs_leave_the_index_as_the_model_says(seed: int) -> None:
    # About 2 events a batch: 8 runs are 200,000 events.
    Differential(random.Random(seed)).run(12_500, compare_every=250)


class _RemovalTakesBothTiers(View):
    def _remove(self, event: BlockRemoved) -> None:
        super()._remove(event)
        super()._remove(BlockRemoved(event.block_hashes, Tier(1 - event.tier), event.group_idx))


class _OrphansNeverJoin(View):
    def adopt(self, block_hash: BlockHash) -> None:
        pass


class _FirstMappingWins(View):
    def _remap(self, block_hash: BlockHash, key: int) -> None:
        pass


class _OpaqueBlocksMatch(View):
    def _store(self, event, on_unknown) -> None:  # type: ignore[no-untyped-def]
        from dataclasses import replace

        super()._store(replace(event, opaque=frozenset()), on_unknown)


class _RemovedBlocksAreForgotten(View):
    def _remove(self, event: BlockRemoved) -> None:
        super()._remove(event)
        for block_hash in event.block_hashes:
            self.retained.pop(block_hash, None)


class _OrphanForgetsItsTiers(View):
    def keep_stray(self, block_hash: BlockHash, stray: Stray) -> None:
        stray.tiers &= 1
        super().keep_stray(block_hash, stray)


class _NewestGoesFirst(View):
    def enforce_bound(self) -> None:
        while self.mapped_blocks > self.max_blocks and self.retained:
            self.retained.popitem(last=True)
        super().enforce_bound()


class _LastHashIsNotCounted(Table):
    """Forgets that two hashes may hold the same content."""

    def apply(self, slot: int, delta: Delta) -> None:
        super().apply(slot, delta)
        self.forget(slot)


class _SlotsRunTogether(Table):
    def apply(self, slot: int, delta: Delta) -> None:
        super().apply(min(slot, 1), delta)


def _caught(make: Callable[[random.Random], Differential]) -> bool:
    for seed in range(20):
        try:
            make(random.Random(seed)).run(300)
        except (AssertionError, LookupError):
            return True
    return False


@pytest.mark.parametrize(
    "broken",
    [
        _RemovalTakesBothTiers,
        _OrphansNeverJoin,
        _FirstMappingWins,
        _OpaqueBlocksMatch,
        _RemovedBlocksAreForgotten,
        _OrphanForgetsItsTiers,
        _NewestGoesFirst,
    ],
)
def test_a_broken_view_is_caught(broken: type[View]) -> None:
    assert _caught(lambda rng: Differential(rng, view_type=broken))


@pytest.mark.parametrize("broken", [_LastHashIsNotCounted, _SlotsRunTogether])
def test_a_broken_table_is_caught(broken: type[Table]) -> None:
    assert _caught(lambda rng: Differential(rng, table_type=broken))


def test_the_sound_index_passes_where_the_broken_ones_fail() -> None:
    assert not _caught(Differential)

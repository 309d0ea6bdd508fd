"""Drives views that share a table and the naive model with the same random events, and compares.

The randomness comes from outside: a seeded `random.Random`, or hypothesis's, which then shrinks.
"""

from __future__ import annotations

import random
from itertools import product

from streams.core.content_key import pack_tokens, prompt_keys
from streams.core.errors import IndexOverflowError, UnknownBlockError
from streams.core.events import (
    NO_BLOCKS,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    SkippedKind,
    Tier,
)
from streams.core.query import match_prefix
from streams.core.table import SLOTS, Table
from streams.core.view import View
from tests.core.reference import ReferenceView

BLOCK_SIZE = 2
SEED = 1024
TOKENS = (1, 2)
HASHES = tuple(BlockHash(value) for value in (0, 1, 2, 3, 4, 5, 2**63, 2**64 - 1))
DEPTH = 3
PROMPTS = tuple(pack_tokens(ids) for ids in product(TOKENS, repeat=BLOCK_SIZE * DEPTH))


def random_event(rng: random.Random) -> Event:
    """Any event that a decoder can produce, over few hashes and tokens, so that they collide often."""
    choice = rng.randrange(100)
    if choice < 2:
        return AllBlocksCleared()
    if choice < 4:
        return SkippedKind("mamba", rng.choice((None, 0, 1)))
    hashes = tuple(rng.choice(HASHES) for _ in range(rng.randint(1, 3)))
    tier = rng.choice(tuple(Tier))
    group = rng.choice((None, None, None, 0, 1))
    if choice < 40:
        return BlockRemoved(hashes, tier, group)
    opaque = frozenset({rng.randrange(len(hashes))}) if rng.randrange(12) == 0 else NO_BLOCKS
    tokens = b""
    if choice < 85:
        tokens = pack_tokens(rng.choice(TOKENS) for _ in range(BLOCK_SIZE * len(hashes)))
    return BlockStored(
        hashes,
        rng.choice((None, *HASHES)),
        tokens,
        rng.choice((tier, tier, tier, None)),
        opaque,
        group,
        names_kind=rng.random() < 0.2,
    )


class Pair:
    """One real view in a slot of the shared table, and its model."""

    def __init__(self, table: Table, slot: int, max_blocks: int, view_type: type[View]) -> None:
        self.table, self.slot = table, slot
        self.view = view_type(BLOCK_SIZE, SEED, max_blocks)
        self.model = ReferenceView(BLOCK_SIZE, max_blocks)

    def apply(self, events: list[Event], orphans: bool) -> bool:
        """Apply one batch to both; True if both refused it in the same way."""
        mine = self._outcome(self.view, events, orphans)
        self.table.apply(self.slot, self.view.take_delta())
        assert mine == self._outcome(self.model, events, orphans)
        return mine is not None

    @staticmethod
    def _outcome(view: View | ReferenceView, events: list[Event], orphans: bool) -> str | None:
        try:
            view.apply(events, lambda block_hash: orphans)
            view.enforce_bound()
        except UnknownBlockError as error:
            return f"unknown {error.block_hash}"
        except IndexOverflowError:
            return "overflow"
        return None

    def compare(self) -> None:
        view, model = self.view, self.model
        assert set(view.device) == model.held(0)
        assert set(view.host) == model.held(1)
        known = {*view.device, *view.host, *view.retained, *view.strays}
        assert known == set(model.records)
        assert view.mapped_blocks == len(known)
        hits = [match_prefix(self.table, prompt, BLOCK_SIZE, SEED, [self.slot])[0] for prompt in PROMPTS]
        assert hits == model.all_hits(PROMPTS)


class Differential:
    """A few streams over one table; a refused batch replaces the view, as a resync would."""

    def __init__(
        self, rng: random.Random, view_type: type[View] = View, table_type: type[Table] = Table
    ) -> None:
        self.rng = rng
        self.table = table_type()
        self.view_type = view_type
        self.max_blocks = rng.choice((4, 6, 100))
        self.pairs = [self._pair(slot) for slot in (0, 1, SLOTS - 1)]

    def _pair(self, slot: int) -> Pair:
        return Pair(self.table, slot, self.max_blocks, self.view_type)

    def run(self, batches: int, compare_every: int = 1) -> None:
        rng = self.rng
        for number in range(1, batches + 1):
            position = rng.randrange(len(self.pairs))
            pair = self.pairs[position]
            events = [random_event(rng) for _ in range(rng.randint(1, 3))]
            if pair.apply(events, orphans=rng.random() < 0.7):
                self._replace(position)
            if number % compare_every == 0:
                self.compare()
        self.compare()

    def _replace(self, position: int) -> None:
        gone = self.pairs[position]
        self.table.clear(gone.slot, gone.view.device.values())
        self.table.clear(gone.slot, gone.view.host.values())
        self.table.forget(gone.slot)
        self.pairs[position] = self._pair(gone.slot)

    def compare(self) -> None:
        for pair in self.pairs:
            pair.compare()
        self._compare_table()

    def _compare_table(self) -> None:
        """The table holds exactly what the models hold: nothing is left behind."""
        expected: dict[int, int] = {}
        for pair in self.pairs:
            for tier in Tier:
                for content in pair.model.contents(tier):
                    key = list(prompt_keys(b"".join(content), BLOCK_SIZE, SEED))[-1]
                    expected[key] = expected.get(key, 0) | 1 << (pair.slot + SLOTS * tier)
        actual = {key: mask for shard in self.table.shards for key, mask in shard.items()}
        assert actual == expected

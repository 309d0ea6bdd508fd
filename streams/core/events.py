"""Events of an engine's KV-cache stream, decoded and normalised.

Token IDs are kept packed (little-endian unsigned 32-bit), which is what the content key hashes: a
Python list of ints would cost eight times the memory and a second conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

BlockHash = NewType("BlockHash", int)
"""The engine's own 64-bit name of a block, normalised to unsigned. Opaque: never a content key."""

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1

NO_BLOCKS: frozenset[int] = frozenset()


class Tier(IntEnum):
    """Where a block is held: wire medium `gpu` is DEVICE, `cpu` is HOST."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became resident in a tier; each block's parent is the block before it."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """Parent of the first block; None: it starts a prompt."""
    tokens: bytes
    """Packed token IDs of all blocks, or empty: a copy of blocks that are already known."""
    tier: Tier | None
    """None for a medium that we do not know: the blocks are named but held nowhere."""
    opaque: frozenset[int] = NO_BLOCKS
    """Positions of blocks whose key depends on more than text (LoRA, images, odd token IDs)."""
    group_idx: int | None = None
    names_kind: bool = False
    """Whether the event said which kind of attention its group serves."""

    @property
    def tokenless(self) -> bool:
        return not self.tokens

    @property
    def cost(self) -> int:
        return 200 + len(self.tokens) + 64 * len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left one tier; a copy in the other tier stays."""

    block_hashes: tuple[BlockHash, ...]
    tier: Tier
    group_idx: int | None = None

    @property
    def cost(self) -> int:
        return 120 + 64 * len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Both tiers of the stream are empty."""

    cost = 64


@dataclass(frozen=True, slots=True)
class SkippedKind:
    """Blocks of a layer group that make no reusable prefix (sliding window, mamba, ...)."""

    kind: str
    group_idx: int | None
    cost = 120


Event = BlockStored | BlockRemoved | AllBlocksCleared | SkippedKind


@dataclass(frozen=True, slots=True)
class Skipped:
    """What this version does not know, or does not index, and so left out."""

    kind: str
    """`unknown_event`, `unknown_medium` or `skipped_kind`."""
    sentence: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """One live message, or one part of a snapshot reply."""

    timestamp: float
    """Seconds since the epoch, by the engine's clock."""
    events: tuple[Event, ...]
    warnings: tuple[Skipped, ...] = ()

    @property
    def clears(self) -> bool:
        """Whether the batch defines the whole state anew (from its last AllBlocksCleared on)."""
        return any(isinstance(event, AllBlocksCleared) for event in self.events)

    @property
    def cost(self) -> int:
        """Bytes that the decoded records take, roughly; counted against the buffer budget."""
        return 200 + sum(event.cost for event in self.events)

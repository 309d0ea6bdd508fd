"""One stream's blocks: which block hash means which content, and which tier holds it.

A view turns events into Deltas for the table and knows nothing of it, of other streams, of time or
of threads. Every block hash that the engine named is in exactly one of three places:

* *resident*: `device` and/or `host` map it to its content key;
* *retained*: it left both tiers, but its content is still known, since engines announce a Host copy
  after the Device block is gone, and children after their parent left;
* *stray*: its content key is not known. An *orphan*'s parent was never announced; it keeps its tokens
  and joins as soon as the parent is. An *opaque* block's content is more than text (LoRA, images); it
  and its descendants never match. Both are remembered so that their copies, removals and children are
  understood, but hold nothing for queries.

Two dicts by tier instead of one of records: a block in one tier costs one dict entry and no object
of its own (172 bytes with its table entry, where a record would add 56).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streams.core.content_key import ROOT, ContentKey, digest, to_key, to_prefix
from streams.core.errors import IndexOverflowError, UnknownBlockError
from streams.core.events import (
    TOKEN_BYTES,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    SkippedKind,
    Tier,
)
from streams.core.table import Delta

OnUnknown = Callable[[BlockHash], bool]
"""Asked about a hash that was never announced: True makes an orphan of what needs it, False raises
UnknownBlockError."""

_MAX_GROUPS = 1024
_TRANSIENT_BLOCKS = 65_536


def as_orphan(block_hash: BlockHash) -> bool:
    """The OnUnknown of a snapshot: what is not understood is remembered and in nobody's way."""
    return True


@dataclass(slots=True)
class Stray:
    """A block whose content key is not known."""

    parent: BlockHash | None
    tokens: bytes
    """Packed tokens; empty when they are not known or do not matter."""
    opaque: bool
    tiers: int = 0
    """Bit `1 << Tier` for each tier that holds it."""


class View:
    """The blocks of one stream. See the module's text."""

    __slots__ = (
        "_both",
        "_delta",
        "_waiting",
        "block_size",
        "device",
        "hash_seed",
        "host",
        "ignored_removals",
        "max_blocks",
        "plain_groups",
        "retained",
        "skipped_groups",
        "strays",
    )

    def __init__(self, block_size: int, hash_seed: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.hash_seed = hash_seed
        self.max_blocks = max_blocks
        self.device: dict[BlockHash, ContentKey] = {}
        self.host: dict[BlockHash, ContentKey] = {}
        self.strays: dict[BlockHash, Stray] = {}
        """Strays that some tier holds."""
        self.retained: OrderedDict[BlockHash, ContentKey | Stray] = OrderedDict()
        """Blocks in no tier, oldest first."""
        self.ignored_removals = 0
        """How many removals named a hash that is not known."""
        self._waiting: dict[BlockHash, dict[BlockHash, None]] = {}
        """Parent → its orphans, in order of arrival."""
        self._both = 0
        self._delta = Delta()
        self.plain_groups: set[int] = set()
        self.skipped_groups: set[int] = set()

    @property
    def mapped_blocks(self) -> int:
        """Entries of the block-hash map: resident, retained and stray."""
        return len(self.device) + len(self.host) - self._both + len(self.strays) + len(self.retained)

    def key_of(self, block_hash: BlockHash) -> ContentKey | None:
        """The content key of a known block; None for a stray or unknown one."""
        key = self.device.get(block_hash)
        if key is None:
            key = self.host.get(block_hash)
        if key is None:
            retained = self.retained.get(block_hash)
            return None if isinstance(retained, Stray) else retained
        return key

    def stray_of(self, block_hash: BlockHash) -> Stray | None:
        """The record of a block that is known, but without a content key."""
        stray = self.strays.get(block_hash)
        if stray is None:
            retained = self.retained.get(block_hash)
            return retained if isinstance(retained, Stray) else None
        return stray

    def knows(self, block_hash: BlockHash) -> bool:
        """Whether the engine ever named this block, as far as is remembered."""
        return (
            block_hash in self.device
            or block_hash in self.host
            or block_hash in self.retained
            or block_hash in self.strays
        )

    def apply(self, events: Iterable[Event], on_unknown: OnUnknown) -> None:
        """Apply events in order; `take_delta` then tells what changed. Raises UnknownBlockError.

        After an exception the view must not be served any more, but its delta is still true.
        """
        for event in events:
            if isinstance(event, BlockStored):
                self._check_room(len(event.block_hashes))
                self._store(event, on_unknown)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._clear()
            else:
                self._skip(event)

    def take_delta(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def enforce_bound(self) -> None:
        """Forget the oldest retained blocks above `max_blocks`. Raises IndexOverflowError."""
        excess = self.mapped_blocks - self.max_blocks
        while excess > 0 and self.retained:
            block_hash, kept = self.retained.popitem(last=False)
            if isinstance(kept, Stray):
                self._stop_waiting(block_hash, kept)
            excess -= 1
        if excess > 0:
            raise IndexOverflowError(
                f"the stream holds {self.mapped_blocks} blocks, "
                f"max_blocks_per_stream allows {self.max_blocks}"
            )

    def _check_room(self, more: int) -> None:
        """The bound holds after a whole batch; on the way it may be exceeded, but not without end."""
        most = self.max_blocks + _TRANSIENT_BLOCKS
        if more > most:
            raise IndexOverflowError(
                f"one event stores {more} blocks, max_blocks_per_stream allows {self.max_blocks}"
            )
        if self.mapped_blocks > most:
            self.enforce_bound()

    # Storing.

    def _store(self, event: BlockStored, on_unknown: OnUnknown) -> None:
        self._note_group(event)
        if event.tier is None:
            on_unknown = as_orphan  # Its blocks come from where no snapshot looks, and are held nowhere.
        if event.tokenless:
            for position, block_hash in enumerate(event.block_hashes):
                self._copy(block_hash, event, position in event.opaque, on_unknown)
            return
        width = self.block_size * TOKEN_BYTES
        tokens = event.tokens
        opaque = event.opaque
        parent = event.parent_block_hash
        # What precedes an opaque block does not matter.
        prefix = self._prefix_of(parent, as_orphan if 0 in opaque else on_unknown)
        for position, block_hash in enumerate(event.block_hashes):
            block = tokens[position * width : (position + 1) * width]
            if prefix is None or (opaque and position in opaque):
                prefix = None
                hidden = position in opaque or self._is_opaque(parent)
                self._place_stray(block_hash, Stray(parent, b"" if hidden else block, hidden), event.tier)
            else:
                prefix = digest(prefix, block, self.hash_seed)
                self._place(block_hash, to_key(prefix), event.tier)
            parent = block_hash

    def _prefix_of(self, parent: BlockHash | None, on_unknown: OnUnknown) -> bytes | None:
        """What the first block is chained to; None when that is not known."""
        if parent is None:
            return ROOT
        key = self.key_of(parent)
        if key is not None:
            return to_prefix(key)
        if self.stray_of(parent) is None and not on_unknown(parent):
            raise UnknownBlockError(parent, "the parent block")
        return None

    def _copy(self, block_hash: BlockHash, event: BlockStored, opaque: bool, on_unknown: OnUnknown) -> None:
        """A block without tokens: a copy of one that is known."""
        key = self.key_of(block_hash)
        if key is not None:
            self._place(block_hash, key, event.tier)
            return
        stray = self.stray_of(block_hash)
        if stray is None:
            if not opaque and self._is_skipped(event.group_idx):
                return
            if not opaque and not on_unknown(block_hash):
                raise UnknownBlockError(block_hash, "the block without tokens")
            stray = Stray(None, b"", opaque)
        self._place_stray(block_hash, stray, event.tier)

    def _place(self, block_hash: BlockHash, key: ContentKey, tier: Tier | None) -> None:
        """Map a hash to its content and make it resident; the newer mapping wins."""
        known = self.device.get(block_hash)
        if known is None:
            known = self.host.get(block_hash)
        if known is not None:
            if known != key:
                self._remap(block_hash, key)
        elif block_hash in self.retained or block_hash in self.strays:
            self._revive(block_hash, key)
        if tier is None:
            if known is None and block_hash not in self.device and block_hash not in self.host:
                self.retained[block_hash] = key
        else:
            self._hold(block_hash, key, tier)
        self.adopt(block_hash)

    def _hold(self, block_hash: BlockHash, key: ContentKey, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            here, other, changes = self.device, self.host, self._delta.device
        else:
            here, other, changes = self.host, self.device, self._delta.host
        if block_hash in here:
            return
        here[block_hash] = key
        changes[key] = changes.get(key, 0) + 1
        if block_hash in other:
            self._both += 1

    def _remap(self, block_hash: BlockHash, key: ContentKey) -> None:
        """The same hash now names other content, in every tier that holds it."""
        for held, changes in ((self.device, self._delta.device), (self.host, self._delta.host)):
            old = held.get(block_hash)
            if old is not None:
                held[block_hash] = key
                changes[old] = changes.get(old, 0) - 1
                changes[key] = changes.get(key, 0) + 1

    def _revive(self, block_hash: BlockHash, key: ContentKey) -> None:
        """A hash that was retained or stray gets (or keeps) a content key."""
        stray = self._drop_stray(block_hash)
        self.retained.pop(block_hash, None)
        if stray is not None:
            for tier in Tier:
                if stray.tiers & 1 << tier:
                    self._hold(block_hash, key, tier)

    def adopt(self, block_hash: BlockHash) -> None:
        """A block's content became known: its orphans, and theirs, join the index."""
        if block_hash not in self._waiting:
            return
        ready = [block_hash]
        while ready:
            parent = ready.pop()
            key = self.key_of(parent)
            if key is None:
                continue
            prefix = to_prefix(key)
            for child in tuple(self._waiting.get(parent, ())):
                stray = self._known_stray(child)
                child_key = to_key(digest(prefix, stray.tokens, self.hash_seed))
                if stray.tiers:
                    self._revive(child, child_key)
                else:
                    self._stop_waiting(child, stray)
                    self.retained[child] = child_key
                ready.append(child)

    # Strays.

    def _is_opaque(self, block_hash: BlockHash | None) -> bool:
        stray = None if block_hash is None else self.stray_of(block_hash)
        return stray is not None and stray.opaque

    def _known_stray(self, block_hash: BlockHash) -> Stray:
        """The record of a block that waits for its parent: only strays do."""
        stray = self.stray_of(block_hash)
        if stray is None:
            raise LookupError(f"block {block_hash} waits for a parent but is no stray")
        return stray

    def _place_stray(self, block_hash: BlockHash, stray: Stray, tier: Tier | None) -> None:
        """Remember a block without a content key. A former mapping of its hash is gone."""
        stray.tiers |= self._unmap(block_hash)
        before = self._drop_stray(block_hash)
        if before is not None:
            stray.tiers |= before.tiers
        if tier is not None:
            stray.tiers |= 1 << tier
        self.keep_stray(block_hash, stray)
        if stray.opaque:
            self._taint(block_hash)

    def keep_stray(self, block_hash: BlockHash, stray: Stray) -> None:
        """Put a record where its tiers say, and let it wait for its parent."""
        self.retained.pop(block_hash, None)
        if stray.tiers:
            self.strays[block_hash] = stray
        else:
            self.retained[block_hash] = stray
        if stray.parent is not None and stray.tokens:
            self._waiting.setdefault(stray.parent, {})[block_hash] = None

    def _taint(self, block_hash: BlockHash) -> None:
        """Descendants of an opaque block are opaque."""
        ready = [block_hash]
        while ready:
            for child in tuple(self._waiting.get(ready.pop(), ())):
                stray = self._known_stray(child)
                self._stop_waiting(child, stray)
                stray.opaque, stray.tokens = True, b""
                ready.append(child)

    def _unmap(self, block_hash: BlockHash) -> int:
        """Forget a hash's content key; returns the tiers that held it as bits."""
        tiers = 0
        for tier in Tier:
            if self._release(block_hash, tier) is not None:
                tiers |= 1 << tier
        return tiers

    def _drop_stray(self, block_hash: BlockHash) -> Stray | None:
        """Forget a stray's record and its place; returns it if there was one."""
        stray = self.strays.pop(block_hash, None)
        if stray is None:
            retained = self.retained.get(block_hash)
            if not isinstance(retained, Stray):
                return None
            stray = retained
            del self.retained[block_hash]
        self._stop_waiting(block_hash, stray)
        return stray

    def _stop_waiting(self, block_hash: BlockHash, stray: Stray) -> None:
        if stray.parent is None or stray.parent not in self._waiting:
            return
        siblings = self._waiting[stray.parent]
        siblings.pop(block_hash, None)
        if not siblings:
            del self._waiting[stray.parent]

    # Removing.

    def _remove(self, event: BlockRemoved) -> None:
        if self._is_skipped(event.group_idx):
            return
        for block_hash in event.block_hashes:
            key = self._release(block_hash, event.tier)
            if key is not None:
                if block_hash not in self.device and block_hash not in self.host:
                    self.retained[block_hash] = key
                continue
            stray = self.strays.get(block_hash)
            if stray is not None and stray.tiers:
                stray.tiers &= ~(1 << event.tier)
                if not stray.tiers:
                    self.retained[block_hash] = self.strays.pop(block_hash)
            elif not self.knows(block_hash):
                self.ignored_removals += 1

    def _release(self, block_hash: BlockHash, tier: Tier) -> ContentKey | None:
        """Take a hash out of one tier; returns its content key if it was there."""
        if tier is Tier.DEVICE:
            here, other, changes = self.device, self.host, self._delta.device
        else:
            here, other, changes = self.host, self.device, self._delta.host
        key = here.pop(block_hash, None)
        if key is not None:
            changes[key] = changes.get(key, 0) - 1
            if block_hash in other:
                self._both -= 1
        return key

    def _clear(self) -> None:
        for tier, held in ((Tier.DEVICE, self.device), (Tier.HOST, self.host)):
            for block_hash in tuple(held):
                self._release(block_hash, tier)
        self.retained.clear()
        self.strays.clear()
        self._waiting.clear()

    # Layer groups.

    def _note_group(self, event: BlockStored) -> None:
        if event.group_idx is not None and (event.names_kind or event.tokens):
            if len(self.plain_groups) < _MAX_GROUPS:
                self.plain_groups.add(event.group_idx)

    def _skip(self, event: SkippedKind) -> None:
        if event.group_idx is not None and len(self.skipped_groups) < _MAX_GROUPS:
            self.skipped_groups.add(event.group_idx)

    def _is_skipped(self, group_idx: int | None) -> bool:
        """Whether that layer group has stored nothing but kinds that are skipped."""
        return group_idx in self.skipped_groups and group_idx not in self.plain_groups

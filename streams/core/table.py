"""The one table behind every query: content key → which views hold the block, and in which tier.

Each published or growing view of a stream owns a *slot*, a small number. A key's value is an int
with two bits per slot: bit `slot` for the Device tier, bit `SLOTS + slot` for the Host tier. So a
block that a hundred streams share costs one entry, and one lookup answers for all of them.

Measured choices (benchmarks/memory.py, benchmarks/growth.py):

* 256 dicts by the key's first byte. Growing a dict rehashes it while holding the interpreter lock:
  62 ms at 1.4 million keys in one dict, at most 3 ms in shards.
* Masks are shared objects: a block held by one view stores that slot's own bit, combined masks are
  interned. A fresh mask object for each key would cost half as much memory again.

Writers must hold one lock around `apply` and `clear` (a read-modify-write of a mask from two threads
loses updates). Readers take no lock: a single dict lookup is atomic, and a reader only looks at the
bits of slots that it knows to be in use (see streams.slots).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from streams.core.content_key import ContentKey

SLOTS = 256
"""Twice the largest number of streams: a stream that swaps views holds two for a moment."""

SHARD_SHIFT = 120
_SHARDS = 256
_INTERNED_MASKS = 65_536


@dataclass(slots=True)
class Delta:
    """Net change of one view: per tier, content key → how many more block hashes hold it (or fewer)."""

    device: dict[ContentKey, int] = field(default_factory=dict)
    host: dict[ContentKey, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.device or self.host)


class Table:
    """Content key → mask of (slot, tier). See the module's text for who may call what."""

    __slots__ = ("_bits", "_extra", "_interned", "shards")

    def __init__(self) -> None:
        self.shards: tuple[dict[ContentKey, int], ...] = tuple({} for _ in range(_SHARDS))
        self._bits = tuple((1 << slot, 1 << (SLOTS + slot)) for slot in range(SLOTS))
        self._interned: dict[int, int] = {}
        self._extra: tuple[tuple[dict[ContentKey, int], dict[ContentKey, int]], ...] = tuple(
            ({}, {}) for _ in range(SLOTS)
        )

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def mask(self, key: ContentKey) -> int:
        """The key's mask; 0 when no view holds it."""
        return self.shards[key >> SHARD_SHIFT].get(key, 0)

    def apply(self, slot: int, delta: Delta) -> None:
        """Apply one view's net change. A key that changes in both tiers changes in one step."""
        device_bit, host_bit = self._bits[slot]
        device_extra, host_extra = self._extra[slot]
        shards = self.shards
        host = delta.host
        for key, change in delta.device.items():
            shard = shards[key >> SHARD_SHIFT]
            old = shard.get(key, 0)
            new = _shift(old, device_bit, device_extra, key, change)
            if host and key in host:
                new = _shift(new, host_bit, host_extra, key, host.pop(key))
            if new is not old:
                self._store(shard, key, new)
        for key, change in host.items():
            shard = shards[key >> SHARD_SHIFT]
            old = shard.get(key, 0)
            new = _shift(old, host_bit, host_extra, key, change)
            if new is not old:
                self._store(shard, key, new)

    def clear(self, slot: int, keys: Iterable[ContentKey]) -> None:
        """Take a retired slot off these keys, whatever its counts were."""
        device_bit, host_bit = self._bits[slot]
        both = device_bit | host_bit
        for key in keys:
            shard = self.shards[key >> SHARD_SHIFT]
            old = shard.get(key, 0)
            if old & both:
                self._store(shard, key, old & ~both)

    def forget(self, slot: int) -> None:
        """The last step of retiring a slot: drop what was counted beside its bits."""
        for extra in self._extra[slot]:
            extra.clear()

    def _store(self, shard: dict[ContentKey, int], key: ContentKey, mask: int) -> None:
        if not mask:
            shard.pop(key, None)
            return
        if len(self._interned) > _INTERNED_MASKS:
            self._interned.clear()
        shard[key] = self._interned.setdefault(mask, mask)


def _shift(mask: int, bit: int, extra: dict[ContentKey, int], key: ContentKey, change: int) -> int:
    """The mask after `change` more (or fewer) block hashes of one view hold the key in one tier.

    The bit stands for the first block hash; further ones, which are rare, are counted in `extra`.
    """
    if change == 1 and not mask & bit:
        return mask | bit if mask else bit
    if not change:
        return mask
    count = (1 + extra.pop(key, 0) if mask & bit else 0) + change
    if count > 1:
        extra[key] = count - 1
    if count > 0:
        return mask | bit
    return mask & ~bit

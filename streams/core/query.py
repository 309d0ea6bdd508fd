"""A prompt against the views in service: how many leading blocks does each hold, and in which tier.

The walk goes block by block and carries one int with a bit per slot, *alive*: the views that have
held every block so far. One table lookup and a few operations on 512-bit ints so answer for 128
streams at once. Hits are counted in bit-sliced counters (plane j holds bit j of every slot's count), so
that the cost does not depend on how many views hold a block, nor on how their holdings alternate.
"""

from __future__ import annotations

from collections.abc import Sequence

from streams.core.content_key import ContentKey, prompt_keys
from streams.core.table import SHARD_SHIFT, SLOTS, Table

_LOW = (1 << SLOTS) - 1


class SlotCounters:
    """One counter for each slot; `add` adds the same amount to any set of them in a few operations."""

    __slots__ = ("_planes",)

    def __init__(self) -> None:
        self._planes: list[int] = []

    def add(self, slots: int, amount: int) -> None:
        """Add `amount` to every slot whose bit is set in `slots`."""
        if not slots:
            return
        level = 0
        while amount:
            if amount & 1:
                self._add_at(level, slots)
            amount >>= 1
            level += 1

    def _add_at(self, level: int, carry: int) -> None:
        planes = self._planes
        while carry:
            while level >= len(planes):
                planes.append(0)
            planes[level], carry = planes[level] ^ carry, planes[level] & carry
            level += 1

    def values(self, slots: Sequence[int]) -> list[int]:
        """The counts of these slots, in their order."""
        if not self._planes:
            return [0] * len(slots)
        # Text is the cheapest way to read all bits of an int at once.
        planes = [(1 << level, format(plane, f"0{SLOTS}b")) for level, plane in enumerate(self._planes)]
        return [sum([weight for weight, bits in planes if bits[~slot] == "1"]) for slot in slots]


def match_prefix(
    table: Table, prompt: bytes, block_size: int, hash_seed: int, slots: Sequence[int]
) -> list[tuple[int, int]]:
    """How many leading blocks of a packed prompt each of these slots holds, in their order.

    A pair of block counts for each slot: on Device (whether or not also on Host), on Host alone. Takes
    no lock: every lookup sees some moment of the table, later ones may see a later one.
    """
    device, host_only = SlotCounters(), SlotCounters()
    shards = table.shards
    alive = sum(1 << slot for slot in slots)
    on_device = on_host = 0
    last: int | None = None
    run = 0
    for key in prompt_keys(prompt, block_size, hash_seed):
        mask = shards[key >> SHARD_SHIFT].get(key)
        if mask is last and mask is not None:
            # The very same mask object: every view fares as it did on the block before.
            run += 1
            continue
        device.add(on_device, run)
        host_only.add(on_host, run)
        run = 0
        if mask is None:
            break
        held = mask & _LOW
        alive &= held | mask >> SLOTS
        if not alive:
            break
        on_device = alive & held
        on_host = alive & ~held
        last, run = mask, 1
    device.add(on_device, run)
    host_only.add(on_host, run)
    return list(zip(device.values(slots), host_only.values(slots), strict=True))


def holdings(table: Table, prompt: bytes, block_size: int, hash_seed: int) -> list[tuple[ContentKey, int]]:
    """Every whole block of a packed prompt with its mask, also behind the first one that is missing."""
    return [(key, table.mask(key)) for key in prompt_keys(prompt, block_size, hash_seed)]

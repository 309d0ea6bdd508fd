"""A second cache group beside the full-attention one, as engines of hybrid models have it. Pure.

The sliding-window group stores blocks under the same hashes, keeps the newest ones only, and says so in
events that differ in `group_idx` and `kv_cache_spec_kind` alone; its removals carry only the index. Such
blocks make no reusable prefix: a reader that takes these events for the first group's ends up wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streams.simulator.messages import Event, block_removed

GROUP_IDX = 1
KIND = "sliding_window"


class SlidingWindowGroup:
    """Adds the group's events to those of the full-attention group. Keeps the newest `window` blocks."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._held: dict[int | bytes, None] = {}

    def mirror(self, events: Sequence[Event]) -> list[Event]:
        """The events of one message with those of the group in between."""
        return [each for event in events for each in self._mirrored(event)]

    def snapshot(self, events: Sequence[Event]) -> list[Event]:
        """The events of a snapshot followed by stores for what the group holds."""
        held = [_as_group(event) for event in events if self._held.keys() & set(event["block_hashes"])]
        return [*events, *(event for event in held if event["token_ids"])]

    def _mirrored(self, event: Event) -> Iterator[Event]:
        yield event
        if event["type"] == "AllBlocksCleared":
            self._held.clear()
        elif event["medium"].lower() == "gpu":
            if event["type"] == "BlockStored":
                yield _as_group(event)
                self._held |= dict.fromkeys(event["block_hashes"])
                gone = list(self._held)[: -self._window]
            else:
                gone = [each for each in event["block_hashes"] if each in self._held]
            for each in gone:
                del self._held[each]
            if gone:
                yield block_removed(gone, event["medium"], group_idx=GROUP_IDX)


def _as_group(event: Event) -> Event:
    return event | {"group_idx": GROUP_IDX, "kv_cache_spec_kind": KIND}

"""A naive model of one stream's index, straight from the rules and with nothing clever in it.

It compares token IDs where the index compares hashes of them, keeps one record for each block and
searches all of them for everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from streams.core.errors import IndexOverflowError, UnknownBlockError
from streams.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, SkippedKind

Content = tuple[bytes, ...]
"""The packed tokens of a block and of all blocks before it."""


@dataclass
class Record:
    """All that is known of one block hash."""

    content: Content | None = None
    opaque: bool = False
    parent: int | None = None
    own: bytes = b""
    """The block's own tokens, of an orphan."""
    tiers: set[int] = field(default_factory=set)
    idle_since: int = 0

    @property
    def is_orphan(self) -> bool:
        return self.content is None and not self.opaque


class ReferenceView:
    """The rules of one stream's index, one record a hash."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.width = block_size * 4
        self.max_blocks = max_blocks
        self.records: dict[int, Record] = {}
        self._moments = count(1)
        self._plain: set[int] = set()
        self._skipped: set[int] = set()

    def apply(self, events: Iterable[Event], on_unknown: Callable[[int], bool]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, on_unknown)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.records.clear()
            elif isinstance(event, SkippedKind) and event.group_idx is not None:
                self._skipped.add(event.group_idx)

    def enforce_bound(self) -> None:
        while len(self.records) > self.max_blocks:
            idle = [(record.idle_since, name) for name, record in self.records.items() if not record.tiers]
            if not idle:
                raise IndexOverflowError("too many blocks are held")
            del self.records[min(idle)[1]]

    def held(self, tier: int) -> set[int]:
        """Hashes that count as resident blocks of a tier."""
        return {
            name
            for name, record in self.records.items()
            if tier in record.tiers and record.content is not None
        }

    def contents(self, tier: int) -> set[Content]:
        return {self.records[name].content for name in self.held(tier)}  # type: ignore[misc]

    def all_hits(self, prompts: Iterable[bytes]) -> list[tuple[int, int]]:
        """For each packed prompt: leading blocks on Device, and on Host alone."""
        device, host = self.contents(0), self.contents(1)
        return [self._hits(prompt, device, host) for prompt in prompts]

    def _hits(self, prompt: bytes, device: set[Content], host: set[Content]) -> tuple[int, int]:
        on_device = on_host = 0
        content: Content = ()
        for start in range(0, len(prompt) - self.width + 1, self.width):
            content = (*content, prompt[start : start + self.width])
            if content in device:
                on_device += 1
            elif content in host:
                on_host += 1
            else:
                break
        return on_device, on_host

    def _store(self, event: BlockStored, on_unknown: Callable[[int], bool]) -> None:
        if event.group_idx is not None and (event.names_kind or event.tokens):
            self._plain.add(event.group_idx)
        if not event.tokens:
            for position, name in enumerate(event.block_hashes):
                self._copy(name, event, position in event.opaque, on_unknown)
            return
        parent = event.parent_block_hash
        matters = event.tier is not None and 0 not in event.opaque
        if matters and parent is not None and parent not in self.records and not on_unknown(parent):
            raise UnknownBlockError(parent, "parent")
        before: Content | None = () if parent is None else self._content(parent)
        for position, name in enumerate(event.block_hashes):
            own = event.tokens[position * self.width : (position + 1) * self.width]
            opaque = position in event.opaque or (parent in self.records and self.records[parent].opaque)
            content = None if opaque or before is None else (*before, own)
            self._put(name, Record(content, opaque, parent, own), event.tier)
            parent, before = name, content

    def _content(self, name: int) -> Content | None:
        return self.records[name].content if name in self.records else None

    def _copy(self, name: int, event: BlockStored, opaque: bool, on_unknown: Callable[[int], bool]) -> None:
        known = self.records.get(name)
        if known is None:
            if not opaque and self._is_skipped(event.group_idx):
                return
            if not opaque and event.tier is not None and not on_unknown(name):
                raise UnknownBlockError(name, "block")
            known = Record(opaque=opaque)
        self._put(name, Record(known.content, known.opaque, known.parent, known.own), event.tier)

    def _put(self, name: int, record: Record, tier: int | None) -> None:
        if name in self.records:
            record.tiers = self.records[name].tiers
        if tier is not None:
            record.tiers.add(tier)
        record.idle_since = next(self._moments)
        self.records[name] = record
        self._join_orphans()

    def _join_orphans(self) -> None:
        """Orphans whose parent's content became known, or opaque, follow it, until none is left."""
        changed = True
        while changed:
            changed = False
            for record in self.records.values():
                if not record.is_orphan or not record.own or record.parent not in self.records:
                    continue
                parent = self.records[record.parent]
                if parent.opaque:
                    record.opaque = changed = True
                elif parent.content is not None:
                    record.content = (*parent.content, record.own)
                    changed = True

    def _remove(self, event: BlockRemoved) -> None:
        if self._is_skipped(event.group_idx):
            return
        for name in event.block_hashes:
            record = self.records.get(name)
            if record is not None and event.tier in record.tiers:
                record.tiers.remove(event.tier)
                record.idle_since = next(self._moments)

    def _is_skipped(self, group: int | None) -> bool:
        return group in self._skipped and group not in self._plain

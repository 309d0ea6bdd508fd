"""What passes from a view to the one that takes its place within one life of an engine.

The new view takes over what the old one knew of blocks, but not that they are held: an engine
announces copies and children of blocks that no snapshot lists. On the way the two are compared: what
the old view claimed and the snapshot does not, and the reverse, is *drift*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streams.core.content_key import ContentKey
from streams.core.events import BlockHash
from streams.core.view import Stray, View

PIECE = 1024
"""Block hashes looked at between two pauses."""


@dataclass(slots=True)
class Drift:
    """Blocks (per tier) on which two views of the same stream differ."""

    absent: int = 0
    """Claimed by the old view, absent from the new one."""
    unclaimed: int = 0
    """Held by the new view, not claimed by the old one."""


def hand_over(old: View, new: View, drift: Drift) -> Iterator[None]:
    """Let `new` inherit from `old`, piece by piece, and count the drift between them.

    Both views may change between pieces as long as both get the same events. Raises IndexOverflowError.
    """
    new.plain_groups |= old.plain_groups
    new.skipped_groups |= old.skipped_groups
    inherited: OrderedDict[BlockHash, ContentKey | Stray] = OrderedDict()
    for source in (old.retained, old.device, old.host, old.strays):
        for piece in _pieces(source):
            for block_hash in piece:
                _inherit(block_hash, old, new, inherited)
            yield
    yield from _retain(new, inherited)
    new.enforce_bound()
    for old_tier, new_tier in ((old.device, new.device), (old.host, new.host)):
        for piece in _pieces(old_tier):
            drift.absent += sum(h in old_tier and h not in new_tier for h in piece)
            yield
        for piece in _pieces(new_tier):
            drift.unclaimed += sum(h in new_tier and h not in old_tier for h in piece)
            yield


def _pieces(hashes: Iterable[BlockHash]) -> Iterator[tuple[BlockHash, ...]]:
    every = tuple(hashes)
    for start in range(0, len(every), PIECE):
        yield every[start : start + PIECE]


def _inherit(
    block_hash: BlockHash, old: View, new: View, inherited: OrderedDict[BlockHash, ContentKey | Stray]
) -> None:
    if new.knows(block_hash):
        return
    key = old.key_of(block_hash)
    if key is not None:
        inherited[block_hash] = key
        return
    stray = old.stray_of(block_hash)
    if stray is not None:
        inherited[block_hash] = Stray(stray.parent, stray.tokens, stray.opaque)


def _retain(new: View, inherited: OrderedDict[BlockHash, ContentKey | Stray]) -> Iterator[None]:
    """Put what was inherited before, and so in front of, what the new view has retained itself."""
    own = tuple(new.retained)
    for piece in _pieces(inherited):
        for block_hash in piece:
            known = inherited[block_hash]
            if new.knows(block_hash):
                continue
            if isinstance(known, Stray):
                new.keep_stray(block_hash, known)
                parent = known.parent if known.tokens else None
            else:
                new.retained[block_hash] = known
                parent = block_hash
            if parent is not None:
                # A snapshot lists blocks whose parent has left; with the parent known they are no orphans.
                new.adopt(parent)
        yield
    for block_hash in own:
        if block_hash in new.retained:
            new.retained.move_to_end(block_hash)

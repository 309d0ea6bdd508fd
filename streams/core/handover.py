"""What passes from a view to the one that takes its place within one life of an engine.

The new view takes over what the old one knew of blocks, but not that they are held: an engine
announces copies and children of blocks that no snapshot lists. Later the two are compared: what the old
view claimed and the snapshot does not, and the reverse, is *drift*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


def inherit(old: View, new: View) -> Iterator[None]:
    """Let `new`, fresh from a snapshot, take over what `old` knew, piece by piece. Raises IndexOverflowError.

    `old` may change between pieces: what it learns meanwhile, `new` will be told as well.
    """
    new.plain_groups |= old.plain_groups
    new.skipped_groups |= old.skipped_groups
    for source in (old.retained, old.device, old.host, old.strays):
        for piece in _pieces(source):
            for block_hash in piece:
                _inherit(block_hash, old, new)
            yield
    new.enforce_bound()


def compare(old: View, new: View, drift: Drift) -> Iterator[None]:
    """Count the drift between two views, piece by piece.

    Both may change between pieces as long as both get the same events.
    """
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


def _inherit(block_hash: BlockHash, old: View, new: View) -> None:
    if new.knows(block_hash):
        return
    key = old.key_of(block_hash)
    if key is not None:
        new.retained[block_hash] = key
        # A snapshot lists blocks whose parent has left; with the parent known they are no orphans.
        new.adopt(block_hash)
        return
    stray = old.stray_of(block_hash)
    if stray is not None:
        new.keep_stray(block_hash, Stray(stray.parent, stray.tokens, stray.opaque))
        if stray.parent is not None and stray.tokens:
            new.adopt(stray.parent)

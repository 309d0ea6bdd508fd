"""The fields of one event → what they mean, or why they do not fit the protocol."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from streams.core.content_key import pack_tokens
from streams.core.errors import DecodeError
from streams.core.events import (
    MAX_TOKEN_ID,
    NO_BLOCKS,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    Skipped,
    SkippedKind,
    Tier,
)
from streams.core.raw_event import RawEvent

_MASK_64 = 2**64 - 1
_TIERS = {"gpu": Tier.DEVICE, "cpu": Tier.HOST}
_REUSABLE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


@dataclass(frozen=True, slots=True)
class Expected:
    """What a stream's batches must agree with."""

    block_size: int
    dp_rank: int = 0


class Warnings:
    """What was skipped in one batch: kind → how often, and the last sentence about it."""

    def __init__(self) -> None:
        self._kinds: dict[str, Skipped] = {}

    def note(self, kind: str, sentence: str) -> None:
        before = self._kinds.get(kind)
        self._kinds[kind] = Skipped(kind, sentence, 1 if before is None else before.count + 1)

    def summary(self) -> tuple[Skipped, ...]:
        return tuple(self._kinds.values())


def interpret(raw: RawEvent, expected: Expected, warnings: Warnings) -> tuple[Event, ...]:
    """The event; nothing for one that this version does not know, or that concerns no tier of ours."""
    if raw.type == "AllBlocksCleared":
        return (AllBlocksCleared(),)
    if raw.type not in ("BlockStored", "BlockRemoved"):
        warnings.note("unknown_event", f"an event of the unknown type {raw.type[:64]!r} was skipped")
        return ()
    if raw.block_hashes is UNSET:
        raise DecodeError(f"{raw.type} has no block_hashes")
    kind = raw.kv_cache_spec_kind
    if kind is not None and kind not in _REUSABLE_KINDS:
        warnings.note("skipped_kind", f"blocks of the kind {kind[:64]!r} make no reusable prefix")
        return (SkippedKind(kind, raw.group_idx if raw.type == "BlockStored" else None),)
    tier = _tier(raw, warnings)
    hashes = tuple([_block_hash(value) for value in raw.block_hashes])
    if raw.type == "BlockRemoved":
        return () if tier is None else (BlockRemoved(hashes, tier, raw.group_idx),)
    return (_stored(raw, hashes, tier, expected),)


def _tier(raw: RawEvent, warnings: Warnings) -> Tier | None:
    if raw.medium is None:
        return Tier.DEVICE
    tier = _TIERS.get(raw.medium.lower())
    if tier is None:
        where = f"the unknown medium {raw.medium[:64]!r}"
        warnings.note("unknown_medium", f"a {raw.type} in {where} is held nowhere")
    return tier


def _block_hash(value: int | bytes) -> BlockHash:
    if isinstance(value, int):
        return BlockHash(value & _MASK_64)
    if not value:
        raise DecodeError("a block hash must not be empty")
    return BlockHash(int.from_bytes(value[-8:], "big"))


def _stored(
    raw: RawEvent, hashes: tuple[BlockHash, ...], tier: Tier | None, expected: Expected
) -> BlockStored:
    if raw.token_ids is UNSET:
        raise DecodeError("BlockStored has no token_ids")
    parent = None
    if raw.parent_block_hash is not UNSET and raw.parent_block_hash is not None:
        parent = _block_hash(raw.parent_block_hash)
    opaque = _context(raw, len(hashes))
    tokens = b""
    if raw.token_ids:
        _check_shape(raw, len(hashes), expected.block_size)
        tokens, odd = _pack(raw.token_ids, expected.block_size)
        opaque |= odd
    return BlockStored(
        hashes, parent, tokens, tier, opaque, raw.group_idx, names_kind=raw.kv_cache_spec_kind is not None
    )


def _check_shape(raw: RawEvent, blocks: int, block_size: int) -> None:
    if raw.parent_block_hash is UNSET:
        raise DecodeError("BlockStored has no parent_block_hash (nil for a first block)")
    if type(raw.block_size) is not int or raw.block_size != block_size:
        raise DecodeError(f"block_size is {raw.block_size!r:.40}, this stream is configured for {block_size}")
    if len(raw.token_ids) != blocks * block_size:  # type: ignore[arg-type]
        raise DecodeError(
            f"token_ids holds {len(raw.token_ids)} tokens, "  # type: ignore[arg-type]
            f"{blocks} blocks of {block_size} need {blocks * block_size}"
        )


def _context(raw: RawEvent, blocks: int) -> frozenset[int]:
    """Positions of the blocks whose content depends on more than their text."""
    if raw.lora_id is not None or raw.lora_name not in (None, ""):
        return frozenset(range(blocks))
    if raw.extra_keys is None:
        return NO_BLOCKS
    if len(raw.extra_keys) != blocks:
        return frozenset(range(blocks))
    return frozenset(position for position, own in enumerate(raw.extra_keys) if own is not None)


def _pack(token_ids: list[int], block_size: int) -> tuple[bytes, frozenset[int]]:
    """Packed tokens, and the positions of blocks with a token ID outside 0 ... 2**31-1."""
    try:
        tokens = pack_tokens(token_ids)
    except OverflowError:
        odd_id = MAX_TOKEN_ID + 1
        tokens = pack_tokens([token if 0 <= token <= MAX_TOKEN_ID else odd_id for token in token_ids])
    ids = np.frombuffer(tokens, "<u4")
    if ids.max() <= MAX_TOKEN_ID:
        return tokens, NO_BLOCKS
    odd = (ids.reshape(-1, block_size) > MAX_TOKEN_ID).any(axis=1)
    return tokens, frozenset(np.flatnonzero(odd).tolist())

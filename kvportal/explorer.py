"""What the prefix explorer shows of one prompt: block by block per stream, and what routing makes of it.

The numbers are those that the query endpoint answers; the blocks come from the same index.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from streams.index import BlockHoldings
from streams.status import Match

TOKEN_BYTES = 4

Json = dict[str, Any]


def explored(prompt: bytes, matches: Sequence[Match], holdings: Sequence[BlockHoldings]) -> Json:
    """Every stream's share of a prompt, in (instance, rank) order. Runs are `[tier, blocks]` pairs: `D`
    on the device, `H` on the host alone, `B` on both, `-` on neither."""
    tiers = {held.spec.id: held.tiers for held in holdings}
    return {
        "tokens": len(prompt) // TOKEN_BYTES,
        "streams": [_stream(match, tiers.get(match.spec.id, "")) for match in matches],
    }


def _stream(match: Match, tiers: str) -> Json:
    return {
        "instance": match.spec.instance_name,
        "rank": match.spec.dp_rank,
        "block_size": match.spec.block_size,
        "synchronized": match.synchronized,
        "error": None if match.error is None else str(match.error),
        "device_hit_tokens": match.device_hit_tokens,
        "host_only_hit_tokens": match.host_only_hit_tokens,
        "reusable_prefix_tokens": match.reusable_prefix_tokens,
        "runs": [[tier, len(list(run))] for tier, run in groupby(tiers)],
    }

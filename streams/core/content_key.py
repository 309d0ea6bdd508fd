"""Content keys: our name of a block, derived from its whole prefix.

`key_i = XXH3_128(key_{i-1} || tokens_i, seed)` with the empty string before the first block, tokens
as little-endian unsigned 32-bit and the key in its canonical 16-byte digest form. In memory a key
is the same 128 bits as an int (big-endian), which costs 48 bytes where bytes would cost 56.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import NewType

from xxhash import xxh3_128_digest

from streams.core.events import TOKEN_BYTES

ContentKey = NewType("ContentKey", int)

ROOT = b""
"""The prefix of a prompt's first block."""

KEY_BYTES = 16


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token IDs (0 ... 2**32-1) as little-endian unsigned 32-bit; OverflowError or TypeError otherwise."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def digest(prefix: bytes, block: bytes, seed: int) -> bytes:
    """The key of the block that continues `prefix` (ROOT, or the key before it), as 16 bytes."""
    return xxh3_128_digest(prefix + block, seed)


def to_key(key_digest: bytes) -> ContentKey:
    return ContentKey(int.from_bytes(key_digest, "big"))


def to_prefix(key: ContentKey) -> bytes:
    """The bytes that the next block's key is chained to."""
    return key.to_bytes(KEY_BYTES, "big")


def prompt_keys(prompt: bytes, block_size: int, seed: int) -> Iterator[ContentKey]:
    """Keys of the whole blocks of a packed prompt, in order, computed as they are asked for."""
    width = block_size * TOKEN_BYTES
    prefix = ROOT
    for start in range(0, len(prompt) - width + 1, width):
        prefix = xxh3_128_digest(prefix + prompt[start : start + width], seed)
        yield ContentKey(int.from_bytes(prefix, "big"))

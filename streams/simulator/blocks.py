"""The blocks of a simulated KV cache as a prefix tree.

A block is named by its place: the blocks before it, its own token IDs, and its context (LoRA adapter,
image). Its hash is a keyed BLAKE2 chain over the same, as engines chain theirs; a restarted engine uses
another key, so its hashes have nothing to do with the old ones.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Label = tuple[str | None, str | None]
"""Context of one block: name of the LoRA adapter and of an image, if any."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token IDs of one request and what else goes into its block hashes."""

    token_ids: Sequence[int]
    lora: str | None = None
    images: Mapping[int, str] = field(default_factory=dict)
    """Block index → name of the image inside that block."""

    def upto(self, tokens: int) -> Prompt:
        """The same request, cut after `tokens` tokens."""
        return Prompt(self.token_ids[:tokens], self.lora, self.images)


class Block:
    """A node of the prefix tree. Compared by identity; which tier holds it is the cache's business.

    The root, made without a parent, is its own parent.
    """

    __slots__ = ("block_hash", "children", "label", "opaque", "parent", "tokens")

    def __init__(self, parent: Block | None, tokens: tuple[int, ...], label: Label, block_hash: int) -> None:
        self.parent: Block = parent or self
        self.tokens = tokens
        self.label = label
        self.block_hash = block_hash
        self.children: dict[tuple[tuple[int, ...], Label], Block] = {}
        self.opaque: bool = label != (None, None) or (parent is not None and parent.opaque)

    @property
    def is_root(self) -> bool:
        return self.parent is self


class PrefixTree:
    """All blocks that are remembered. The root is no block: it has no tokens and no hash."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self.block_size = block_size
        self._key = key
        self.root = Block(None, (), (None, None), 0)

    def path(self, prompt: Prompt, limit: int) -> list[Block]:
        """The blocks of the prompt's whole blocks in order, at most `limit`; missing ones are made."""
        size = self.block_size
        path: list[Block] = []
        block = self.root
        for index in range(min(len(prompt.token_ids) // size, limit)):
            tokens = tuple(prompt.token_ids[index * size : (index + 1) * size])
            label = (prompt.lora, prompt.images.get(index))
            block = block.children.get((tokens, label)) or self._grow(block, tokens, label)
            path.append(block)
        return path

    def forget(self, block: Block, kept: Container[Block]) -> None:
        """Drop the block, then its ancestors, as long as they are not `kept` and nothing hangs on them."""
        while not block.is_root and not block.children and block not in kept:
            block.parent.children.pop((block.tokens, block.label), None)
            block = block.parent

    def walk(self) -> Iterator[Block]:
        """Every block, parents before their children."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            block = stack.pop()
            yield block
            stack.extend(reversed(block.children.values()))

    def _grow(self, parent: Block, tokens: tuple[int, ...], label: Label) -> Block:
        material = b"%016x" % parent.block_hash + array.array("q", tokens).tobytes() + repr(label).encode()
        digest = hashlib.blake2b(material, digest_size=8, key=self._key).digest()
        block = Block(parent, tokens, label, int.from_bytes(digest, "big"))
        parent.children[tokens, label] = block
        return block

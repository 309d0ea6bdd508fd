"""The KV cache of one simulated rank: what it holds, and the events it publishes about that.

Pure: no clock, no thread, no socket; randomness comes from a seed. Every call that changes something
returns the events of exactly one message, so that the state after the call is what a reader must arrive at
after that message.

The device is an LRU of blocks. A request touches its blocks from the last to the first, so the least
recently used block is a leaf and prefixes shrink from their ends, as in real block managers; with
`orphan_probability` an inner block goes instead and leaves its children behind. Behind the device may stand
a host tier: an evicted block is copied there and the copy is announced without tokens, at once or
`offload_delay` messages later. In between it is in no tier and in no snapshot.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from streams.simulator.blocks import Block, PrefixTree, Prompt
from streams.simulator.hybrid import SlidingWindowGroup
from streams.simulator.messages import (
    Event,
    HashForm,
    all_blocks_cleared,
    block_removed,
    block_stored,
    hash_on_wire,
    host_copy,
)
from streams.simulator.truth import Held, Step, Truth


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size and habits of one rank's cache."""

    block_size: int = 16
    """Tokens per block."""
    device_blocks: int = 256
    """Capacity of the device tier, in blocks."""
    host_blocks: int = 0
    """Capacity of the host tier, in blocks; 0: there is none."""
    offload_delay: int = 0
    """Messages between removed(gpu) and the host copy; 0: the copy comes first, in the same message."""
    orphan_probability: float = 0.0
    """Chance that an eviction takes an inner block and leaves its children without parent."""
    blocks_per_event: int = 16
    """Most blocks in one `BlockStored`; the real number varies up to it."""
    hash_form: HashForm = "unsigned"
    vllm_fields: bool = False
    """Write the further fields that vLLM writes, and media in upper case."""
    sliding_window: int = 0
    """Blocks in a second, sliding-window group (needs `vllm_fields`); 0: there is none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("device_blocks", 1),
            ("host_blocks", 0),
            ("offload_delay", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} or more")
        if self.blocks_per_event < 1:
            raise ValueError(f"blocks_per_event is {self.blocks_per_event}; allowed: 1 or more")
        if self.sliding_window < 0 or (self.sliding_window and not self.vllm_fields):
            raise ValueError(f"sliding_window is {self.sliding_window}; allowed: 0, more with vllm_fields")
        if not 0.0 <= self.orphan_probability <= 1.0:
            raise ValueError(f"orphan_probability is {self.orphan_probability}; allowed: 0 … 1")


class EngineCache:
    """See the module. One owner at a time: not thread-safe."""

    def __init__(self, config: CacheConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or CacheConfig()
        self._rng = random.Random(seed)
        self._tree = PrefixTree(self.config.block_size, b"engine-%d" % seed)
        self._device: OrderedDict[Block, None] = OrderedDict()
        self._host: OrderedDict[Block, None] = OrderedDict()
        self._pending: dict[Block, int] = {}
        """Evicted blocks whose host copy is still to be announced → the message that announces it."""
        self._window = SlidingWindowGroup(self.config.sliding_window) if self.config.sliding_window else None
        self._message = 0
        self._leaving: list[Block] = []

    # -- one message each -----------------------------------------------------------------------------

    def store(self, prompt: Prompt | Sequence[int]) -> list[Event]:
        """Run a request: hold all its whole blocks on the device (at most as many as fit).

        Returns the events; an empty list means that nothing changed and no message is due.
        """
        if not isinstance(prompt, Prompt):
            prompt = Prompt(prompt)
        events = self._announce_due()
        path = self._tree.path(prompt, self.config.device_blocks)
        held = next((i for i, block in enumerate(path) if block not in self._device), len(path))
        self._touch(path[:held])
        # The engine computes everything behind the first miss again, blocks that survived there included.
        events += self._make_room(path)
        self._touch(path)
        events += self._stores(path[held:])
        return self._finish(events)

    def idle(self) -> list[Event]:
        """A message without a request: announces what is due. Time passes only if there was something."""
        return self._finish(self._announce_due())

    def clear(self) -> list[Event]:
        """Forget everything: `AllBlocksCleared`."""
        self._device.clear()
        self._host.clear()
        self._pending.clear()
        self._tree.root.children.clear()
        return self._finish([all_blocks_cleared()])

    # -- the whole state ------------------------------------------------------------------------------

    def snapshot(self) -> list[Event]:
        """The state as events for an empty view: parents first, orphans under their parent's hash.

        Device blocks and blocks that are only on the host come with tokens, host copies of device blocks
        without. Blocks whose host copy is still to be announced are left out.
        """
        events: list[Event] = []
        run: list[Block] = []
        for block in self._tree.walk():
            if run and not self._continues(run, block):
                events += self._store_run(run)
                run = []
            if block in self._device or block in self._host:
                run.append(block)
        events += self._store_run(run)
        events += self._host_copies(block for block in self._device if block in self._host)
        return self._window.snapshot(events) if self._window else events

    def truth(self) -> Truth:
        """An immutable copy for comparisons."""
        numbers: dict[Block, int] = {self._tree.root: 0}
        blocks: dict[Step, Held] = {}
        opaque = 0
        for block in self._tree.walk():
            device, host = block in self._device, block in self._host
            if block.opaque:
                opaque += device + host
                continue
            numbers[block] = len(numbers)
            blocks[numbers[block.parent], block.tokens] = Held(numbers[block], device, host)
        return Truth(self.config.block_size, blocks, opaque)

    @property
    def device_usage(self) -> float:
        """Filled share of the device tier, 0 … 1."""
        return len(self._device) / self.config.device_blocks

    @property
    def device_blocks(self) -> int:
        """Blocks on the device, those of any context."""
        return len(self._device)

    @property
    def host_blocks(self) -> int:
        """Blocks on the host, those of any context."""
        return len(self._host)

    @property
    def pending_copies(self) -> int:
        """Blocks between removed(gpu) and their announced host copy."""
        return len(self._pending)

    # -- moving blocks --------------------------------------------------------------------------------

    def _touch(self, path: Sequence[Block]) -> None:
        for block in reversed(path):
            self._device[block] = None
            self._device.move_to_end(block)

    def _make_room(self, path: Sequence[Block]) -> list[Event]:
        wanted = sum(block not in self._device for block in path)
        excess = len(self._device) + wanted - self.config.device_blocks
        if excess <= 0:
            return []
        pinned = set(path)
        victims = [self._evict(pinned) for _ in range(excess)]
        self._leaving += victims
        removed = self._removals(victims, "gpu")
        if not self.config.host_blocks:
            return removed
        if not self.config.offload_delay:
            return self._copy_to_host(victims) + removed
        for block in victims:
            if block not in self._host:
                self._pending.setdefault(block, self._message + self.config.offload_delay)
        return removed

    def _evict(self, pinned: set[Block]) -> Block:
        victim = next(block for block in self._device if block not in pinned)
        while self._rng.random() < self.config.orphan_probability:
            parent = victim.parent
            if parent not in self._device or parent in pinned:
                break
            victim = parent
        del self._device[victim]
        return victim

    def _copy_to_host(self, blocks: Sequence[Block]) -> list[Event]:
        for block in blocks:
            if block in self._host:
                self._host.move_to_end(block)
        # When more comes than fits at all, only the newest copies are made.
        new = [block for block in blocks if block not in self._host][-self.config.host_blocks :]
        excess = max(0, len(self._host) + len(new) - self.config.host_blocks)
        victims = list(islice(self._host, excess))
        for block in victims:
            del self._host[block]
        for block in new:
            self._host[block] = None
        self._leaving += [*victims, *blocks]
        return self._removals(victims, "cpu") + self._host_copies(new)

    def _announce_due(self) -> list[Event]:
        due = [block for block, message in self._pending.items() if message <= self._message]
        for block in due:
            del self._pending[block]
        return self._copy_to_host(due) if due else []

    def _finish(self, events: list[Event]) -> list[Event]:
        resident = _AnyOf(self._device, self._host, self._pending)
        for block in self._leaving:
            self._tree.forget(block, resident)
        self._leaving.clear()
        self._message += bool(events)
        return self._window.mirror(events) if self._window else events

    # -- writing events -------------------------------------------------------------------------------

    def _stores(self, path: Sequence[Block]) -> list[Event]:
        events: list[Event] = []
        start = 0
        while start < len(path):
            stop = start + self._rng.randint(1, self.config.blocks_per_event)
            events.append(self._stored(path[start:stop], "gpu"))
            start = stop
        return events

    def _continues(self, run: Sequence[Block], block: Block) -> bool:
        return (
            block.parent is run[-1]
            and len(run) < self.config.blocks_per_event
            and block.label[0] == run[-1].label[0]
            and (block in self._device) == (run[-1] in self._device)
        )

    def _store_run(self, run: Sequence[Block]) -> list[Event]:
        return [self._stored(run, "gpu" if run[0] in self._device else "cpu")] if run else []

    def _stored(self, run: Sequence[Block], medium: str) -> Event:
        parent = run[0].parent
        return block_stored(
            self._hashes(run),
            None if parent.is_root else self._hash(parent),
            [token for block in run for token in block.tokens],
            self.config.block_size,
            self._medium(medium),
            **self._context_fields(run),
        )

    def _context_fields(self, run: Sequence[Block]) -> dict[str, Any]:
        lora = run[0].label[0]
        fields: dict[str, Any] = {}
        if lora is not None or self.config.vllm_fields:
            fields |= {"lora_id": None if lora is None else _lora_id(lora), "lora_name": lora}
        if any(block.label[1] for block in run):
            fields["extra_keys"] = [[[block.label[1], 0]] if block.label[1] else None for block in run]
        if self.config.vllm_fields:
            fields |= {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        return fields

    def _removals(self, blocks: Sequence[Block], medium: str) -> list[Event]:
        if not blocks:
            return []
        fields = {"group_idx": 0} if self.config.vllm_fields else {}
        return [block_removed(self._hashes(blocks), self._medium(medium), **fields)]

    def _host_copies(self, blocks: Iterable[Block]) -> list[Event]:
        copies = list(blocks)
        size = self.config.blocks_per_event
        return [
            host_copy(self._hashes(copies[start : start + size]), self._medium("cpu"))
            for start in range(0, len(copies), size)
        ]

    def _hashes(self, blocks: Iterable[Block]) -> list[int | bytes]:
        return [self._hash(block) for block in blocks]

    def _hash(self, block: Block) -> int | bytes:
        return hash_on_wire(block.block_hash, self.config.hash_form)

    def _medium(self, medium: str) -> str:
        return medium.upper() if self.config.vllm_fields else medium


class _AnyOf:
    """Membership in any of several containers."""

    def __init__(self, *containers: Any) -> None:
        self._contains: list[Callable[[object], bool]] = [each.__contains__ for each in containers]

    def __contains__(self, item: object) -> bool:
        return any(contains(item) for contains in self._contains)


def _lora_id(name: str) -> int:
    return sum(name.encode()) % 1000 + 1

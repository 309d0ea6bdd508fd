"""A naive engine: what its blocks are, and what it held after each message of its life."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from streams.simulator.messages import Event, all_blocks_cleared, block_removed, block_stored, host_copy
from tests.streams.harness import SIZE

HASHES: tuple[int | bytes, ...] = (0, -1, 2**63, 2**64 - 2, 4, b"\x05", b"\x06" * 32, 7, 8, 9, 10, 11)
BLOCKS = range(len(HASHES))
Path = tuple[int, ...]
"""A block's content: one token for it and for each block before it, which is repeated SIZE times."""


@dataclass(frozen=True)
class Held:
    """Numbers of the blocks in each tier."""

    device: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()

    @property
    def blocks(self) -> frozenset[int]:
        return self.device | self.host


@dataclass
class EngineLife:
    """One life of an engine. Its blocks are numbered and form a forest; several may have the same content."""

    rng: random.Random
    room: int
    """How many blocks it can hold."""
    offloads: bool
    """Whether a block may be in no tier on its way from Device to Host."""
    history: list[Held] = field(default_factory=lambda: [Held()])
    """What was held before the first message, and after each."""

    def __post_init__(self) -> None:
        choice = self.rng.choice
        self.parents = [choice((None, *range(number))) if number else None for number in BLOCKS]
        self.tokens = [self.rng.randint(1, 2) for _ in BLOCKS]
        self.prompts = sorted({self.path(number) for number in BLOCKS})
        self._announced: set[int] = set()
        self._leaving: list[int] = []

    def path(self, number: int) -> Path:
        parent = self.parents[number]
        return (*(() if parent is None else self.path(parent)), self.tokens[number])

    @property
    def last(self) -> int:
        """Sequence of the last message; -1 before the first."""
        return len(self.history) - 2

    def after(self, sequence: int) -> Held:
        return self.history[sequence + 1]

    def most(self, held: Held) -> tuple[set[Path], set[Path]]:
        """Contents on Device and on Host."""
        return {self.path(each) for each in held.device}, {self.path(each) for each in held.host}

    def least(self, held: Held) -> tuple[set[Path], set[Path]]:
        """The same of those blocks alone whose parents are all held: what a snapshot alone says."""
        rooted: set[int] = set()
        for number in sorted(held.blocks):
            parent = self.parents[number]
            if parent is None or parent in rooted:
                rooted.add(number)
        return self.most(Held(held.device & rooted, held.host & rooted))

    def snapshot(self) -> list[Event]:
        """What is held now, parents first."""
        events = []
        held = self.history[-1]
        for number in sorted(held.blocks):
            events.append(self._store(number, "gpu" if number in held.device else "cpu"))
            if number in held.device & held.host:
                events.append(host_copy([HASHES[number]]))
        return events

    def message(self) -> list[Event]:
        """The next message: a few things that happen to blocks."""
        held = self.history[-1]
        device, host = set(held.device), set(held.host)
        events = [self._change(device, host) for _ in range(self.rng.randint(1, 3))]
        self.history.append(Held(frozenset(device), frozenset(host)))
        return events

    def _change(self, device: set[int], host: set[int]) -> Event:
        rng = self.rng
        number = rng.choice(BLOCKS)
        if rng.random() < 0.02:
            for forgotten in (device, host, self._announced, self._leaving):
                forgotten.clear()
            return all_blocks_cleared()
        if self._leaving and rng.random() < 0.5 and len(device | host) < self.room:
            arriving = self._leaving.pop()
            host.add(arriving)
            return host_copy([HASHES[arriving]])
        if number in device and number not in host and rng.random() < 0.4:
            host.add(number)
            return host_copy([HASHES[number]])
        if number in device or (number in host and rng.random() < 0.5):
            return self._remove(number, device, host)
        return self._add(number, device, host)

    def _remove(self, number: int, device: set[int], host: set[int]) -> Event:
        if number not in device:
            host.remove(number)
            return block_removed([HASHES[number]], "cpu")
        device.remove(number)
        if self.offloads and number not in host:
            self._leaving.append(number)
        return block_removed([HASHES[number], HASHES[number]])

    def _add(self, number: int, device: set[int], host: set[int]) -> Event:
        """Store this block, or the first before it that nobody knows of."""
        while (parent := self.parents[number]) is not None and parent not in self._announced:
            number = parent
        if number not in host and len(device | host) >= self.room:
            return block_removed([HASHES[number]], "cpu")
        device.add(number)
        self._announced.add(number)
        if number in self._leaving:
            self._leaving.remove(number)
        return self._store(number, "gpu")

    def _store(self, number: int, medium: str) -> Event:
        parent = self.parents[number]
        hashed = None if parent is None else HASHES[parent]
        return block_stored([HASHES[number]], hashed, [self.tokens[number]] * SIZE, SIZE, medium)

"""What the simulator's tests put on the other side of the wire: raw sockets and a naive reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from streams.simulator.publisher import Publisher
from tests.support.waiting import wait_until

TIMEOUT_MS = 10_000
END = b"\xff" * 8


class Peer:
    """A subscriber and a requester as the portal has them, without any of its code."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._sub: zmq.Socket[bytes] | None = None

    def subscribe(self, publisher: Publisher, topic: str | None = None, receive_hwm: int = 0) -> None:
        before = publisher.subscribers
        topic = publisher.config.topic if topic is None else topic
        self.connect(publisher.endpoint, topic, receive_hwm)
        publisher.wait_for_subscribers(before + 1)

    def connect(self, endpoint: str, topic: str, receive_hwm: int = 0) -> None:
        self._sub = self._context.socket(zmq.SUB)
        self._sub.rcvtimeo = TIMEOUT_MS
        self._sub.rcvhwm = receive_hwm
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)

    def wait_for_subscription(self, publisher: Publisher) -> None:
        """Wait until the subscription is there again: a socket sends it while it is being polled."""
        wait_until(lambda: self.receive_within(0) or publisher.subscribers)

    def receive(self) -> list[bytes]:
        assert self._sub is not None
        return self._sub.recv_multipart()

    def receive_within(self, timeout_ms: int) -> bool:
        """Whether a message is there, or comes in time."""
        assert self._sub is not None
        return bool(self._sub.poll(timeout_ms))

    def sequences(self, count: int) -> list[int]:
        return [int.from_bytes(self.receive()[1], "big") for _ in range(count)]

    def batches(self, count: int) -> list[list[Any]]:
        return [unpack(self.receive()[2]) for _ in range(count)]

    def request(self, publisher: Publisher, frames: Sequence[bytes] = (b"", bytes(8))) -> zmq.Socket[bytes]:
        return self.request_from(publisher.replay_endpoint, frames)

    def request_from(self, endpoint: str, frames: Sequence[bytes] = (b"", bytes(8))) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.rcvtimeo = TIMEOUT_MS
        dealer.connect(endpoint)
        dealer.send_multipart(frames)
        return dealer

    def snapshot(self, publisher: Publisher) -> list[list[bytes]]:
        """All frame sets up to and with the end marker."""
        return self.snapshot_from(publisher.replay_endpoint)

    def snapshot_from(self, endpoint: str) -> list[list[bytes]]:
        with self.request_from(endpoint) as dealer:
            reply: list[list[bytes]] = []
            while not reply or reply[-1][1] != END:
                reply.append(dealer.recv_multipart())
            return reply


@contextmanager
def peer() -> Iterator[Peer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield Peer(context)
    finally:
        context.destroy(linger=0)


def unpack(payload: bytes) -> Any:
    return msgpack.unpackb(payload, strict_map_key=False)


def normal(block_hash: int | bytes) -> int:
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & (2**64 - 1)


@dataclass
class NaiveReader:
    """Believes what it is told: block hash → what was stored there, and the hashes in each tier."""

    block_size: int
    stored: dict[int, tuple[int | None, tuple[int, ...], bool]] = field(default_factory=dict)
    """Hash → parent hash, token IDs, whether it carries a context of its own."""
    tiers: dict[str, set[int]] = field(default_factory=lambda: {"gpu": set(), "cpu": set()})
    unknown: set[int] = field(default_factory=set)
    """Hashes of tokenless copies that nothing was known of."""

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.stored.clear()
                self.tiers = {"gpu": set(), "cpu": set()}
                continue
            if event.get("group_idx"):
                continue  # the second group of a hybrid model: its blocks are no prefixes
            tier = self.tiers[event["medium"].lower()]
            hashes = [normal(each) for each in event["block_hashes"]]
            if event["type"] == "BlockRemoved":
                tier.difference_update(hashes)
            elif event["token_ids"]:
                self._store(event, hashes)
                tier.update(hashes)
            else:
                assert event["block_size"] == 0
                self.unknown |= {each for each in hashes if each not in self.stored}
                tier.update(hashes)

    def _store(self, event: dict[str, Any], hashes: list[int]) -> None:
        assert event["block_size"] == self.block_size
        assert len(event["token_ids"]) == len(hashes) * self.block_size
        parent = event["parent_block_hash"]
        parent = None if parent is None else normal(parent)
        keys = event.get("extra_keys") or [None] * len(hashes)
        for index, each in enumerate(hashes):
            tokens = event["token_ids"][index * self.block_size : (index + 1) * self.block_size]
            context = event.get("lora_id") is not None or keys[index] is not None
            self.stored[each] = (parent, tuple(tokens), context)
            parent = each

    def prefix(self, block_hash: int) -> tuple[int, ...] | None:
        """All token IDs up to the end of the block; None when opaque or when an ancestor is unknown."""
        parts: list[tuple[int, ...]] = []
        at: int | None = block_hash
        while at is not None:
            if at not in self.stored:
                return None
            at, tokens, context = self.stored[at]
            if context:
                return None
            parts.append(tokens)
        return tuple(token for part in reversed(parts) for token in part)

    def prefixes(self, tier: str) -> set[tuple[int, ...]]:
        found = {self.prefix(each) for each in self.tiers[tier]}
        return {each for each in found if each is not None}

    def hits(self, token_ids: Sequence[int]) -> tuple[int, int]:
        return self.hits_of([token_ids])[0]

    def hits_of(self, prompts: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
        device, host = self.prefixes("gpu"), self.prefixes("cpu")
        answers = []
        for prompt in prompts:
            hits = [0, 0]
            for end in range(self.block_size, len(prompt) + 1, self.block_size):
                start = tuple(prompt[:end])
                if start not in device and start not in host:
                    break
                hits[0 if start in device else 1] += self.block_size
            answers.append((hits[0], hits[1]))
        return answers

"""Publishers in a process of their own, so that they do not share the interpreter lock under test.

`python -m benchmarks.publisher STREAMS BLOCKS RATE` prints one line `endpoint replay_endpoint` for each
stream and then publishes RATE events a second on each (0: none, -1: as fast as it can). All serve the same
snapshot of BLOCKS blocks and send messages of 32 blocks, encoded beforehand where the rate is unbounded.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from streams.spec import StreamSpec

BLOCK_SIZE = 128
PER_EVENT = 32
TOPIC = "bench"
END = [b"", b"\xff" * 8, b""]


def batch(rng: random.Random, events: int) -> bytes:
    return encode([stored(rng) for _ in range(events)], 0.0)


def encode(events: list[dict[str, Any]], timestamp: float) -> bytes:
    return msgpack.packb([timestamp, events, 0])


def stored(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [rng.getrandbits(64) for _ in range(PER_EVENT)],
        "parent_block_hash": None,
        "token_ids": [rng.randrange(150_000) for _ in range(PER_EVENT * BLOCK_SIZE)],
        "block_size": BLOCK_SIZE,
        "medium": "gpu",
    }


class _Stream:
    def __init__(self, context: zmq.Context[Any]) -> None:
        self.live = context.socket(zmq.XPUB)
        self.replay = context.socket(zmq.ROUTER)
        for each in (self.live, self.replay):
            each.setsockopt(zmq.LINGER, 0)
            each.bind("tcp://127.0.0.1:*")
        self.sequence = 0

    def endpoints(self) -> str:
        return f"{self.live.last_endpoint.decode()} {self.replay.last_endpoint.decode()}"

    def publish(self, payload: bytes) -> None:
        self.live.send_multipart([TOPIC.encode(), self.sequence.to_bytes(8, "big"), payload], copy=False)
        self.sequence += 1

    def answer(self, snapshot: bytes) -> None:
        identity = self.replay.recv_multipart()[0]
        watermark = max(0, self.sequence - 1).to_bytes(8, "big")
        self.replay.send_multipart([identity, b"", watermark, snapshot], copy=False)
        self.replay.send_multipart([identity, *END])


def main() -> None:
    streams, blocks, rate = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rng = random.Random(1)
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    every = [_Stream(context) for _ in range(streams)]
    snapshot = batch(rng, blocks // PER_EVENT)
    ready = [batch(rng, 1) for _ in range(64)] if rate < 0 else []
    for stream in every:
        print(stream.endpoints(), flush=True)
    poller = zmq.Poller()
    for stream in every:
        poller.register(stream.replay, zmq.POLLIN)
    by_socket = {stream.replay: stream for stream in every}
    pool = [[stored(rng)] for _ in range(64)] if rate > 0 else []
    due = time.monotonic()
    while os.getppid() != 1:
        wait = 1000 if rate == 0 else max(0, int((due - time.monotonic()) * 1000)) if rate > 0 else 0
        for socket, _ in poller.poll(wait):
            by_socket[socket].answer(snapshot)
        if rate < 0:
            for payload in ready:
                every[0].publish(payload)
        elif rate > 0 and time.monotonic() >= due:
            for stream in every:
                stream.publish(encode(rng.choice(pool), time.time()))
            due += 1.0 / rate


@contextmanager
def publishers(streams: int, blocks: int, rate: float, name: str = "engine") -> Iterator[list[StreamSpec]]:
    """Run publishers in another process; yields the streams to follow."""
    command = [sys.executable, "-m", "benchmarks.publisher", str(streams), str(blocks), str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline().split() for _ in range(streams)]  # type: ignore[union-attr]
            yield [
                StreamSpec(f"{name}-{number:03}", 0, live, replay, BLOCK_SIZE, TOPIC, incarnation="i")
                for number, (live, replay) in enumerate(lines)
            ]
        finally:
            process.kill()


if __name__ == "__main__":
    main()

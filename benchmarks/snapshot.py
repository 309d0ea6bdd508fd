"""P7: one very large snapshot, and how long it keeps a request waiting."""

from __future__ import annotations

from benchmarks.filling import random_tokens
from benchmarks.live import Lags, Probe, running, wait_synchronized
from benchmarks.publisher import publishers
from benchmarks.report import Row
from streams.spec import Limits

BLOCKS = 262_144
LIMITS = Limits(max_blocks_per_stream=300_000, max_message_bytes=400_000_000, replay_timeout_ms=60_000)


def run() -> list[Row]:
    lags = Lags()
    with (
        publishers(1, BLOCKS, 0) as specs,
        running(LIMITS, [], lags) as directory,
        Probe(directory, random_tokens(32)) as probe,
    ):
        directory.set_desired(specs)
        wait_synchronized(directory, 120)
    return [
        Row("P7", f"snapshot of {BLOCKS:,} blocks, request to synchronized", lags.snapshots[0], "s", 5),
        Row("P7", "longest pause of a request meanwhile", max(probe.pauses) * 1000, "ms", 50),
    ]

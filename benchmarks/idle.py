"""P8: what 128 full, idle streams cost while they are calibrated every 30 s."""

from __future__ import annotations

import resource
import time

from benchmarks.live import running, wait_synchronized
from benchmarks.publisher import publishers
from benchmarks.report import Row
from streams.spec import Limits

STREAMS, BLOCKS, SECONDS = 128, 15_000, 62.0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run() -> list[Row]:
    limits = Limits(max_message_bytes=16_000_000, replay_timeout_ms=30_000)
    with publishers(STREAMS, BLOCKS, 0) as specs, running(limits, specs) as directory:
        started = time.monotonic()
        wait_synchronized(directory, 180)
        took = time.monotonic() - started
        time.sleep(2)
        before, begun = _cpu(), time.monotonic()
        time.sleep(SECONDS)
        share = (_cpu() - before) / (time.monotonic() - begun)
        calibrations = sum(s.counters.get("resyncs:calibration", 0) for s in directory.statuses())
    return [
        Row("P8", f"{STREAMS} streams of {BLOCKS:,} blocks, start to synchronized", took, "s"),
        Row(
            "P8", f"the same, idle, {calibrations} calibrations in {SECONDS:.0f} s", share * 100, "% core", 3
        ),
    ]

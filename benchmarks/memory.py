"""P3: resident memory per block and stream, distinct plain blocks on Device."""

from __future__ import annotations

import gc
from pathlib import Path

from benchmarks.filling import BLOCK_SIZE, fill, new_stream, random_tokens
from benchmarks.report import Row
from streams.index import Index

STREAMS, BLOCKS = 8, 262_144
PAGE = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def run() -> list[Row]:
    index = Index()
    tokens = random_tokens(1024)  # Warm up what is allocated once.
    fill(index, new_stream(index, "warm-up"), tokens)
    gc.collect()
    before = resident_bytes()
    for number in range(STREAMS):
        view = new_stream(index, f"engine-{number}")
        for _ in range(BLOCKS // 4096):
            fill(index, view, random_tokens(4096))
    gc.collect()
    per_block = (resident_bytes() - before) / (STREAMS * BLOCKS)
    return [
        Row(
            "P3", f"memory, {STREAMS} x {BLOCKS:,} distinct blocks of {BLOCK_SIZE}", per_block, "B/block", 190
        )
    ]

"""P9: query time against streams, blocks in the index and prompt length."""

from __future__ import annotations

from functools import partial

from benchmarks.filling import BLOCK_BYTES, fill, new_stream, random_tokens
from benchmarks.report import Row, best_ms
from streams.index import Index

BLOCKS = 1000


def _index(streams: int, tokens: bytes, others: int = 0) -> Index:
    index = Index()
    for number in range(streams):
        view = new_stream(index, f"engine-{number}", max_blocks=4_000_000)
        fill(index, view, tokens)
        for _ in range(others // streams // 4096):
            fill(index, view, random_tokens(4096))
    return index


def run() -> list[Row]:
    tokens = random_tokens(BLOCKS)
    rows = []
    for streams in (1, 8, 32, 128):
        index = _index(streams, tokens)
        took = best_ms(partial(index.query, tokens))
        goal = 1.0 if streams == 128 else None
        rows.append(
            Row("P9", f"query of {BLOCKS} blocks, {streams} streams that hold them all", took, "ms", goal)
        )
    for others in (100_000, 1_000_000, 2_000_000):
        index = _index(8, tokens, others)
        took = best_ms(partial(index.query, tokens))
        rows.append(Row("P9", f"the same, 8 streams, {others:,} other blocks in the index", took, "ms"))
    index = _index(8, tokens)
    for blocks in (10, 100, 500, 1000):
        prompt = tokens[: blocks * BLOCK_BYTES]
        took = best_ms(partial(index.query, prompt))
        rows.append(Row("P9", f"query of {blocks} blocks, 8 streams", took, "ms"))
    return rows

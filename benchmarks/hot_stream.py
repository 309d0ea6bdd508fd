"""P10: one engine that publishes as fast as it can, and what queries and another stream notice."""

from __future__ import annotations

import time

from benchmarks.filling import random_tokens
from benchmarks.live import Lags, Probe, running
from benchmarks.publisher import publishers
from benchmarks.report import Row, percentile
from streams.spec import Limits

SECONDS = 10.0


class _OnlyPolite(Lags):
    """Keeps the lags of the stream with true timestamps; the flooding one sends old ones."""

    def observe_lag(self, seconds: float) -> None:
        if seconds < 1000:
            super().observe_lag(seconds)


def run() -> list[Row]:
    lags = _OnlyPolite()
    with (
        publishers(1, 32, -1, "hot") as hot,
        publishers(1, 32, 50, "polite") as polite,
        running(Limits(max_blocks_per_stream=10_000), [*hot, *polite], lags) as directory,
    ):
        time.sleep(1.0)
        lags.lags.clear()
        with Probe(directory, random_tokens(32)) as probe:
            time.sleep(SECONDS)
        throttled = {s.spec.instance_name: s.counters.get("throttled_ms", 0) for s in directory.statuses()}
        messages = {s.spec.instance_name: s.counters["messages"] for s in directory.statuses()}
    return [
        Row("P10", "query p99 beside one flooding engine", percentile(probe.times, 0.99) * 1000, "ms", 3),
        Row("P10", "another stream's lag p99", percentile(lags.lags, 0.99) * 1000, "ms", 20),
        Row("P10", "messages taken from the flooding engine", messages["hot-000"] / SECONDS, "1/s"),
        Row("P10", "time the flooding engine was slowed down", throttled["hot-000"] / 10 / SECONDS, "%"),
    ]

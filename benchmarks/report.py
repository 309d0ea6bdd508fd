"""What a benchmark returns, and how it is printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `limit` is the goal: at most, or at least where `at_least`; None: nothing is asked."""

    name: str
    figure: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        goal = "" if self.limit is None else f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"{self.name:<4} {self.figure:<66} {self.value:>10.3g} {self.unit:<8} {goal:<16} {verdict}"


def print_rows(rows: Iterable[Row]) -> None:
    for row in rows:
        print(row, flush=True)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def best_ms(work: Callable[[], object], rounds: int = 15, calls: int = 20) -> float:
    """Milliseconds of one call, in the quietest of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - started) / calls)
    return best * 1000


def median_ms(work: Callable[[], object], calls: int = 300) -> float:
    """Milliseconds of one call, the median of many."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return percentile(times, 0.5) * 1000

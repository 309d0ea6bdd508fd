"""Compares how many tokens of a prompt an instance should have had cached with how many it had.

The gateway may pass on the `cached_tokens` of an engine's answer. Small errors mean that the
directory can be trusted; a lasting surplus or deficit points at a lost event, another tokenizer or
another block size. An error is predicted minus reported, in tokens: positive means that the
directory promised more than there was.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

REMEMBERED: Final = 120
"""Comparisons kept per instance for a chart."""


@dataclass(frozen=True, slots=True)
class Comparison:
    at: float
    """Wall clock, seconds since the epoch."""
    predicted_tokens: int
    cached_tokens: int

    @property
    def error_tokens(self) -> int:
        return self.predicted_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class InstanceErrors:
    """All comparisons of one instance since it appeared."""

    instance_name: str
    count: int
    error_sum: int
    """Sum of the errors with their signs."""
    absolute_sum: int
    """Sum of the errors without them."""
    recent: tuple[Comparison, ...]
    """The last ones, oldest first."""


@dataclass(slots=True)
class _Tally:
    count: int = 0
    error_sum: int = 0
    absolute_sum: int = 0
    recent: deque[Comparison] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class PredictionErrors:
    """Thread-safe; every call is short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = {}

    def observe(self, instance_name: str, comparison: Comparison) -> None:
        """Count one comparison."""
        error = comparison.error_tokens
        with self._lock:
            tally = self._tallies.setdefault(instance_name, _Tally())
            tally.count += 1
            tally.error_sum += error
            tally.absolute_sum += abs(error)
            tally.recent.append(comparison)

    def retain(self, instance_names: Collection[str]) -> None:
        """Forget every instance but these."""
        with self._lock:
            self._tallies = {name: tally for name, tally in self._tallies.items() if name in instance_names}

    def read(self) -> tuple[InstanceErrors, ...]:
        """Everything, by instance name."""
        with self._lock:
            return tuple(
                InstanceErrors(name, t.count, t.error_sum, t.absolute_sum, tuple(t.recent))
                for name, t in sorted(self._tallies.items())
            )

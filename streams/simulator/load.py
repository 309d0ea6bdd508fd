"""A plausible load for a simulated engine: a queue that wanders around a mean. Pure, seeded."""

from __future__ import annotations

import random
from dataclasses import dataclass

_PULL = 0.2
_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class Load:
    """What a heartbeat reports."""

    waiting_requests_num: int
    gpu_cache_usage_perc: float
    """Filled share of the device tier, 0 … 1."""

    @property
    def recent_max_ttft(self) -> float:
        """Time to first token in ms, growing with the queue."""
        return 45.0 + 30.0 * self.waiting_requests_num

    @property
    def recent_max_tbt(self) -> float:
        """Time between tokens in ms, growing with the filled share."""
        return 18.0 + 12.0 * self.gpu_cache_usage_perc


class LoadModel:
    """`next` is called once per heartbeat. `fixed_waiting` pins the queue for demonstrations."""

    def __init__(self, *, seed: int = 0, mean_waiting: float = 3.0) -> None:
        self._rng = random.Random(seed)
        self._mean = mean_waiting
        self._queue = mean_waiting
        self.fixed_waiting: int | None = None

    def next(self, device_usage: float) -> Load:
        """The load now, given how full the device is."""
        self._queue += _PULL * (self._mean - self._queue) + self._rng.gauss(0.0, _SPREAD)
        waiting = max(0, round(self._queue)) if self.fixed_waiting is None else self.fixed_waiting
        return Load(waiting, round(device_usage, 4))

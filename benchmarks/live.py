"""A running directory under measurement, and what is watched meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from streams.directory import Directory
from streams.spec import Limits, StreamSpec
from streams.status import StreamState

SWITCH_INTERVAL = 0.0005


class Lags:
    """StreamMetrics that keeps every lag and snapshot time."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.snapshots: list[float] = []

    def observe_lag(self, seconds: float) -> None:
        self.lags.append(seconds)

    def observe_snapshot(self, seconds: float) -> None:
        self.snapshots.append(seconds)


class Probe:
    """Asks the same query again and again, as a request thread would."""

    def __init__(self, directory: Directory, prompt: bytes, every: float = 0.002) -> None:
        self.times: list[float] = []
        self.pauses: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(directory, prompt, every))

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, directory: Directory, prompt: bytes, every: float) -> None:
        while not self._stop.is_set():
            started = time.perf_counter()
            directory.query(prompt)
            asked = time.perf_counter()
            time.sleep(every)
            self.times.append(asked - started)
            self.pauses.append(time.perf_counter() - started - every)


@contextmanager
def running(limits: Limits, specs: list[StreamSpec], metrics: Lags | None = None) -> Iterator[Directory]:
    sys.setswitchinterval(SWITCH_INTERVAL)
    directory = Directory(limits, metrics=metrics)
    directory.start()
    try:
        directory.set_desired(specs)
        yield directory
    finally:
        directory.stop()


def wait_synchronized(directory: Directory, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(status.state is not StreamState.SYNCHRONIZED for status in directory.statuses()):
        if time.monotonic() > deadline:
            late = [s for s in directory.statuses() if s.state is not StreamState.SYNCHRONIZED]
            raise TimeoutError(f"{len(late)} streams are not synchronized: {late[0].spec.id} {late[0].error}")
        time.sleep(0.01)

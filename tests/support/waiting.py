"""Waiting for a condition with a deadline, the only way a test waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    timeout: float = 10.0,
    message: str | Callable[[], str] = "the condition did not hold",
    *,
    interval: float = 0.01,
) -> T:
    """Call `predicate` until it returns something true, and return that.

    Fails the test after `timeout` seconds with `message` (called only then, if it can be called: it may
    describe what was seen last). The predicate is tried once more after the deadline, so that a test
    process that was itself starved does not fail for it. An exception of the predicate is not caught.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        result = predicate()
        if result:
            return result
        if late:
            text = message() if callable(message) else message
            raise AssertionError(f"{text} (waited {timeout:g} s)")
        time.sleep(interval)

"""SIGTERM, SIGHUP and Ctrl-C: the first asks for an orderly stop, a second Ctrl-C ends the process at once.

Signal handlers of our own, in place of the servers' and Python's, hold for the whole life of the
process: while it starts, serves and stops. A watchdog bounds the orderly stop, because a thread that
waits for a database or a client would otherwise keep the process for as long as it likes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopRequest:
    """Context manager on the main thread; `seconds` bound the time from the request to the end."""

    def __init__(self, seconds: float) -> None:
        self.requested = False
        self._seconds = seconds
        self._callback: Callable[[], object] | None = None
        self._previous: dict[int, Any] = {}
        self._watchdog: threading.Timer | None = None

    def __enter__(self) -> Self:
        for number in SIGNALS:
            # Who starts a process with nohup wants it to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Handlers and watchdog stay after a request: the interpreter still has to end."""
        if not self.requested:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def on_request(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the stop is asked for, at once if it was already.

        It runs in a signal handler on the main thread: it may only hand the news on.
        """
        self._callback = callback
        if self.requested:
            self._tell()

    def _tell(self) -> None:
        """Once, even if the signal comes while `on_request` is at work."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            # A process manager may repeat its SIGTERM; a person who presses Ctrl-C again means it.
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.requested = True
        self._watchdog = threading.Timer(self._seconds, self._end)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._tell()

    def _end(self) -> None:
        log.warning("the stop took too long and was cut short; still running: %s", lasting_threads())
        end_process()


def lasting_threads() -> str:
    """Names of the threads, beside the one that asks, for which the interpreter would wait at its end."""
    own = threading.current_thread()
    others = (each for each in threading.enumerate() if not each.daemon and each is not own)
    return ", ".join(sorted(each.name for each in others))


def end_process() -> NoReturn:
    """At once, with status 0, whatever still runs; what was said is said."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

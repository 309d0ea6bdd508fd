"""How much of the machine one stream may use. Pure arithmetic; the caller sleeps.

pyzmq gives the interpreter lock back so briefly that a busy stream would starve queries and all other
streams. So a subscriber sleeps for a moment after every half millisecond of work, and one that wants
more than its share of a core is slowed down to it.
"""

from __future__ import annotations

WORK = 0.0005
"""Seconds of work after which others get a chance."""
PAUSE = 0.00005
"""Seconds of sleep that give it."""
SHARE = 0.25
"""The part of one core that a stream may use for live messages, as a moving budget of one second."""
LONGEST = 0.05
"""Seconds; a longer throttling sleep is cut, so that a stop or a resync is noticed."""


class Pacer:
    """Tells after each piece of work how long to sleep."""

    def __init__(self, now: float) -> None:
        self._since_pause = 0.0
        self._used = 0.0
        self._at = now

    def pause(self, worked: float) -> float:
        """Seconds to sleep so that others get their turn, after `worked` seconds inside the gate."""
        self._since_pause += worked
        if self._since_pause < WORK:
            return 0.0
        self._since_pause = 0.0
        return PAUSE

    def throttle(self, worked: float, now: float) -> float:
        """Seconds to sleep for having used more than SHARE; 0 for a stream within its share."""
        self._used = max(0.0, self._used - (now - self._at) * SHARE) + worked
        self._at = now
        excess = self._used - SHARE
        return min(excess / SHARE, LONGEST) if excess > 0 else 0.0

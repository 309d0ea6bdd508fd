"""What a message's sequence number means for one view."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a message relates to what a view already contains."""

    NEXT = "next"
    """The one that continues the view."""
    REPEATED = "repeated"
    """The snapshot's own watermark once more: apply it leniently, it changes nothing or all of itself."""
    CONTAINED = "contained"
    """From before the watermark, still under way when the snapshot was made."""
    GAP = "gap"
    """At least one message between the view and this one is missing."""
    REGRESSED = "regressed"
    """From the past: the engine counts anew."""


@dataclass(slots=True)
class Cursor:
    """Where one view stands in its stream.

    `watermark` is the sequence up to which the snapshot was complete. Engines differ by one in what
    they report: some the last sequence contained, some (like one that has published nothing) the next
    one. So the message equal to the watermark is accepted once more right after the snapshot.
    """

    watermark: int
    stale_until: float
    """Until when (monotonic seconds) messages from before the watermark are merely late."""
    last: int = -1
    """Last sequence contained in the view. Queries answer with it, so it moves on only when the whole message
    has been applied: an answer may be newer than it says, never older."""

    def __post_init__(self) -> None:
        self.last = max(self.last, self.watermark)

    def judge(self, sequence: int, now: float) -> Verdict:
        """What the message is to the view. Once it has been applied, set `last` to it.

        The caller has already refused sequences at or below the last one *received*.
        """
        if sequence == self.last + 1:
            return Verdict.NEXT
        if sequence > self.last:
            return Verdict.GAP
        if sequence == self.watermark == self.last:
            return Verdict.REPEATED
        return Verdict.CONTAINED if self.is_late(sequence, now) else Verdict.REGRESSED

    def is_late(self, sequence: int, now: float) -> bool:
        """Whether the snapshot already contained the message, which was still under way."""
        return sequence < self.watermark and now <= self.stale_until

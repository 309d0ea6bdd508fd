"""Numbers and lists in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 stream`, `0 streams`, `1,200 streams`; `plural` where an s is not enough."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def some_of(items: Sequence[object], most: int) -> str:
    """`a, b`, or `a, b and 3 more` of which `most` are named."""
    named = ", ".join(map(str, items[:most]))
    more = len(items) - most
    return f"{named} and {more:,} more" if more > 0 else named

"""Numbers in sentences. Pure."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 stream`, `0 streams`, `1,200 streams`; `plural` where an s is not enough."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

"""What a sequence number means for a view."""

from __future__ import annotations

import pytest

from streams.core.sequence import Cursor, Verdict

NOW, WINDOW = 10.0, 12.0


def judge(watermark: int, *sequences: int, now: float = NOW) -> list[Verdict]:
    """The verdicts on messages of which those that may be applied are."""
    cursor = Cursor(watermark, stale_until=WINDOW)
    verdicts = []
    for sequence in sequences:
        verdicts.append(cursor.judge(sequence, now))
        if verdicts[-1] in (Verdict.NEXT, Verdict.REPEATED):
            cursor.last = sequence
    return verdicts


@pytest.mark.parametrize(
    ("sequences", "verdicts"),
    [
        ([6], [Verdict.NEXT]),
        ([6, 7, 8], [Verdict.NEXT] * 3),
        ([5], [Verdict.REPEATED]),
        ([5, 6], [Verdict.REPEATED, Verdict.NEXT]),
        ([6, 5], [Verdict.NEXT, Verdict.REGRESSED]),
        ([3, 4, 5, 6], [Verdict.CONTAINED, Verdict.CONTAINED, Verdict.REPEATED, Verdict.NEXT]),
        ([2, 4, 6], [Verdict.CONTAINED, Verdict.CONTAINED, Verdict.NEXT]),
        ([7], [Verdict.GAP]),
        ([6, 8], [Verdict.NEXT, Verdict.GAP]),
        ([6, 9, 7], [Verdict.NEXT, Verdict.GAP, Verdict.NEXT]),
    ],
)
def test_verdicts_after_a_snapshot_at_5(sequences: list[int], verdicts: list[Verdict]) -> None:
    assert judge(5, *sequences) == verdicts


def test_a_message_from_before_the_watermark_is_late_only_for_a_while() -> None:
    assert judge(5, 3, now=WINDOW) == [Verdict.CONTAINED]
    assert judge(5, 3, now=WINDOW + 0.001) == [Verdict.REGRESSED]


def test_the_watermark_itself_may_come_at_any_time() -> None:
    assert judge(0, 0, now=WINDOW + 100) == [Verdict.REPEATED]


@pytest.mark.parametrize("sequence", [4, 5, 6, 9])
def test_a_verdict_does_not_move_the_cursor(sequence: int) -> None:
    cursor = Cursor(5, stale_until=WINDOW)
    cursor.judge(sequence, NOW)
    assert cursor.last == 5

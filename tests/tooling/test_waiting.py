"""wait_until: the helper whose failure message is what a person sees of a broken test."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_until


def test_returns_what_the_predicate_returned() -> None:
    answers = iter([None, 0, "there"])
    assert wait_until(lambda: next(answers), interval=0) == "there"


def test_fails_with_the_message_after_the_deadline() -> None:
    seen: list[int] = []

    def never() -> bool:
        seen.append(len(seen))
        return False

    with pytest.raises(AssertionError, match=r"saw \d+ tries \(waited 0.02 s\)"):
        wait_until(never, 0.02, lambda: f"saw {len(seen)} tries")


def test_looks_once_more_after_the_deadline() -> None:
    answers = iter([True])
    assert wait_until(lambda: next(answers), timeout=0)


def test_an_exception_of_the_predicate_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 // 0)

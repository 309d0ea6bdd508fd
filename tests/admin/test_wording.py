from __future__ import annotations

import pytest

from kvportal.commands import judge
from kvportal.gauges import instance_hint
from routing.admin_decisions import render_explanation
from streams.resync import OutcomeState
from streams.wording import counted
from tests.admin.values import NOW, spec, status
from tests.routing.builders import instance


@pytest.mark.parametrize(
    ("number", "noun", "plural", "words"),
    [
        (0, "stream", None, "0 streams"),
        (1, "stream", None, "1 stream"),
        (1200, "stream", None, "1,200 streams"),
        (1, "entry", "entries", "1 entry"),
        (2, "entry", "entries", "2 entries"),
    ],
)
def test_numbers_agree_with_what_they_count(number: int, noun: str, plural: str | None, words: str) -> None:
    assert counted(number, noun, plural) == words


@pytest.mark.parametrize(
    ("streams", "settled", "words"),
    [
        (1, 1, "1 of 1 stream has a new snapshot after 1.0 s."),
        (3, 3, "3 of 3 streams have a new snapshot after 1.0 s."),
    ],
)
def test_outcome_of_a_resync_agrees_with_its_number(streams: int, settled: int, words: str) -> None:
    statuses = {spec(n).id: status(n, snapshot_at=NOW) for n in range(streams)}
    assert judge(tuple(statuses), statuses, NOW - 1, NOW) == (OutcomeState.DONE, settled, words)


def test_hint_about_ranks_agrees_with_their_number() -> None:
    assert "1 of its 2 ranks has no stream" in str(instance_hint(instance("a:1", dp_size=2), None, 1))
    assert "2 of its 3 ranks have no stream" in str(instance_hint(instance("a:1", dp_size=3), None, 1))


def test_explanation_agrees_with_the_length_of_the_prompt() -> None:
    explanation = {
        "policy": "RR",
        "reason": "its turn",
        "input_tokens": 1,
        "candidates": [],
        "candidates_num": {"prefill": 0, "decode": 0},
        "excluded": [],
        "excluded_num": {},
    }
    assert "1 prompt token." in " ".join(render_explanation(explanation).split())

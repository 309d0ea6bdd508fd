from __future__ import annotations

from streams.hit_watch import LOOK_EVERY_SECONDS, PAUSE_SECONDS, HitWatch
from streams.spec import StreamId
from streams.status import Match
from tests.admin.values import NOW, Clock, spec

PROMPT = b"\x01\x00\x00\x00"
STREAMS = [spec(1).id, spec(2).id]


def match(number: int, device: int = 0, host: int = 0) -> Match:
    return Match(spec(number), True, 1, device, host, 9, 9, None)


class FakeIndex:
    def __init__(self, *matches: Match) -> None:
        self.matches = list(matches)

    def query(self, prompt: bytes) -> list[Match]:
        return self.matches


def watch_of(*matches: Match) -> tuple[HitWatch, Clock]:
    clock = Clock()
    return HitWatch(FakeIndex(*matches), clock=clock), clock


def test_answers_pass_through_unchanged() -> None:
    watch, _ = watch_of(match(1, device=128), match(2))
    assert list(watch.query(PROMPT)) == [match(1, device=128), match(2)]


def test_streams_that_bring_hits_in_either_tier_are_noticed() -> None:
    watch, _ = watch_of(match(1, device=128), match(2, host=128), match(3))
    watch.query(PROMPT)
    hits, since = watch.last_hits([spec(n).id for n in (1, 2, 3)])
    assert hits == {spec(1).id: NOW, spec(2).id: NOW}
    assert since == NOW


def test_traffic_with_short_pauses_is_one_stretch_and_a_long_one_ends_it() -> None:
    watch, clock = watch_of(match(1))
    watch.query(PROMPT)
    clock.now += PAUSE_SECONDS - 1
    watch.query(PROMPT)
    assert watch.last_hits(STREAMS)[1] == NOW
    clock.now += PAUSE_SECONDS + 1
    assert watch.last_hits(STREAMS)[1] is None
    watch.query(PROMPT)
    assert watch.last_hits(STREAMS)[1] == clock.now


def test_empty_prompts_are_no_traffic() -> None:
    watch, _ = watch_of(match(1, device=128))
    watch.query(b"")
    assert watch.last_hits(STREAMS) == ({}, None)


def test_most_of_the_queries_of_a_busy_portal_are_not_looked_at() -> None:
    watch, clock = watch_of(match(1, device=128))
    watch.query(PROMPT)
    clock.now += LOOK_EVERY_SECONDS / 2
    watch.query(PROMPT)
    assert watch.last_hits(STREAMS)[0] == {spec(1).id: NOW}


def test_streams_that_are_gone_are_forgotten() -> None:
    watch, _ = watch_of(match(1, device=128))
    watch.query(PROMPT)
    assert watch.last_hits([StreamId("other:1", 0)])[0] == {}
    assert watch.last_hits(STREAMS)[0] == {}

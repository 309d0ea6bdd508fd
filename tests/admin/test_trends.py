from __future__ import annotations

import itertools

from kvportal.trends import CARD_COLUMNS, SERIES_SECONDS, Totals, Trends, event_count
from streams.spec import StreamId
from tests.admin.values import NOW, lost, spec, status


def observed(*rounds: tuple[list, Totals]) -> Trends:
    trends = Trends()
    for second, (statuses, totals) in enumerate(rounds):
        trends.observe(NOW + second, statuses, totals)
    return trends


def counting(*counts: int) -> Trends:
    return observed(*(([status(counters={"events:BlockStored": count})], Totals()) for count in counts))


def test_all_kinds_of_events_count_and_nothing_else() -> None:
    one = status(counters={"events:BlockStored": 3, "events:Odd": 2, "messages": 50, "gaps": 1})
    assert event_count(one) == 5


def test_rate_is_the_mean_of_the_last_five_seconds() -> None:
    trends = counting(0, 100, 200, 300, 400, 500, 500, 500)
    assert trends.rate("events") == 60.0
    assert trends.stream_rate(spec().id) == 60.0


def test_first_observation_makes_no_spike() -> None:
    trends = counting(1_000_000)
    assert trends.rate("events") is None
    trends = counting(1_000_000, 1_000_000)
    assert trends.rate("events") == 0.0


def test_stream_that_starts_anew_never_makes_a_negative_rate() -> None:
    trends = counting(1000, 1010, 4)
    assert trends.rate("events") == 7.0


def test_stream_that_leaves_takes_its_events_along_without_a_negative_rate() -> None:
    full = [status(1, counters={"events:x": 10}), status(2, counters={"events:x": 900})]
    trends = observed((full, Totals()), (full[:1], Totals()))
    assert trends.rate("events") == 0.0
    assert trends.stream_rate(full[1].spec.id) is None
    assert trends.stream_series(full[1].spec.id) is None


def test_hit_ratio_is_that_of_the_latest_decisions_alone() -> None:
    before = Totals(queries=5, decisions=100, predicted_hit_sum=10.0, predicted_hit_count=100)
    after = Totals(queries=15, decisions=104, predicted_hit_sum=13.0, predicted_hit_count=104)
    trends = observed(([], before), ([], after))
    assert trends.hit_ratio() == 0.75
    assert trends.rate("queries") == 10.0
    assert trends.rate("decisions") == 4.0


def test_what_nobody_measures_is_unknown_and_not_zero() -> None:
    trends = observed(([], Totals()), ([], Totals()))
    assert trends.rate("queries") is None
    assert trends.newest()["decisions"] is None
    assert trends.hit_ratio() is None


def test_series_keep_ten_minutes() -> None:
    trends = Trends()
    for second in range(SERIES_SECONDS + 50):
        trends.observe(NOW + second, [status()], Totals())
    series = trends.series()
    assert tuple(series) == CARD_COLUMNS
    assert {len(column) for column in series.values()} == {SERIES_SECONDS}
    assert series["at"][-1] == NOW + SERIES_SECONDS + 49
    assert series["device"][-1] == 30
    own = trends.stream_series(spec().id)
    assert own is not None
    assert len(own["at"]) == 120
    assert own["at"][-1] - own["at"][0] == 595


def test_stream_is_lost_since_it_failed_however_often_it_tries() -> None:
    stream = StreamId("10.0.0.1:8000", 0)
    trends = Trends()
    trends.observe(NOW, [status()], Totals())
    assert trends.lost_since(stream) is None
    trends.observe(NOW + 1, [lost(since=NOW + 0.5)], Totals())
    trends.observe(NOW + 2, [lost(since=NOW + 1.7)], Totals())
    assert trends.lost_since(stream) == NOW + 0.5
    trends.observe(NOW + 3, [status(since=NOW + 2.5)], Totals())
    assert trends.lost_since(stream) is None


def test_a_clock_that_is_set_back_costs_what_it_took_back_and_nothing_else() -> None:
    trends = Trends()
    counts = itertools.count(10, 10)

    def watch(since: float, seconds: int) -> tuple[list, list]:
        """The times of the points, of the cards and of the stream."""
        for second in range(seconds):
            count = next(counts)
            trends.observe(since + second, [status(counters={"events:x": count})], Totals(queries=count))
        assert (trends.rate("events"), trends.rate("queries")) == (10.0, 10.0)
        assert trends.stream_rate(spec().id) == 10.0
        own = trends.stream_series(spec().id)
        assert own is not None
        return trends.series()["at"], own["at"]

    watch(NOW, 60)
    cards, stream = watch(NOW + 30, 60)
    assert cards == [NOW + second for second in range(90)]
    assert stream == sorted(set(stream))
    assert stream[0] == NOW
    assert stream[-1] >= NOW + 85
    cards, stream = watch(NOW - 86_400, 60)
    assert cards == [NOW - 86_400 + second for second in range(60)]
    assert len(stream) == 12
    assert trends.first_seen(spec().id) == NOW - 86_400


def test_a_stream_is_not_lost_since_a_time_that_has_not_come() -> None:
    trends = Trends()
    trends.observe(NOW, [lost(since=NOW - 1)], Totals())
    trends.observe(NOW - 3600, [lost(since=NOW - 1)], Totals())
    assert trends.lost_since(spec().id) == NOW - 3600

"""Which of two loads counts, by arrival."""

from __future__ import annotations

import pytest

from routing.instances.load import NO_LOAD, LoadPair
from routing.instances.model import LoadReport, LoadSource

HEARTBEAT, ETCD = LoadSource.HEARTBEAT, LoadSource.ETCD


def after(*arrivals: tuple[LoadSource, float]) -> LoadPair:
    pair = NO_LOAD
    for source, at in arrivals:
        report = LoadReport(int(at), 0.5)
        pair = (
            pair.with_heartbeat(report, at) if source is HEARTBEAT else pair.with_stored(report, at, int(at))
        )
    return pair


@pytest.mark.parametrize(
    ("arrivals", "now", "expected"),
    [
        ((), 0.0, None),
        (((HEARTBEAT, 1.0),), 99.0, (HEARTBEAT, 1.0)),
        (((ETCD, 1.0),), 99.0, (ETCD, 1.0)),
        # a heartbeat here wins for ten seconds
        (((HEARTBEAT, 0.0), (ETCD, 5.0)), 5.0, (HEARTBEAT, 0.0)),
        (((HEARTBEAT, 0.0), (ETCD, 5.0)), 9.999, (HEARTBEAT, 0.0)),
        # after that the last to arrive wins
        (((HEARTBEAT, 0.0), (ETCD, 5.0)), 10.0, (ETCD, 5.0)),
        (((HEARTBEAT, 0.0), (ETCD, 12.0)), 12.0, (ETCD, 12.0)),
        (((ETCD, 0.0), (HEARTBEAT, 5.0)), 5.0, (HEARTBEAT, 5.0)),
        (((ETCD, 0.0), (HEARTBEAT, 5.0)), 99.0, (HEARTBEAT, 5.0)),
        (((HEARTBEAT, 0.0), (ETCD, 12.0), (HEARTBEAT, 13.0)), 13.0, (HEARTBEAT, 13.0)),
        (((HEARTBEAT, 0.0), (ETCD, 5.0), (HEARTBEAT, 9.0)), 18.999, (HEARTBEAT, 9.0)),
        (((HEARTBEAT, 0.0), (ETCD, 5.0), (HEARTBEAT, 9.0)), 19.0, (HEARTBEAT, 9.0)),
        (((HEARTBEAT, 0.0), (ETCD, 5.0), (ETCD, 7.0)), 10.0, (ETCD, 7.0)),
    ],
)
def test_precedence(
    arrivals: tuple[tuple[LoadSource, float], ...], now: float, expected: tuple[LoadSource, float] | None
) -> None:
    current = after(*arrivals).at(now).current
    assert (None if current is None else (current.source, current.received_at)) == expected


@pytest.mark.parametrize(
    ("arrivals", "turns_at"),
    [
        ((), None),
        (((HEARTBEAT, 0.0),), None),
        (((ETCD, 0.0), (HEARTBEAT, 1.0)), None),
        (((HEARTBEAT, 0.0), (ETCD, 5.0)), 10.0),
        (((HEARTBEAT, 0.0), (ETCD, 12.0)), None),
        (((HEARTBEAT, 0.0), (ETCD, 5.0), (HEARTBEAT, 6.0)), None),
    ],
)
def test_it_is_known_when_another_load_will_count(
    arrivals: tuple[tuple[LoadSource, float], ...], turns_at: float | None
) -> None:
    pair = after(*arrivals)
    assert pair.turns_at == turns_at
    if turns_at is not None:
        assert pair.at(turns_at).current is not pair.current
        assert pair.at(turns_at).turns_at is None


def test_a_stored_load_that_is_older_than_the_registration_does_not_count_any_more() -> None:
    both = after((HEARTBEAT, 0.0), (ETCD, 12.0))
    assert both.without_stored_before(12) is both
    assert both.without_stored_before(13).current == after((HEARTBEAT, 0.0)).current
    assert after((ETCD, 12.0)).without_stored_before(13) == NO_LOAD
    assert NO_LOAD.without_stored_before(13) is NO_LOAD


def test_without_the_stored_load_the_heartbeat_counts() -> None:
    assert after((HEARTBEAT, 0.0), (ETCD, 12.0)).without_stored().current == after((HEARTBEAT, 0.0)).current
    assert after((ETCD, 12.0)).without_stored() == NO_LOAD

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from kvportal.history import HistoryHealth
from kvportal.opsstate import (
    Picture,
    Presence,
    build,
    history_banner,
    missing_ranks,
    replica_state,
    stream_hints,
    streams_seen,
    worker_banner,
)
from kvportal.records import ReplicaView
from kvportal.trends import Totals, Trends
from streams.advice import advice
from streams.status import Fault, StreamState, StreamStatus
from tests.admin.values import GAP, NOW, lost, spec, status

HOUR = 3600.0


def state_of(*statuses: StreamStatus, **parts: Any) -> dict[str, Any]:
    trends = Trends()
    trends.observe(NOW, statuses, Totals())
    return build(Picture(now=NOW, replica="here", statuses=statuses, trends=trends, banners=(), **parts))


def replica(name: str, *statuses: StreamStatus, heartbeat: float = NOW) -> ReplicaView:
    return ReplicaView(name, NOW - 500, heartbeat, replica_state(statuses))


def test_equal_states_are_equal_bytes_whatever_the_time() -> None:
    first = orjson.dumps(state_of(status(), lost(2)))
    assert orjson.dumps(state_of(status(), lost(2))) == first
    assert orjson.dumps(state_of(status(), status(2))) != first


def test_lost_stream_tells_why_and_what_to_do() -> None:
    stream = state_of(lost())["streams"][0]
    assert stream["state"] == "unsynchronized"
    assert stream["error"] == {"code": "sequence_gap", "sentence": GAP.sentence}
    assert "fresh snapshot is on its way" in stream["advice"]
    assert not stream["starting"]
    assert stream["sequence"] is None


def test_stream_that_comes_up_is_not_an_error() -> None:
    starting = lost(state=StreamState.CONNECTING, error=Fault("connecting", "not connected yet"))
    assert state_of(starting)["streams"][0]["starting"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("connect_failed", spec().endpoint),
        ("snapshot_timeout", spec().replay_endpoint),
        ("decode_error", "128"),
        ("index_overflow", "max_blocks_per_stream"),
    ],
)
def test_advice_names_what_to_look_at(code: str, words: str) -> None:
    assert words in (advice(Fault(code, "it failed"), spec()) or "")


def test_nothing_is_advised_where_nothing_is_known() -> None:
    assert advice(None, spec()) is None
    assert advice(Fault("never_heard_of", "?"), spec()) is None


def hints(one: StreamStatus, watched: float = 10.0, **traffic: float | None) -> str:
    values = {"last_hit": None, "traffic_since": None, **traffic}
    return " ".join(stream_hints(one, NOW - watched, NOW, **values))


def test_connected_stream_without_events_gets_a_hint_after_a_while() -> None:
    silent = status(last_event_at=None, lag_seconds=None)
    assert hints(silent, watched=60) == ""
    assert "No live event" in hints(silent, watched=400)
    assert hints(status(), watched=400) == ""
    assert hints(replace(silent, state=StreamState.SYNCING), watched=400) == ""


def test_stream_without_a_hit_in_an_hour_of_traffic_gets_a_hint() -> None:
    assert "No query found a block" in hints(status(), 2 * HOUR, traffic_since=NOW - HOUR)
    assert hints(status(), 2 * HOUR, traffic_since=NOW - HOUR, last_hit=NOW - 10) == ""
    assert "No query" in hints(status(), 2 * HOUR, traffic_since=NOW - 2 * HOUR, last_hit=NOW - HOUR)
    assert hints(status(), 2 * HOUR, traffic_since=NOW - HOUR / 2) == ""
    assert hints(status(), HOUR / 2, traffic_since=NOW - HOUR) == ""
    assert hints(status(), 2 * HOUR, traffic_since=None) == ""


def test_negative_lag_is_called_what_it_is() -> None:
    assert "3.0 s before they were sent" in hints(status(lag_seconds=-3.0))
    assert hints(status(lag_seconds=-0.001)) == ""


def test_hole_in_the_ranks_gets_a_hint() -> None:
    ranks = [status(1, 0), status(1, 2), status(2, 0)]
    assert missing_ranks(ranks) == {"10.0.0.1:8000": (1,)}
    streams = state_of(*ranks)["streams"]
    assert [bool(stream["hints"]) for stream in streams] == [True, True, False]
    assert "Rank 1 of this instance is not followed; its hits" in streams[0]["hints"][0]
    hint = state_of(status(1, 0), status(1, 20))["streams"][0]["hints"][0]
    assert "Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of this instance are not followed; their hits" in hint


def test_views_of_other_replicas_show_only_where_they_differ() -> None:
    views = (
        replica("here", status(), lost(2)),
        replica("agrees", status(), lost(2)),
        replica("differs", lost(), lost(2)),
        replica("lacks", lost(2)),
        replica("away", lost()),
    )
    state = state_of(status(), lost(2), views=views, gone=frozenset({"away"}))
    assert state["streams"][0]["elsewhere"] == [
        {"replica": "differs", "state": "unsynchronized", "error": str(GAP)},
        {"replica": "lacks", "state": "absent", "error": None},
    ]
    assert state["streams"][1]["elsewhere"] == []
    by_name = {one["name"]: one for one in state["replicas"]}
    assert by_name["here"]["own"]
    assert not by_name["differs"]["own"]
    assert by_name["away"]["gone_since"] == NOW
    assert by_name["differs"]["gone_since"] is None
    assert (by_name["here"]["synchronized"], by_name["here"]["streams"]) == (1, 2)


def test_what_a_replica_wrote_names_its_streams() -> None:
    odd = replace(status(2), spec=replace(spec(2, 3), instance_name="[fe80::1]/dp1:8000"))
    assert streams_seen(replica("there", status(1), odd)) == {spec(1).id, odd.spec.id}
    assert streams_seen(ReplicaView("old", NOW, NOW, {})) == frozenset()
    assert streams_seen(ReplicaView("odd", NOW, NOW, {"streams": {"x": {}, "a/dpx": {}}})) == frozenset()


def test_state_tells_when_it_changed_also_while_it_is_lost() -> None:
    trends = Trends()
    trends.observe(NOW - 60, [lost(since=NOW - 60)], Totals())
    again = lost(since=NOW - 5, state=StreamState.SYNCING)
    trends.observe(NOW, [again], Totals())
    picture = Picture(now=NOW, replica="here", statuses=(again,), trends=trends, banners=())
    [stream] = build(picture)["streams"]
    assert (stream["since"], stream["changed"]) == (NOW - 60, NOW - 5)


def test_replica_is_gone_when_its_heartbeat_stands_still_whatever_its_clock() -> None:
    presence = Presence()
    ahead = replica("ahead", heartbeat=NOW + 40)
    assert presence.gone([ahead], NOW) == frozenset()
    assert presence.gone([replica("ahead", heartbeat=NOW + 43)], NOW + 3) == frozenset()
    assert presence.gone([replica("ahead", heartbeat=NOW + 43)], NOW + 12) == frozenset()
    assert presence.gone([replica("ahead", heartbeat=NOW + 43)], NOW + 19) == {"ahead"}
    assert presence.gone([replica("ahead", heartbeat=NOW + 60)], NOW + 20) == frozenset()


def test_old_row_is_gone_from_the_first_look_on() -> None:
    assert Presence().gone([replica("old", heartbeat=NOW - 300)], NOW) == {"old"}


def test_banners_appear_only_when_something_is_wrong() -> None:
    assert history_banner(HistoryHealth(5, 0, 0, None)) is None
    banner = history_banner(HistoryHealth(5, 2, 0, "OperationalError: no route"))
    assert banner is not None
    assert "Waiting to be written: 5 records. Lost: 2." in banner.text
    banner = history_banner(HistoryHealth(1, 0, 0, "OperationalError: no route"))
    assert banner is not None
    assert "written: 1 record." in banner.text
    assert worker_banner(None) is None
    assert worker_banner("ConnectionError: refused") is not None

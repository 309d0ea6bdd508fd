from __future__ import annotations

import json

import pytest

from streams.resync import (
    EVERY_STREAM,
    ResyncOrder,
    ResyncSource,
    ResyncTarget,
    is_settled,
    matching,
)
from streams.spec import StreamId
from tests.admin.values import NOW, lost, status


@pytest.mark.parametrize(
    "targets",
    [EVERY_STREAM, (ResyncTarget("a:1", 0),), (ResyncTarget("a:1"), ResyncTarget("b:1", 3))],
)
def test_order_survives_the_way_through_a_message(targets: tuple[ResyncTarget, ...]) -> None:
    order = ResyncOrder("ann", ResyncSource.PAGE, NOW, targets, drop=True)
    assert ResyncOrder.from_message(json.loads(json.dumps(order.to_message()))) == order


def test_two_orders_never_share_a_key() -> None:
    assert len({ResyncOrder("ann", ResyncSource.API, NOW).key for _ in range(100)}) == 100


def test_targets_choose_ranks_instances_or_everything() -> None:
    streams = [StreamId("a:1", 0), StreamId("a:1", 1), StreamId("b:1", 0)]
    assert matching(EVERY_STREAM, streams) == tuple(streams)
    assert matching((ResyncTarget("a:1"),), streams) == (streams[0], streams[1])
    assert matching((ResyncTarget(None, 0),), streams) == (streams[0], streams[2])
    assert matching((ResyncTarget("a:1"), ResyncTarget("a:1", 1)), streams) == (streams[0], streams[1])
    assert matching((ResyncTarget("c:1"),), streams) == ()


def test_scope_names_the_streams_and_stays_short() -> None:
    assert ResyncOrder("ann", ResyncSource.PAGE, NOW).scope == "all streams"
    many = tuple(ResyncTarget(f"10.0.0.{n}:8000", 0) for n in range(128))
    scope = ResyncOrder("ann", ResyncSource.PAGE, NOW, many).scope
    assert scope.startswith("10.0.0.0:8000/dp0, ")
    assert scope.endswith("and 108 more")


def test_stream_is_settled_only_with_a_snapshot_younger_than_the_order() -> None:
    assert is_settled(status(snapshot_at=NOW + 1), NOW)
    assert not is_settled(status(snapshot_at=NOW - 1), NOW)
    assert not is_settled(lost(snapshot_at=NOW + 1), NOW)
    assert not is_settled(status(snapshot_at=None), NOW)

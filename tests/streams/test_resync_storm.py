"""A thousand forced resyncs under live traffic: nothing is lost and nothing accumulates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest

from streams.core.table import SLOTS
from streams.simulator import SimulatedEngine
from streams.status import StreamState
from tests.streams.harness import Portal, rss_bytes
from tests.support.waiting import wait_until

RESYNCS = {False: 1_000, True: 300}
"""With `drop` the stream starts from nothing each time; fewer show the same."""


@pytest.mark.parametrize("drop", [False, True])
def test_after_many_forced_resyncs_memory_and_answers_are_as_before(
    portal: Portal, make_engine: Callable[..., SimulatedEngine], drop: bool
) -> None:
    engine = make_engine(seed=1, device_blocks=150, host_blocks=80, orphan_probability=0.05)
    spec = engine.spec()
    engine.step(400)
    portal.follow_synchronized(spec)
    engine.wait_for_subscribers()
    engine.start(rate=800)

    def snapshots() -> int:
        return portal.status(spec).last_snapshot.count

    def resync(times: int) -> None:
        for _ in range(times):
            wanted = snapshots() + 1
            portal.directory.resync(drop=drop)
            wait_until(partial(reached, wanted), interval=0.002)

    def reached(wanted: int) -> bool:
        return snapshots() >= wanted

    resync(100)
    portal.changes.clear()
    gc.collect()
    warm = rss_bytes()
    resync(RESYNCS[drop] - 100)
    engine.stop()
    losses = set(portal.losses(spec))
    portal.changes.clear()
    gc.collect()
    assert rss_bytes() - warm < 16 * 1024 * 1024
    portal.wait_sequence(spec, engine.ranks[0].publisher.last_sequence)
    portal.wait_equals(spec, engine.truth)
    assert losses <= ({"resync_forced"} if drop else set())
    assert portal.counter(spec, "resyncs:operator") >= RESYNCS[drop]
    assert portal.status(spec).state is StreamState.SYNCHRONIZED

    # Every slot but the serving view's is free again, and the table holds nothing but that view.
    index = portal.directory._index
    wait_until(lambda: index.slots.free == SLOTS - 1)
    view = index.board.entries[0].view.view
    assert len(index.table) == len(set(view.device.values()) | set(view.host.values()))

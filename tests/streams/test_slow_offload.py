"""An engine that announces host copies long after the device block left. Between the two, a block is in no
tier and in no snapshot, so calibrations in the meantime know nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from streams.simulator import SimulatedEngine
from streams.spec import StreamSpec
from tests.streams.harness import Portal

MESSAGES = 1_200
"""As many as come in 120 s at 10 a second."""
CALIBRATE_EVERY = 20
"""Messages; as many as come in 2 s."""


@pytest.mark.parametrize("delay", [3, 10, 50])
@pytest.mark.parametrize("orphans", [0.0, 0.1])
def test_slow_offload_never_costs_a_recovery(
    portal: Portal, make_engine: Callable[..., SimulatedEngine], delay: int, orphans: float
) -> None:
    engine = make_engine(
        seed=delay, device_blocks=80, host_blocks=120, offload_delay=delay, orphan_probability=orphans
    )
    engine.step(200)
    spec = engine.spec()
    portal.follow_synchronized(spec)
    engine.wait_for_subscribers()
    for _ in range(MESSAGES // CALIBRATE_EVERY):
        snapshots = portal.status(spec).last_snapshot.count
        engine.step(CALIBRATE_EVERY // 2)
        portal.directory.resync(reason="calibration")
        engine.step(CALIBRATE_EVERY // 2)
        portal.wait_snapshots(spec, snapshots + 1)
    portal.wait_sequence(spec, 200 + MESSAGES - 1)
    portal.wait_equals(spec, engine.truth)
    check(portal, spec)
    assert portal.status(spec).last_snapshot.count > MESSAGES // CALIBRATE_EVERY


@pytest.mark.parametrize("delay", [3, 10, 50])
def test_slow_offload_under_free_running_traffic_never_costs_a_recovery(
    make_portal: Callable[..., Portal], make_engine: Callable[..., SimulatedEngine], delay: int
) -> None:
    """With calibrations of its own accord, at whatever moment they come."""
    portal = make_portal(resync_interval_ms=50)
    engine = make_engine(
        seed=delay, device_blocks=80, host_blocks=120, offload_delay=delay, orphan_probability=0.1
    )
    engine.step(200)
    spec = engine.spec()
    portal.follow_synchronized(spec)
    engine.wait_for_subscribers()
    engine.start(rate=2_000)
    deadline = time.monotonic() + 60
    while portal.counter(spec, "messages") < 2_000 or portal.status(spec).last_snapshot.count < 40:
        portal.wait_counter(spec, "messages", portal.counter(spec, "messages") + 50)
        assert time.monotonic() < deadline
    engine.stop()
    portal.wait_sequence(spec, engine.ranks[0].publisher.last_sequence)
    portal.wait_equals(spec, engine.truth)
    check(portal, spec)


def check(portal: Portal, spec: StreamSpec) -> None:
    assert portal.losses(spec) == []
    assert set(portal.resyncs(spec)) <= {"start", "calibration", "unknown_block"}
    assert portal.status(spec).host_blocks > 50

"""Many streams side by side: none waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from streams.simulator import Publisher, SimulatedEngine
from streams.status import StreamState
from tests.streams.harness import TIMEOUT, Portal, packed
from tests.support.waiting import wait_until

MakeEngine = Callable[..., SimulatedEngine]
MakePortal = Callable[..., Portal]


def unsubscribed(publisher: Publisher) -> bool:
    return publisher.subscribers == 0


def test_128_streams_start_synchronize_and_stop(make_portal: MakePortal, make_engine: MakeEngine) -> None:
    threads = set(threading.enumerate())
    engines = [make_engine(seed=seed, dp_size=16, device_blocks=40) for seed in range(8)]
    for engine in engines:
        engine.step(10, wait=False)
    engine_threads = set(threading.enumerate())
    specs = [engine.spec(rank, f"engine-{i}") for i, engine in enumerate(engines) for rank in range(16)]
    portal = make_portal()
    portal.follow(*specs)

    def synchronized() -> int:
        return sum(status.state is StreamState.SYNCHRONIZED for status in portal.directory.statuses())

    wait_until(lambda: synchronized() == 128, 60, lambda: f"{synchronized()} synchronized")
    for engine in engines:
        engine.wait_for_subscribers()
        engine.step(10, wait=False)
    for i, engine in enumerate(engines):
        for rank in range(16):
            spec = specs[i * 16 + rank]
            portal.wait_sequence(spec, 19)
            portal.wait_equals(spec, partial(engine.truth, rank))
    assert [match.spec for match in portal.directory.query(b"")] == sorted(
        specs, key=lambda spec: (spec.instance_name, spec.dp_rank)
    )
    assert not any(change.old is StreamState.SYNCHRONIZED for change in portal.changes)
    portal.close()
    assert set(threading.enumerate()) == engine_threads
    for engine in engines:
        for each in engine.ranks:
            wait_until(partial(unsubscribed, each.publisher))
        engine.close()
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("fault", ["silent", "no_end", "slow"])
def test_a_wedged_replay_endpoint_delays_neither_other_streams_nor_queries(
    make_portal: MakePortal, make_engine: MakeEngine, fault: str
) -> None:
    """More streams are wedged than snapshots may be decoded at once."""
    portal = make_portal(replay_timeout_ms=60_000)
    wedged = [make_engine(seed=seed, device_blocks=50) for seed in range(4)]
    for engine in wedged:
        engine.step(5)
        engine.spoil_snapshots(fault)
    good = make_engine(seed=9, device_blocks=50)
    good.step(5)
    specs = [engine.spec(instance_name=f"wedged-{i}") for i, engine in enumerate(wedged)]
    portal.follow(*specs, good.spec())
    for engine in wedged:
        engine.ranks[0].publisher.wait_for_replay_requests()
    portal.wait_synchronized(good.spec())
    good.wait_for_subscribers()
    for last in range(5, 100):
        good.step()
        for engine in wedged:
            engine.wait_for_subscribers()
            engine.step()
        portal.wait_sequence(good.spec(), last)
    portal.wait_equals(good.spec(), good.truth)
    portal.directory.resync(instance_name=good.spec().instance_name)
    portal.wait_snapshots(good.spec(), 2)
    if fault != "slow":  # which does end
        for spec in specs:
            assert portal.status(spec).state is StreamState.SYNCING
            assert portal.status(spec).counters["messages"] == 95
    assert portal.losses(good.spec()) == []


def test_a_wedged_calibration_costs_the_stream_itself_no_live_message(
    make_portal: MakePortal, make_engine: MakeEngine
) -> None:
    portal = make_portal(replay_timeout_ms=60_000)
    engine = make_engine(seed=1, device_blocks=50)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.spoil_snapshots("silent")
    portal.directory.resync()
    engine.ranks[0].publisher.wait_for_replay_requests(2)
    for last in range(100):
        engine.step()
        portal.wait_sequence(engine.spec(), last)
    portal.wait_equals(engine.spec(), engine.truth)


def test_a_flooding_stream_starves_neither_others_nor_queries(
    portal: Portal, make_engine: MakeEngine
) -> None:
    flooding = make_engine(seed=1, device_blocks=50)
    good = make_engine(seed=2, device_blocks=50)
    specs = flooding.spec(instance_name="flooding"), good.spec(instance_name="good")
    portal.follow_synchronized(*specs)
    for engine in (flooding, good):
        engine.wait_for_subscribers()
    flooding.flood(60_000, wait=False)
    prompt = packed(range(16 * 100))
    for last in range(50):
        good.step()
        portal.wait_sequence(specs[1], last)
        assert len(portal.directory.query(prompt)) == 2
    portal.wait_equals(specs[1], good.truth)
    assert portal.losses(specs[1]) == []
    assert portal.counter(specs[0], "messages") > 0
    # Whether the flood was taken whole or some of it was lost, the stream finds back.
    last_of_flood = 60_000 - 1
    wait_until(lambda: flooding.ranks[0].publisher.last_sequence == last_of_flood, 60)
    portal.directory.resync(instance_name="flooding")
    portal.wait_synchronized(specs[0])


def test_stopping_does_not_wait_for_what_the_streams_wait_for(
    make_portal: MakePortal, make_engine: MakeEngine
) -> None:
    portal = make_portal(replay_timeout_ms=600_000)
    engines = [make_engine(seed=seed) for seed in range(3)]
    for engine, fault in zip(engines, ("silent", "no_end", None), strict=True):
        if fault:
            engine.spoil_snapshots(fault)
    specs = [engine.spec(instance_name=f"e{i}") for i, engine in enumerate(engines)]
    portal.follow(*specs)
    for engine in engines[:2]:
        engine.ranks[0].publisher.wait_for_replay_requests()
    portal.wait_synchronized(specs[2])
    portal.close()  # gives threads up after a few seconds: then they are still there
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("stream", "slot"))]


def test_streams_come_and_go_while_others_stay(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=5, dp_size=6, device_blocks=40)
    engine.step(20)
    specs = [engine.spec(rank) for rank in range(6)]
    portal.follow_synchronized(*specs[:4])
    for round_number in range(5):
        gone, staying = specs[:2], specs[2:4]
        if round_number % 2:
            portal.follow_synchronized(*specs)
        else:
            portal.follow_synchronized(*staying, *specs[4:])
            assert {match.spec for match in portal.directory.query(b"")}.isdisjoint(gone)
        for spec in staying:
            assert portal.status(spec).counters["resyncs:start"] == 1
            portal.wait_equals(spec, partial(engine.truth, spec.dp_rank))
    portal.follow()
    wait_until(
        lambda: all(each.publisher.subscribers == 0 for each in engine.ranks),
        TIMEOUT,
        "a stream that is gone still subscribes",
    )

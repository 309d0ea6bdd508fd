"""Periodic calibration and forced resyncs of a stream that serves."""

from __future__ import annotations

from collections.abc import Callable

from streams.simulator import SimulatedEngine
from streams.status import StreamState
from tests.streams.driven import Driven
from tests.streams.harness import Portal, copy, packed, remove, store, text
from tests.streams.puppet import Puppet, synchronize
from tests.support.waiting import wait_until

MakeEngine = Callable[..., SimulatedEngine]
MakePortal = Callable[..., Portal]


def test_calibration_repairs_a_silently_lost_tail_and_counts_the_drift(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1, 2, 3), copy(1), watermark=4)
    portal.directory.resync()
    # Messages 5 and 6 were lost: block 3 left, 4 and 5 came, the copy of 1 left.
    puppet.request().answer(6, store(1, 2), store(4, 5, parent=2))
    portal.wait_sequence(puppet.spec, 6)
    assert portal.holds(puppet.spec, 1, 2, 3) == (2, 0)
    assert portal.holds(puppet.spec, 1, 2, 4, 5) == (4, 0)
    assert portal.counter(puppet.spec, "drift:absent") == 2
    assert portal.counter(puppet.spec, "drift:unclaimed") == 2
    assert portal.losses(puppet.spec) == []
    puppet.publish(7, store(6, parent=5))
    portal.wait_sequence(puppet.spec, 7)


def test_a_lost_tail_of_an_idle_engine_is_repaired_by_the_next_calibration(
    make_portal: MakePortal, make_engine: MakeEngine
) -> None:
    portal = make_portal(resync_interval_ms=300)
    engine = make_engine(seed=1, device_blocks=60, host_blocks=30)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(50)
    portal.wait_sequence(engine.spec(), 49)
    engine.lose_messages(10)
    portal.wait_sequence(engine.spec(), 59)
    portal.wait_equals(engine.spec(), engine.truth)
    assert (
        portal.counter(engine.spec(), "drift:absent") + portal.counter(engine.spec(), "drift:unclaimed") > 0
    )
    assert portal.losses(engine.spec()) == []


def test_calibrations_of_a_healthy_stream_find_no_drift(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=2, device_blocks=100, host_blocks=50, orphan_probability=0.1)
    engine.step(50)
    spec = engine.spec()
    portal.follow_synchronized(spec)
    engine.wait_for_subscribers()
    for count in range(2, 12):
        engine.step(20)
        portal.wait_sequence(spec, engine.ranks[0].publisher.last_sequence)
        portal.directory.resync()
        portal.wait_snapshots(spec, count)
        portal.wait_equals(spec, engine.truth)
    assert portal.counter(spec, "drift:absent") == portal.counter(spec, "drift:unclaimed") == 0
    assert portal.losses(spec) == []


def test_messages_that_a_calibration_overtook_are_dropped(portal: Portal, puppet: Puppet) -> None:
    """The snapshot comes by another connection than the messages that it contains."""
    synchronize(portal, puppet, store(1), watermark=4)
    portal.directory.resync()
    puppet.request().answer(6, store(1), store(2, parent=1))
    portal.wait_sequence(puppet.spec, 6)
    puppet.publish(5, store(2, 3, parent=1))
    puppet.publish(6, remove(3))
    puppet.publish(7, store(4, parent=2))
    portal.wait_sequence(puppet.spec, 7)
    assert portal.holds(puppet.spec, 1, 2, 4) == (3, 0)
    assert portal.holds(puppet.spec, 1, 2, 3) == (2, 0)
    assert portal.losses(puppet.spec) == []


def test_the_stream_serves_live_messages_while_a_calibration_is_under_way(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1))
    portal.directory.resync()
    request = puppet.request()
    puppet.publish(1, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    request.part(0, store(1))
    puppet.publish(2, store(3, parent=2), remove(2))
    portal.wait_holds(puppet.spec, (1, 2, 3), (1, 0))
    request.end()
    portal.wait_snapshots(puppet.spec, 2)
    portal.wait_sequence(puppet.spec, 2)
    assert portal.status(puppet.spec).device_blocks == 2
    puppet.publish(3, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))
    assert portal.losses(puppet.spec) == []
    assert portal.counter(puppet.spec, "drift:absent") == portal.counter(puppet.spec, "drift:unclaimed") == 0


def test_an_unchanged_snapshot_is_not_decoded_again(make_portal: MakePortal, puppet: Puppet) -> None:
    """Decoding shows in the count of unknown events; the timestamp alone is no change."""
    portal = make_portal(resync_interval_ms=300)
    synchronize(portal, puppet, store(1), {"type": "Tomorrow"})
    assert portal.counter(puppet.spec, "warnings:unknown_event") == 1
    for count in (2, 3):
        puppet.request().answer(0, store(1), {"type": "Tomorrow"})
        portal.wait_snapshots(puppet.spec, count)
    assert portal.counter(puppet.spec, "warnings:unknown_event") == 1
    assert portal.holds(puppet.spec, 1) == (1, 0)
    puppet.request().answer(0, store(1, 2), {"type": "Tomorrow"})
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.counter(puppet.spec, "warnings:unknown_event") == 2
    puppet.request().answer(1, store(1, 2), {"type": "Tomorrow"})
    portal.wait_sequence(puppet.spec, 1)
    assert portal.counter(puppet.spec, "warnings:unknown_event") == 3


def test_a_forced_resync_decodes_also_an_unchanged_snapshot(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), {"type": "Tomorrow"})
    portal.directory.resync()
    puppet.request().answer(0, store(1), {"type": "Tomorrow"})
    portal.wait_counter(puppet.spec, "warnings:unknown_event", 2)


def test_an_unchanged_snapshot_does_not_hide_what_happened_since(portal: Portal, puppet: Puppet) -> None:
    """A message that the engine sent after making the snapshot, received before the snapshot came."""
    synchronize(portal, puppet, store(1))
    portal.directory.resync()
    request = puppet.request()
    puppet.publish(1, store(2, parent=1))
    portal.wait_sequence(puppet.spec, 1)
    request.answer(0, store(1))
    portal.wait_snapshots(puppet.spec, 2)
    assert portal.holds(puppet.spec, 1, 2) == (2, 0)
    assert portal.status(puppet.spec).sequence == 1


def test_the_view_inherits_what_is_known_of_blocks_that_no_snapshot_lists(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1, 2, 3))
    puppet.publish(1, remove(3))
    portal.wait_sequence(puppet.spec, 1)
    portal.directory.resync()
    puppet.request().answer(1, store(1, 2))
    portal.wait_snapshots(puppet.spec, 2)
    puppet.publish(2, copy(3))
    portal.wait_holds(puppet.spec, (1, 2, 3), (2, 1))
    assert portal.losses(puppet.spec) == []


def test_a_block_whose_parent_has_left_is_no_orphan_when_the_parent_is_still_known(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1, 2, 3, 4), copy(4))
    puppet.publish(1, remove(2))
    portal.wait_sequence(puppet.spec, 1)
    portal.directory.resync()
    puppet.request().answer(1, store(1), store(3, 4, parent=2), copy(4))
    portal.wait_snapshots(puppet.spec, 2)
    status = portal.status(puppet.spec)
    assert (status.device_blocks, status.host_blocks, status.mapped_blocks) == (3, 1, 4)
    assert status.counters["drift:absent"] == status.counters["drift:unclaimed"] == 0
    assert portal.directory.explore(packed(text(1, 2, 3, 4)))[0].tiers == "D-DB"
    puppet.publish(2, copy(2))
    portal.wait_holds(puppet.spec, (1, 2, 3, 4), (3, 1))


def test_a_restarted_engine_inherits_nothing(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, 2, 3))
    puppet.drop_live()
    puppet.wait_subscribed()
    puppet.request().answer(0, store(1))
    portal.wait_synchronized(puppet.spec)
    assert portal.status(puppet.spec).mapped_blocks == 1


def test_a_forced_resync_keeps_serving_the_old_view(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    chosen = portal.directory.resync(reason="operator")
    assert chosen == (puppet.spec.id,)
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (1, 0)
    assert portal.status(puppet.spec).state is StreamState.SYNCHRONIZED
    request.answer(0, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.losses(puppet.spec) == []
    assert portal.resyncs(puppet.spec) == {"start": 1, "operator": 1}


def test_a_forced_resync_with_drop_stops_serving_first(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    portal.directory.resync(drop=True, reason="api")
    request = puppet.request()
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.status(puppet.spec).error.code == "resync_forced"
    assert portal.status(puppet.spec).state is StreamState.SYNCING
    request.answer(0, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.losses(puppet.spec) == ["resync_forced"]


def test_a_forced_resync_reaches_the_streams_that_were_named(portal: Portal, make_engine: MakeEngine) -> None:
    engines = {name: make_engine(seed=3, dp_size=2) for name in ("a", "b")}
    specs = [engine.spec(rank, name) for name, engine in engines.items() for rank in (0, 1)]
    portal.follow_synchronized(*specs)

    def counts() -> list[int]:
        return [portal.counter(spec, "resyncs:operator") for spec in specs]

    assert portal.directory.resync(instance_name="c") == ()
    assert portal.directory.resync(instance_name="a") == (specs[0].id, specs[1].id)
    wait_until(lambda: counts() == [1, 1, 0, 0], message=lambda: str(counts()))
    for spec in specs[:2]:
        portal.wait_snapshots(spec, 2)
    assert portal.directory.resync(instance_name="b", dp_rank=1) == (specs[3].id,)
    wait_until(lambda: counts() == [1, 1, 0, 1], message=lambda: str(counts()))
    portal.wait_snapshots(specs[3], 2)
    assert portal.directory.resync() == tuple(spec.id for spec in specs)
    wait_until(lambda: counts() == [2, 2, 1, 2], message=lambda: str(counts()))


def test_a_forced_resync_during_a_snapshot_is_followed_by_a_fresh_one(portal: Portal, puppet: Puppet) -> None:
    portal.follow(puppet.spec)
    first = puppet.request()
    portal.directory.resync()
    portal.directory.resync()
    assert not puppet.asked(0.1)
    first.answer(0, store(1))
    portal.wait_synchronized(puppet.spec)
    puppet.request().answer(0, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.resyncs(puppet.spec) == {"start": 1, "operator": 1}


def test_a_forced_resync_during_a_snapshot_that_fails_does_not_wait_for_the_backoff(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    for _ in range(6):
        driven.follower.resync("operator", drop=False)
        assert driven.asking
        driven.advance(1)
        driven.follower.resync("operator", drop=False)
        driven.advance(1.02)  # unanswered: replay_timeout_ms
        assert driven.asking
        assert driven.serving
        driven.advance(2.01)
    driven.follower.resync("operator", drop=True)
    driven.advance(1)
    driven.follower.resync("operator", drop=False)
    driven.advance(1.02)
    assert driven.asking
    assert not driven.serving


def test_a_forced_resync_of_a_stream_in_backoff_happens_at_once(driven: Driven) -> None:
    driven.connect()
    for _ in range(8):
        assert driven.wait_asking(5.1)
        driven.advance(2.01)
    assert not driven.asking
    driven.follower.resync("operator", drop=False)
    assert driven.asking
    driven.answer(3, store(1))
    assert driven.holds(1) == (1, 0)


def test_calibrations_are_jittered_and_at_most_an_interval_apart(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    waits = []
    for _ in range(8):
        start = driven.now
        assert driven.wait_asking(30.1)
        waits.append(driven.now - start)
        driven.answer(0, store(1))
    assert max(waits) <= 30.05
    assert min(waits) >= 27
    assert max(waits) - min(waits) > 0.2
    assert driven.losses == []


def drift(driven: Driven) -> tuple[int, int]:
    counters = driven.follower.status().counters
    return counters.get("drift:absent", 0), counters.get("drift:unclaimed", 0)


def test_live_messages_that_the_snapshot_overtook_are_no_drift(driven: Driven) -> None:
    driven.synchronize(0, store(1), store(2))
    driven.follower.resync("operator", drop=False)
    driven.answer(2, store(1), store(3))
    driven.live(1, remove(2))
    driven.live(2, store(3))
    driven.advance(1)
    assert driven.follower.status().last_snapshot.count == 2
    assert driven.holds(3) == (1, 0)
    assert drift(driven) == (0, 0)


def test_messages_that_never_arrive_are_drift_and_repaired_all_the_same(driven: Driven) -> None:
    driven.synchronize(0, store(1), store(2))
    driven.follower.resync("operator", drop=False)
    driven.answer(2, store(1), store(3))
    driven.advance(1)
    assert driven.follower.status().last_snapshot.count == 2
    assert (driven.holds(2), driven.holds(3)) == ((0, 0), (1, 0))
    assert drift(driven) == (1, 1)


def test_a_copy_announced_during_a_calibration_is_understood_though_no_snapshot_lists_the_block(
    driven: Driven,
) -> None:
    driven.synchronize(0, store(1, 2))
    driven.live(1, remove(2))
    driven.advance(6)  # past the time in which unknown blocks are expected
    driven.follower.resync("operator", drop=False)
    driven.live(2, copy(2), store(3, parent=2))
    driven.answer(1, store(1))
    driven.advance(3)
    assert driven.holds(1, 2, 3) == (2, 1)
    assert driven.resyncs() == {"start": 1, "operator": 1}
    assert drift(driven) == (0, 0)

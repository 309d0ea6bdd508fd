"""What a stream that nothing goes wrong with answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgpack
import pytest

from streams.simulator import SimulatedEngine
from streams.simulator.messages import all_blocks_cleared, block_removed, block_stored, host_copy
from streams.status import StreamState
from tests.streams.harness import SIZE, Portal, copy, remove, store, text
from tests.streams.puppet import Puppet, synchronize
from tests.support.waiting import wait_until

MakeEngine = Callable[..., SimulatedEngine]
MakePuppet = Callable[..., Puppet]


def test_a_late_joiner_answers_as_the_engine_holds(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=1, device_blocks=80, host_blocks=40)
    engine.step(200)
    portal.follow_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)
    status = portal.status(engine.spec())
    assert status.device_blocks == engine.truth().placed_device_blocks
    assert status.host_blocks == engine.truth().placed_host_blocks
    assert status.last_snapshot and status.last_snapshot.watermark == 199


@pytest.mark.parametrize("hash_form", ["unsigned", "signed", "bytes"])
@pytest.mark.parametrize("watermark", ["last", "next"])
def test_live_messages_keep_the_answer_equal_to_the_engines_truth(
    portal: Portal, make_engine: MakeEngine, hash_form: str, watermark: str
) -> None:
    engine = make_engine(
        seed=2,
        device_blocks=100,
        host_blocks=60,
        orphan_probability=0.1,
        hash_form=hash_form,
        watermark=watermark,
    )
    engine.step(20)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(300)
    portal.wait_sequence(engine.spec(), 319)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.losses(engine.spec()) == []


def test_a_stream_followed_from_its_first_message_counts_every_block(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=3, device_blocks=100, host_blocks=60, orphan_probability=0.2)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(300)
    portal.wait_sequence(engine.spec(), 299)
    portal.wait_equals(engine.spec(), engine.truth)
    status, truth = portal.status(engine.spec()), engine.truth()
    assert (status.device_blocks, status.host_blocks) == (truth.device_blocks, truth.host_blocks)
    assert status.device_blocks > 50
    assert status.host_blocks > 20


def test_device_counts_before_host_and_a_block_in_neither_tier_ends_the_match(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1, 2), store(3, parent=2, medium="CPU"), store(4, parent=3))
    assert portal.holds(puppet.spec, 1, 2, 3, 4) == (3, 1)
    match = portal.match(puppet.spec, text(1, 2, 3, 4))
    assert match.reusable_prefix_tokens == 4 * SIZE
    assert (match.device_blocks, match.host_blocks) == (3, 1)
    assert portal.holds(puppet.spec, 1, 2, 9, 4) == (2, 0)
    assert portal.holds(puppet.spec, 2) == (0, 0)
    assert portal.hits(puppet.spec, text(1, 2)[:-1]) == (SIZE, 0)
    assert portal.hits(puppet.spec, []) == (0, 0)


def test_an_absent_medium_means_gpu(portal: Portal, puppet: Puppet) -> None:
    absent = store(2, parent=1)
    del absent["medium"]
    synchronize(portal, puppet, store(1, medium=None), absent, store(3, parent=2, medium="GpU"))
    assert portal.holds(puppet.spec, 1, 2, 3) == (3, 0)
    puppet.publish(1, {"type": "BlockRemoved", "block_hashes": [1003]})
    portal.wait_holds(puppet.spec, (1, 2, 3), (2, 0))


def test_a_tokenless_copy_adds_the_other_tier_also_after_the_device_block_left(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1, 2, 3))
    puppet.publish(1, copy(2), remove(2))
    portal.wait_holds(puppet.spec, (1, 2, 3), (2, 1))
    puppet.publish(2, remove(3))
    portal.wait_holds(puppet.spec, (1, 2, 3), (1, 1))
    puppet.publish(3, copy(3))
    portal.wait_holds(puppet.spec, (1, 2, 3), (1, 2))
    puppet.publish(4, copy(2, 3, medium="gpu"), remove(2, 3, medium="cpu"))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))
    assert portal.losses(puppet.spec) == []


def test_removing_one_tier_leaves_the_other(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, 2), copy(1, 2))
    assert portal.holds(puppet.spec, 1, 2) == (2, 0)
    assert portal.status(puppet.spec).host_blocks == 2
    puppet.publish(1, remove(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (0, 2))
    puppet.publish(2, remove(1, medium="cpu"))
    portal.wait_holds(puppet.spec, (1, 2), (0, 0))
    assert portal.status(puppet.spec).host_blocks == 1


def test_stores_and_removals_may_repeat_and_name_unknown_blocks(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, 2), store(1, 2))
    puppet.publish(1, store(1, 2), remove(77, 2, 78), remove(2))
    portal.wait_holds(puppet.spec, (1, 2), (1, 0))
    assert portal.status(puppet.spec).device_blocks == 1
    puppet.publish(2, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.losses(puppet.spec) == []


def test_a_child_may_be_stored_after_its_parent_left(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(1, remove(1))
    puppet.publish(2, store(2, parent=1))
    portal.wait_sequence(puppet.spec, 2)
    assert portal.holds(puppet.spec, 1, 2) == (0, 0)
    puppet.publish(3, store(1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))


@pytest.mark.parametrize("block_hash", [0, -1, 2**63, 2**64 - 1, bytes(32), b"\xff" * 32])
def test_extreme_block_hashes_are_ordinary(portal: Portal, puppet: Puppet, block_hash: int | bytes) -> None:
    first = block_stored([block_hash], None, text(1), SIZE)
    synchronize(portal, puppet, first, store(2) | {"parent_block_hash": block_hash})
    assert portal.holds(puppet.spec, 1, 2) == (2, 0)
    puppet.publish(1, host_copy([block_hash]), block_removed([block_hash]))
    portal.wait_holds(puppet.spec, (1, 2), (1, 1))


def test_a_hash_means_the_same_in_all_its_forms(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, block_stored([2**64 - 5], None, text(1), SIZE))
    puppet.publish(1, block_stored([7], -5, text(2), SIZE))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    puppet.publish(2, block_removed([bytes(24) + (2**64 - 5).to_bytes(8, "big")]))
    portal.wait_holds(puppet.spec, (1, 2), (0, 0))
    puppet.publish(3, host_copy([2**64 - 5]))
    portal.wait_holds(puppet.spec, (1, 2), (1, 1))


def test_the_newer_tokens_of_a_hash_win(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(1, block_stored([1001], None, text(5), SIZE))
    portal.wait_holds(puppet.spec, (5,), (1, 0))
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.status(puppet.spec).device_blocks == 1


def test_one_content_under_two_hashes_leaves_with_the_last(portal: Portal, puppet: Puppet) -> None:
    twin = block_stored([9001], None, text(1), SIZE)
    synchronize(portal, puppet, store(1), twin)
    puppet.publish(1, remove(1))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1) == (1, 0)
    puppet.publish(2, block_removed([9001]))
    portal.wait_holds(puppet.spec, (1,), (0, 0))


def test_ranks_of_one_engine_are_never_stitched_together(portal: Portal, make_puppet: MakePuppet) -> None:
    ranks = [make_puppet(dp_rank=rank, name="engine") for rank in (0, 1)]
    portal.follow(*(rank.spec for rank in ranks))
    for rank, event in zip(ranks, (store(1), store(2, parent=1)), strict=True):
        rank.request().answer(0, event)
        portal.wait_synchronized(rank.spec)
    first, second = (rank.spec for rank in ranks)
    assert portal.holds(first, 1, 2) == (1, 0)
    assert portal.holds(second, 1, 2) == (0, 0)
    ranks[1].wait_subscribed()
    ranks[1].publish(1, store(1))
    portal.wait_holds(second, (1, 2), (2, 0))
    ranks[0].wait_subscribed()
    ranks[0].publish(1, remove(1))
    portal.wait_holds(first, (1, 2), (0, 0))
    assert portal.holds(second, 1, 2) == (2, 0)
    matches = portal.directory.query(b"")
    assert [(match.spec.instance_name, match.spec.dp_rank) for match in matches] == [
        ("engine", 0),
        ("engine", 1),
    ]


def test_the_ranks_of_an_engine_have_their_own_traffic(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=4, dp_size=3, device_blocks=60, host_blocks=20)
    specs = [engine.spec(rank) for rank in range(3)]
    portal.follow_synchronized(*specs)
    engine.wait_for_subscribers()
    engine.step(100)
    for rank, spec in enumerate(specs):
        portal.wait_sequence(spec, 99)
        portal.wait_equals(spec, partial(engine.truth, rank))


def test_one_instances_removal_leaves_the_prefix_of_the_others(
    portal: Portal, make_puppet: MakePuppet
) -> None:
    puppets = [make_puppet(name=name) for name in ("a", "b")]
    portal.follow(*(puppet.spec for puppet in puppets))
    for puppet in puppets:
        puppet.request().answer(0, store(1, 2), copy(1))
        portal.wait_synchronized(puppet.spec)
    puppets[0].wait_subscribed()
    puppets[0].publish(1, remove(1, 2), remove(1, medium="cpu"))
    portal.wait_holds(puppets[0].spec, (1, 2), (0, 0))
    assert portal.holds(puppets[1].spec, 1, 2) == (2, 0)


def test_other_topics_and_longer_topics_are_counted_and_ignored(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=5)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(3)
    for fault in ("other_topic", "longer_topic", "longer_topic"):
        engine.send_malformed(fault)
    engine.step(3)
    portal.wait_sequence(engine.spec(), 5)
    portal.wait_counter(engine.spec(), "warnings:other_topic", 2)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.counter(engine.spec(), "messages") == 6
    assert portal.losses(engine.spec()) == []


def test_an_empty_topic_is_matched_by_an_empty_frame_only(portal: Portal, make_puppet: MakePuppet) -> None:
    puppet = make_puppet(topic="")
    synchronize(portal, puppet, store(1))
    puppet.frames(b"kv", bytes(7) + b"\1", puppet.encode([remove(1)]))
    puppet.publish(1, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.counter(puppet.spec, "warnings:other_topic") == 1


@pytest.mark.parametrize(
    "batch",
    [[1, [store(1)], None], [1.5, [store(1)]], [2, [store(1)], 0, "more", {"and": "more"}]],
    ids=["nil rank", "no rank", "trailing elements"],
)
def test_the_lenient_forms_of_a_batch_are_understood_on_rank_0(
    portal: Portal, puppet: Puppet, batch: list[object]
) -> None:
    synchronize(portal, puppet)
    puppet.payload(0, msgpack.packb(batch))
    portal.wait_holds(puppet.spec, (1,), (1, 0))


def test_a_batch_without_rank_is_an_error_on_rank_1(portal: Portal, make_puppet: MakePuppet) -> None:
    puppet = make_puppet(dp_rank=1)
    synchronize(portal, puppet)
    puppet.payload(0, msgpack.packb([1.0, [store(1)], None]))
    assert "rank" in portal.wait_error(puppet.spec, "decode_error")


def test_an_engine_that_sends_nothing_stays_synchronized(
    make_portal: Callable[..., Portal], make_engine: MakeEngine
) -> None:
    portal = make_portal(resync_interval_ms=50, replay_timeout_ms=60_000)
    idle = make_engine(seed=6)
    started = make_engine(seed=7, device_blocks=50)
    started.step(30)
    specs = [idle.spec(instance_name="idle"), started.spec(instance_name="started")]
    portal.follow_synchronized(*specs)
    for engine in (idle, started):
        engine.ranks[0].publisher.wait_for_replay_requests(6)
    for spec in specs:
        assert portal.losses(spec) == []
        status = portal.status(spec)
        assert status.state is StreamState.SYNCHRONIZED
        assert status.warning is None
    portal.wait_equals(specs[1], started.truth)
    assert portal.match(specs[0], []).sequence == 0


def test_all_blocks_cleared_empties_both_tiers_and_goes_on(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, 2), copy(1), store(3, parent=99))
    assert portal.status(puppet.spec).mapped_blocks == 3
    puppet.publish(1, store(8), all_blocks_cleared(), store(5, 6))
    portal.wait_holds(puppet.spec, (5, 6), (2, 0))
    assert portal.holds(puppet.spec, 1) == (0, 0)
    assert portal.holds(puppet.spec, 8) == (0, 0)
    status = portal.status(puppet.spec)
    assert (status.device_blocks, status.host_blocks, status.mapped_blocks) == (2, 0, 2)
    puppet.publish(2, store(7, parent=6))
    portal.wait_holds(puppet.spec, (5, 6, 7), (3, 0))
    assert portal.losses(puppet.spec) == []


def test_a_stream_that_is_not_synchronized_answers_zeros_and_says_why(portal: Portal, puppet: Puppet) -> None:
    portal.follow(puppet.spec)
    puppet.wait_subscribed()
    request = puppet.request()
    match = portal.match(puppet.spec, text(1))
    assert match[1:7] == (False, None, 0, 0, 0, 0)
    assert match.error
    request.answer(3, store(1))
    portal.wait_holds(puppet.spec, (1,), (1, 0))
    match = portal.match(puppet.spec, text(1))
    assert match == (puppet.spec, True, 3, SIZE, 0, 1, 0, None)


def test_the_request_is_an_empty_frame_and_sequence_0(portal: Portal, puppet: Puppet) -> None:
    portal.follow(puppet.spec)
    assert puppet.request().frames == [b"", bytes(8)]


def test_streams_of_other_block_size_and_seed_answer_side_by_side(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engines = [make_engine(seed=8, block_size=size, device_blocks=200) for size in (4, 16)]
    specs = [engine.spec(instance_name=f"b{i}", hash_seed=i) for i, engine in enumerate(engines)]
    for engine in engines:
        engine.step(40)
    portal.follow_synchronized(*specs)
    for spec, engine in zip(specs, engines, strict=True):
        portal.wait_equals(spec, engine.truth)


def test_a_changed_spec_starts_the_stream_anew_and_an_equal_one_is_left_alone(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=9, device_blocks=60)
    engine.step(20)
    spec = engine.spec()
    portal.follow_synchronized(spec)
    portal.follow(replace(spec))
    assert portal.status(spec).counters["resyncs:start"] == 1
    assert portal.match(spec, []).synchronized
    other = replace(spec, incarnation="two")
    portal.follow(other)
    assert not any(match.spec == spec for match in portal.directory.query(b""))
    portal.wait_synchronized(other)
    portal.wait_equals(other, engine.truth)
    portal.follow()
    assert portal.directory.query(b"") == []
    wait_until(lambda: engine.ranks[0].publisher.subscribers == 0)


def test_lag_and_arrival_are_measured(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet)
    before = time.time()
    puppet.publish(0, store(1))
    portal.wait_holds(puppet.spec, (1,), (1, 0))
    status = portal.wait(puppet.spec, lambda status: status.lag_seconds is not None, "a lag")
    assert 0 <= status.lag_seconds < 20
    assert before <= status.last_event_at <= time.time()
    assert portal.counter(puppet.spec, "bytes") > 50
    assert portal.counter(puppet.spec, "events:BlockStored") == 1

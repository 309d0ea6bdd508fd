"""A live message that names a block which was never announced: orphan for a while, recovery later, and
never twice for the same hash."""

from __future__ import annotations

import pytest

from streams.simulator.messages import Event
from tests.streams.driven import Driven
from tests.streams.harness import Portal, copy, remove, store
from tests.streams.puppet import Puppet, synchronize

UNKNOWN: dict[str, Event] = {"parent": store(5, parent=99), "copy": copy(99)}


@pytest.mark.parametrize("name", UNKNOWN)
def test_soon_after_a_snapshot_it_is_an_orphan_and_a_calibration_comes_early(
    driven: Driven, name: str
) -> None:
    driven.synchronize(0, store(1))
    driven.advance(4.9)
    driven.live(1, UNKNOWN[name])
    assert driven.serving
    assert driven.holds(1) == (1, 0)
    assert driven.wait_asking(1.05), "no early calibration"
    assert driven.serving
    driven.answer(1, store(1))
    assert driven.resyncs() == {"start": 1, "unknown_block": 1}
    assert driven.losses == []


def test_several_unknown_blocks_bring_one_calibration_forward(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    for sequence in range(1, 6):
        driven.live(sequence, store(sequence * 10, parent=sequence * 10 + 1), copy(sequence * 10 + 2))
    assert driven.wait_asking(1.05)
    driven.answer(5, store(1))
    assert not driven.wait_asking(20)
    assert driven.resyncs() == {"start": 1, "unknown_block": 1}


@pytest.mark.parametrize("name", UNKNOWN)
def test_later_it_means_that_something_was_missed_and_the_stream_recovers(driven: Driven, name: str) -> None:
    driven.synchronize(0, store(1))
    driven.advance(5.1)
    driven.live(1, store(2, parent=1))
    driven.live(2, UNKNOWN[name])
    assert not driven.serving
    assert driven.losses == ["unknown_block"]
    assert driven.holds(1, 2) == (0, 0)
    error = driven.match().error
    assert error is not None
    assert "1099" in error.sentence
    assert driven.wait_asking(0.15)
    driven.answer(2, store(1, 2))
    assert driven.holds(1, 2) == (2, 0)


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_same_hash_never_triggers_recovery_twice(driven: Driven, name: str) -> None:
    driven.synchronize(0, store(1))
    driven.advance(6)
    driven.live(1, UNKNOWN[name])
    assert driven.losses == ["unknown_block"]
    assert driven.wait_asking(0.15)
    driven.answer(1, store(1))
    for sequence in range(2, 6):
        driven.advance(6)
        driven.live(sequence, UNKNOWN[name])
        assert driven.serving
    assert driven.losses == ["unknown_block"]


def test_a_hash_that_was_an_orphan_does_not_trigger_recovery_later(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.live(1, copy(99))
    assert driven.wait_asking(1.05)
    driven.answer(1, store(1))
    driven.live(2, remove(99, medium="cpu"))
    driven.advance(10)
    driven.live(3, copy(99))
    driven.live(4, store(5, parent=99))
    assert driven.losses == []
    assert driven.serving


def test_each_new_unknown_hash_may_trigger_recovery(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    for sequence, block in enumerate((50, 60, 70), start=1):
        driven.advance(6)
        driven.live(sequence, copy(block))
        assert len(driven.losses) == sequence
        assert driven.wait_asking(0.5)
        driven.answer(sequence, store(1))
        assert driven.serving


def test_the_grace_is_renewed_by_every_snapshot(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.advance(6)
    driven.follower.resync("operator", drop=False)
    driven.answer(0, store(1))
    driven.advance(3)
    driven.live(1, copy(99))
    assert driven.serving


def test_an_unknown_block_in_a_message_held_back_during_a_snapshot_is_an_orphan(driven: Driven) -> None:
    """The view that it goes to is newer than any snapshot before."""
    driven.connect()
    assert driven.wait_asking(0.2)
    driven.live(1, store(5, parent=99))
    driven.answer(0, store(1))
    assert driven.serving
    assert driven.follower.status().mapped_blocks == 2
    assert driven.wait_asking(1.05)
    driven.answer(1, store(1))
    assert driven.losses == []


@pytest.mark.parametrize(
    "event",
    [store(5, parent=99, medium="disk"), copy(99, medium="disk"), store(5, parent=99, lora_id=3)],
    ids=["parent in an unknown medium", "copy in an unknown medium", "parent of an opaque block"],
)
def test_where_nothing_can_be_served_nothing_is_missed(driven: Driven, event: Event) -> None:
    """What a newer engine says of a third tier, or of blocks with LoRA, takes no stream down."""
    driven.synchronize(0, store(1))
    driven.advance(10)
    driven.live(1, event)
    assert driven.serving
    assert not driven.asking
    driven.live(2, store(99, parent=1))
    assert driven.holds(1, 99) == (2, 0)
    assert driven.losses == []


def test_a_block_in_an_unknown_medium_is_understood_when_its_parent_comes(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.advance(10)
    driven.live(1, store(5, parent=99, medium="disk"))
    driven.live(2, store(99, parent=1), copy(5))
    assert driven.holds(1, 99, 5) == (2, 1)


def test_unknown_removals_never_matter(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.advance(10)
    driven.live(1, remove(99, 98), remove(97, medium="cpu"))
    assert driven.serving
    assert not driven.asking


def test_over_real_sockets_the_stream_keeps_serving_and_calibrates_early(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(1, store(2, parent=1), copy(99), store(5, parent=98))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    request = puppet.request()
    assert portal.holds(puppet.spec, 1, 2) == (2, 0)
    request.answer(1, store(1, 2), store(98, parent=2), store(5, parent=98), copy(2, 99))
    portal.wait_holds(puppet.spec, (1, 2, 98, 5), (4, 0))
    assert portal.losses(puppet.spec) == []
    assert portal.resyncs(puppet.spec) == {"start": 1, "unknown_block": 1}

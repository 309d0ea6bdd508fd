"""Blocks that are not plain text in an unbroken chain: orphans, LoRA, images, kinds and types of tomorrow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streams.simulator import SimulatedEngine, TrafficConfig
from streams.simulator.messages import Event
from streams.status import StreamState
from tests.streams.driven import Driven
from tests.streams.harness import SIZE, Portal, copy, hash_of, remove, store, text
from tests.streams.puppet import Puppet, synchronize

MakeEngine = Callable[..., SimulatedEngine]


def counts(portal: Portal, puppet: Puppet) -> tuple[int, int, int]:
    status = portal.status(puppet.spec)
    return status.device_blocks, status.host_blocks, status.mapped_blocks


# Orphans.


def test_an_orphan_in_a_snapshot_is_remembered_and_in_nobodys_way(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), store(3, 4, parent=2), copy(97))
    assert portal.holds(puppet.spec, 1) == (1, 0)
    assert portal.holds(puppet.spec, 3) == (0, 0)
    assert counts(portal, puppet) == (1, 0, 4)


def test_removal_copy_and_child_of_an_orphan_are_understood(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(3, parent=2))
    puppet.publish(1, store(4, parent=3))
    puppet.publish(2, copy(3, 4))
    puppet.publish(3, remove(3, 4))
    puppet.publish(4, store(1))
    portal.wait_holds(puppet.spec, (1,), (1, 0))
    assert counts(portal, puppet) == (1, 0, 3)
    assert not puppet.asked(1.2), "an orphan's fate brought a snapshot request"
    assert portal.losses(puppet.spec) == []


def test_an_orphan_joins_with_its_descendants_when_its_parent_is_stored(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(
        portal, puppet, store(3, parent=2), store(4, parent=3), copy(4), remove(4), store(5, parent=3)
    )
    puppet.publish(1, store(1))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1, 2, 3, 4) == (1, 0)
    puppet.publish(2, store(2, parent=1))
    portal.wait_holds(puppet.spec, (1, 2, 3, 4), (3, 1))
    assert portal.holds(puppet.spec, 1, 2, 3, 5) == (4, 0)
    assert counts(portal, puppet) == (4, 1, 5)
    puppet.publish(3, remove(3))
    portal.wait_holds(puppet.spec, (1, 2, 3, 4), (2, 0))


def test_an_orphan_that_left_before_its_parent_came_does_not_come_back(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(3, parent=2))
    puppet.publish(1, remove(3))
    puppet.publish(2, store(1, 2))
    portal.wait_sequence(puppet.spec, 2)
    assert portal.holds(puppet.spec, 1, 2, 3) == (2, 0)
    puppet.publish(3, copy(3))
    portal.wait_holds(puppet.spec, (1, 2, 3), (2, 1))


def test_an_orphan_does_not_match_a_prompt_that_starts_with_its_tokens(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(3, parent=2), store(1))
    assert portal.holds(puppet.spec, 3) == (0, 0)
    assert portal.holds(puppet.spec, 1, 3) == (1, 0)


def test_orphans_of_a_real_snapshot_join_as_the_engine_computes_their_parents_again(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=1, device_blocks=80, host_blocks=20, orphan_probability=0.7)
    engine.step(150)
    truth = engine.truth()
    assert truth.placed_device_blocks < truth.device_blocks, "no orphans in the snapshot"
    portal.follow_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.status(engine.spec()).device_blocks == truth.placed_device_blocks
    engine.wait_for_subscribers()
    for last in range(150, 400):
        engine.step()
        if last % 50 == 0:
            portal.wait_sequence(engine.spec(), last)
            portal.wait_equals(engine.spec(), engine.truth)
    portal.wait_sequence(engine.spec(), 399)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.losses(engine.spec()) == []


# Opaque blocks.


OPAQUE: dict[str, Event] = {
    "lora id": {"lora_id": 0},
    "lora name": {"lora_name": "adapter"},
    "image": {"extra_keys": [["image", 0]]},
    "keys of another length": {"extra_keys": [None, None]},
    "token id beyond 31 bits": {"token_ids": [2**31, 1, 2, 3]},
    "token id beyond 64 bits signed": {"token_ids": [2**64 - 1, 1, 2, 3]},
    "negative token id": {"token_ids": [-1, 1, 2, 3]},
}


@pytest.mark.parametrize("name", OPAQUE)
@pytest.mark.parametrize("live", [False, True])
def test_an_opaque_block_and_its_descendants_never_match_nor_disturb(
    portal: Portal, puppet: Puppet, name: str, live: bool
) -> None:
    events = [store(1), store(2, parent=1) | OPAQUE[name], store(3, parent=2), copy(2, 3)]
    if live:
        synchronize(portal, puppet)
        puppet.publish(0, *events)
    else:
        synchronize(portal, puppet, *events)
    portal.wait_holds(puppet.spec, (1,), (1, 0))
    assert portal.holds(puppet.spec, 1, 2, 3) == (1, 0)
    assert portal.holds(puppet.spec, 2) == portal.holds(puppet.spec, 3) == (0, 0)
    assert counts(portal, puppet) == (1, 0, 3)
    puppet.publish(1, remove(2, 3), store(4, parent=3), copy(4), remove(4), remove(2, 3, 4, medium="cpu"))
    puppet.publish(2, store(5, parent=1))
    portal.wait_holds(puppet.spec, (1, 5), (2, 0))
    assert not puppet.asked(0.0)
    assert portal.losses(puppet.spec) == []
    assert portal.resyncs(puppet.spec) == {"start": 1}


def test_an_empty_lora_name_and_nil_keys_are_plain_text(portal: Portal, puppet: Puppet) -> None:
    fields = {"lora_id": None, "lora_name": "", "extra_keys": [None, None]}
    synchronize(portal, puppet, store(1, 2) | fields, store(3, parent=2, extra_keys=None))
    assert portal.holds(puppet.spec, 1, 2, 3) == (3, 0)


def test_blocks_before_an_image_match_and_those_from_it_on_do_not(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, 2, 3, 4, extra_keys=[None, None, ["image"], None]))
    assert portal.holds(puppet.spec, 1, 2, 3, 4) == (2, 0)
    assert counts(portal, puppet) == (2, 0, 4)


def test_a_lora_twin_of_a_plain_prompt_does_not_touch_it(portal: Portal, puppet: Puppet) -> None:
    twin = store(1, 2) | {"block_hashes": [501, 502], "lora_name": "a"}
    synchronize(portal, puppet, store(1, 2), twin)
    puppet.publish(1, remove(1, 2) | {"block_hashes": [501, 502]})
    puppet.publish(2, store(3, parent=2))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))
    puppet.publish(3, twin)
    puppet.publish(4, remove(1, 2, 3))
    portal.wait_holds(puppet.spec, (1, 2, 3), (0, 0))


def test_traffic_with_lora_and_images_keeps_the_answer_equal_to_the_truth(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(
        seed=2,
        device_blocks=120,
        host_blocks=60,
        orphan_probability=0.1,
        vllm_fields=True,
        traffic=TrafficConfig(lora_share=0.3, image_share=0.3),
    )
    engine.step(100)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(400)
    portal.wait_sequence(engine.spec(), 499)
    portal.wait_equals(engine.spec(), engine.truth)
    assert engine.truth().opaque_blocks > 10
    assert portal.losses(engine.spec()) == []


# What a newer engine may send.


def test_an_unknown_event_type_is_counted_and_shown_and_the_rest_applied(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1))
    strange = {"type": "BlockTeleported", "block_hashes": {"a": [1.5, None]}, "medium": 7}
    puppet.publish(1, strange, store(2, parent=1), {"type": "X" * 10_000})
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.counter(puppet.spec, "warnings:unknown_event") == 2
    assert len(portal.wait_warning(puppet.spec, "unknown_event")) < 300
    assert portal.status(puppet.spec).state is StreamState.SYNCHRONIZED
    assert portal.losses(puppet.spec) == []


def test_an_unknown_type_in_a_snapshot_is_counted_and_shown(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, {"type": "BlockTeleported"}, store(1))
    assert portal.holds(puppet.spec, 1) == (1, 0)
    assert portal.counter(puppet.spec, "warnings:unknown_event") == 1
    portal.wait_warning(puppet.spec, "unknown_event")


def test_a_store_in_an_unknown_medium_is_held_nowhere_but_known(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(1, store(2, parent=1, medium="nvme"), store(3, parent=2))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1, 2, 3) == (1, 0)
    assert "nvme" in portal.wait_warning(puppet.spec, "unknown_medium")
    puppet.publish(2, copy(2), remove(2, medium="nvme"))
    portal.wait_holds(puppet.spec, (1, 2, 3), (2, 1))
    assert portal.counter(puppet.spec, "warnings:unknown_medium") == 2
    assert portal.losses(puppet.spec) == []


def test_a_copy_in_an_unknown_medium_leaves_the_tiers_as_they_are(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1), copy(1), store(2, parent=1))
    puppet.publish(1, copy(1, 2, medium="STORAGE"), remove(1, 2, medium="STORAGE"))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1, 2) == (2, 0)
    assert counts(portal, puppet) == (2, 1, 2)


def test_kinds_that_make_no_prefix_are_skipped_and_counted(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, kv_cache_spec_kind="sink_full_attention"))
    puppet.publish(
        1,
        store(2, parent=1, kv_cache_spec_kind="sliding_window"),
        store(3, parent=77, kv_cache_spec_kind="mamba"),
        store(4, parent=1, kv_cache_spec_kind="mla_attention"),
    )
    portal.wait_holds(puppet.spec, (1, 4), (2, 0))
    assert portal.holds(puppet.spec, 1, 2) == (1, 0)
    assert portal.counter(puppet.spec, "warnings:skipped_kind") == 2
    portal.wait_warning(puppet.spec, "skipped_kind")
    assert portal.losses(puppet.spec) == []


def test_a_removal_of_a_group_with_skipped_kinds_alone_is_skipped_too(portal: Portal, puppet: Puppet) -> None:
    full = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
    window = {"kv_cache_spec_kind": "sliding_window", "group_idx": 1}
    synchronize(portal, puppet, store(1, 2, **full), store(1, 2, **window))
    puppet.publish(1, remove(2, group_idx=1))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1, 2) == (2, 0)
    puppet.publish(2, remove(2, group_idx=0))
    portal.wait_holds(puppet.spec, (1, 2), (1, 0))
    # A group that also stored what counts is believed.
    puppet.publish(3, store(2, parent=1, **(full | {"group_idx": 1})))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    puppet.publish(4, remove(2, group_idx=1))
    portal.wait_holds(puppet.spec, (1, 2), (1, 0))


def test_what_is_known_of_groups_survives_a_calibration(portal: Portal, puppet: Puppet) -> None:
    window = {"kv_cache_spec_kind": "sliding_window", "group_idx": 1}
    synchronize(portal, puppet, store(1, 2), store(1, 2, **window))
    portal.directory.resync()
    puppet.request().answer(0, store(1, 2), store(3, parent=2))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))
    puppet.publish(1, remove(1, 2, 3, group_idx=1))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1, 2, 3) == (3, 0)


def test_unknown_keys_of_an_event_are_ignored(portal: Portal, puppet: Puppet) -> None:
    extra = {"tomorrow": [1, {"a": None}], "locality": b"x", "session_id": 7.5}
    synchronize(portal, puppet, store(1) | extra)
    puppet.publish(1, store(2, parent=1) | extra, remove(9) | extra, store(3, parent=2))
    portal.wait_holds(puppet.spec, (1, 2, 3), (3, 0))


def test_a_batch_with_one_bad_event_is_not_applied_at_all(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    bad = store(3, parent=2)
    bad["token_ids"] = text(3)[:-1]
    puppet.publish(1, store(2, parent=1), bad)
    request = puppet.request()
    assert "token" in portal.wait_error(puppet.spec, "decode_error")
    request.answer(1, store(1), copy(2))
    portal.wait_sequence(puppet.spec, 1)
    assert portal.holds(puppet.spec, 1, 2) == (1, 0)
    # Had block 2 been stored by the bad batch, its copy would be on the Host now.
    assert counts(portal, puppet)[1] == 0


def test_an_absent_parent_of_a_stored_block_is_an_error(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    event = store(2)
    del event["parent_block_hash"]
    puppet.publish(1, event)
    portal.wait_error(puppet.spec, "decode_error")


def test_the_block_size_of_a_tokenless_copy_is_not_looked_at(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1))
    puppet.publish(1, {"type": "BlockStored", "block_hashes": [hash_of(1)], "token_ids": [], "medium": "cpu"})
    portal.wait(puppet.spec, lambda status: status.host_blocks == 1, "a host copy")
    puppet.publish(2, remove(1), copy(1) | {"block_size": SIZE + 7})
    portal.wait_holds(puppet.spec, (1,), (0, 1))


def test_removals_of_unknown_blocks_are_ignored_and_counted(driven: Driven) -> None:
    driven.synchronize(0, store(1))
    driven.live(1, remove(7, 8), remove(1))
    driven.live(2, remove(1, medium="cpu"))
    assert driven.serving
    assert driven.holds(1) == (0, 0)
    assert driven.follower.status().counters["warnings:unknown_removal"] == 2

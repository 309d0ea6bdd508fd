from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from streams.simulator import CacheConfig, EngineCache, Prompt, Traffic, TrafficConfig
from streams.simulator.messages import encode_batch
from streams.simulator.truth import Truth
from tests.simulator.peers import NaiveReader, normal, unpack

SHAPES: dict[str, CacheConfig] = {
    "device only": CacheConfig(block_size=4, device_blocks=60),
    "host at once": CacheConfig(block_size=4, device_blocks=40, host_blocks=50),
    "slow offload": CacheConfig(block_size=4, device_blocks=40, host_blocks=50, offload_delay=7),
    "orphans": CacheConfig(block_size=4, device_blocks=50, orphan_probability=0.3),
    "orphans and host": CacheConfig(
        block_size=4, device_blocks=40, host_blocks=30, offload_delay=3, orphan_probability=0.3
    ),
    "tiny host": CacheConfig(block_size=4, device_blocks=40, host_blocks=2),
    "one block": CacheConfig(block_size=1, device_blocks=1, host_blocks=1),
    "vllm": CacheConfig(block_size=4, device_blocks=40, host_blocks=20, vllm_fields=True),
    "hybrid": CacheConfig(
        block_size=4, device_blocks=40, host_blocks=20, vllm_fields=True, sliding_window=10
    ),
    "signed": CacheConfig(block_size=4, device_blocks=40, hash_form="signed"),
    "bytes": CacheConfig(block_size=4, device_blocks=40, host_blocks=20, hash_form="bytes"),
}
MIXED = TrafficConfig(
    system_prompts=4, templates=3, conversations=6, turns=4, lora_share=0.2, image_share=0.2
)


@pytest.fixture(params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def shape(request: pytest.FixtureRequest) -> CacheConfig:
    return SHAPES[request.param]


def messages(cache: EngineCache, seed: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """Events of `count` messages, as a reader decodes them."""
    traffic = Traffic(cache.config.block_size, MIXED, seed=seed)
    rng = random.Random(seed)
    while count:
        events = cache.clear() if rng.random() < 0.004 else cache.store(traffic.next())
        if events:
            yield unpack(encode_batch(events, timestamp=0.0))[1]
            count -= 1


def read(config: CacheConfig, events: list[Any]) -> NaiveReader:
    reader = NaiveReader(config.block_size)
    reader.apply(unpack(encode_batch(events, timestamp=0.0))[1])
    return reader


def agree(truth: Truth, reader: NaiveReader) -> None:
    prompts = list(truth.prompts())
    assert reader.hits_of(prompts) == [truth.hits(each) for each in prompts]


@pytest.mark.parametrize("seed", range(3))
def test_live_events_from_the_start_lead_to_the_truth(shape: CacheConfig, seed: int) -> None:
    cache = EngineCache(shape, seed=seed)
    reader = NaiveReader(shape.block_size)
    for count, events in enumerate(messages(cache, seed, 400)):
        reader.apply(events)
        truth = cache.truth()
        assert len(reader.tiers["gpu"]) == cache.device_blocks <= shape.device_blocks
        assert len(reader.tiers["cpu"]) == cache.host_blocks <= shape.host_blocks
        if count % 20 == 0:
            agree(truth, reader)
            assert truth.device_blocks == len(reader.prefixes("gpu"))
            assert truth.host_blocks == len(reader.prefixes("cpu"))
            held = truth.device_blocks + truth.host_blocks + truth.opaque_blocks
            assert held == cache.device_blocks + cache.host_blocks
    assert not reader.unknown


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_alone_tells_the_truth(shape: CacheConfig, seed: int) -> None:
    cache = EngineCache(shape, seed=seed)
    for _ in messages(cache, seed, 300):
        pass
    truth, reader = cache.truth(), read(shape, cache.snapshot())
    agree(truth, reader)
    assert len(reader.tiers["gpu"]) == cache.device_blocks
    assert len(reader.tiers["cpu"]) == cache.host_blocks
    assert truth.placed_device_blocks == len(reader.prefixes("gpu"))
    assert truth.placed_host_blocks == len(reader.prefixes("cpu"))


def test_a_snapshot_at_any_moment_and_live_events_after_it_lead_to_the_truth(shape: CacheConfig) -> None:
    cache = EngineCache(shape, seed=5)
    reader = NaiveReader(shape.block_size)
    joins = 0
    for count, events in enumerate(messages(cache, 5, 400)):
        reader.apply(events)
        if reader.unknown or count % 100 == 0:
            # Late join. A copy whose block was in no snapshot can only be learned from another one.
            reader = read(shape, cache.snapshot())
            joins += 1
        if count % 7 == 0:
            agree(cache.truth(), reader)
    assert joins > 4 if shape.offload_delay else joins == 4


def test_parents_come_first_in_a_snapshot_and_orphans_name_their_absent_parent() -> None:
    config = SHAPES["orphans and host"]
    cache = EngineCache(config, seed=2)
    orphans = 0
    for _ in messages(cache, 2, 300):
        seen: set[int] = set()
        for event in cache.snapshot():
            hashes = {normal(each) for each in event["block_hashes"]}
            if event["token_ids"]:
                parent = event["parent_block_hash"]
                orphans += parent is not None and normal(parent) not in seen
                seen |= hashes
            else:
                assert hashes <= seen, "host copies come after the blocks themselves"
    assert orphans > 100


def test_orphans_exist_only_where_asked_for() -> None:
    for name, wanted in (("device only", False), ("host at once", False), ("orphans", True)):
        cache = EngineCache(SHAPES[name], seed=3)
        gaps = 0
        for _ in messages(cache, 3, 300):
            truth = cache.truth()
            gaps += truth.placed_device_blocks < truth.device_blocks
        assert (gaps > 0) == wanted, name


def test_leaves_go_before_their_parents() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=6))
    cache.store([1, 2, 3])
    cache.store([1, 2, 4])
    events = cache.store([7, 8, 9, 10])
    truth = cache.truth()
    assert [event["type"] for event in events][:1] == ["BlockRemoved"]
    assert truth.hits([1, 2, 3]) == (2, 0), "the oldest leaf is gone"
    assert truth.hits([1, 2, 4]) == (2, 0), "then the next one"
    assert truth.hits([7, 8, 9, 10]) == (4, 0)


def test_requests_share_prefixes_and_store_only_what_is_new() -> None:
    cache = EngineCache(CacheConfig(block_size=2, device_blocks=20))
    (first,) = cache.store([1, 2, 3, 4, 5])
    (second,) = cache.store([1, 2, 3, 4, 5, 6])
    assert first["token_ids"] == [1, 2, 3, 4]
    assert second["token_ids"] == [5, 6]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert cache.store([1, 2, 3, 4]) == []


def test_a_prompt_longer_than_the_device_is_held_as_far_as_it_fits() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=4))
    cache.store(range(10))
    assert cache.truth().hits(range(10)) == (4, 0)


def test_host_copies_are_tokenless_and_come_after_the_asked_number_of_messages() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=2, host_blocks=5, offload_delay=3))
    cache.store([1, 2])
    events = cache.store([3, 4])
    assert [(each["type"], each["medium"]) for each in events] == [
        ("BlockRemoved", "gpu"),
        *[("BlockStored", "gpu")] * (len(events) - 1),
    ]
    assert cache.pending_copies == 2
    assert cache.truth().hits([1, 2]) == (0, 0)
    assert cache.idle() == [], "nothing is due, so no message and no time"
    gone = set(events[0]["block_hashes"])
    assert not gone & {each for event in cache.snapshot() for each in event["block_hashes"]}
    for token in (9, 10):
        assert {event["medium"] for event in cache.store([token])} == {"gpu"}
    copies = [event for event in cache.store([5, 6]) if event["medium"] == "cpu"]
    assert copies
    assert set(copies[0]["block_hashes"]) == gone
    assert (copies[0]["token_ids"], copies[0]["block_size"]) == ([], 0)
    assert cache.truth().hits([1, 2]) == (0, 2)


def test_copies_without_delay_come_before_the_removal_in_the_same_message() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=2, host_blocks=5))
    cache.store([1, 2])
    media = [(event["type"], event["medium"]) for event in cache.store([3, 4])]
    assert media[:2] == [("BlockStored", "cpu"), ("BlockRemoved", "gpu")]
    assert cache.truth().hits([1, 2]) == (0, 2)


def test_a_block_that_comes_back_to_the_device_is_in_both_tiers() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=2, host_blocks=5))
    cache.store([1, 2])
    cache.store([3, 4])
    cache.store([1])
    truth = cache.truth()
    assert truth.tiers([1, 2, 9]) == ["both", "host", "missing"]
    assert truth.hits([1, 2, 9]) == (1, 1)
    assert (truth.device_blocks, truth.host_blocks) == (2, 3)


def test_clearing_empties_both_tiers_and_forgets_copies_under_way() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=2, host_blocks=5, offload_delay=1))
    for token in range(9):
        cache.store([token])
    assert cache.clear() == [{"type": "AllBlocksCleared"}]
    assert (cache.device_blocks, cache.host_blocks, cache.pending_copies) == (0, 0, 0)
    assert cache.snapshot() == []
    assert list(cache.truth().prompts()) == []
    assert cache.idle() == []


def test_lora_and_image_blocks_are_apart_from_plain_text_and_so_are_their_descendants() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=20))
    lora = cache.store(Prompt([1, 2], lora="adapter-1"))
    image = cache.store(Prompt([5, 6, 7], images={1: "cat"}))
    truth = cache.truth()
    assert all(event["lora_name"] == "adapter-1" and event["lora_id"] is not None for event in lora)
    keys = [key for event in image for key in event.get("extra_keys", [None] * len(event["block_hashes"]))]
    assert keys == [None, [["cat", 0]], None]
    assert truth.hits([1, 2]) == (0, 0)
    assert truth.hits([5, 6, 7]) == (1, 0)
    assert (truth.device_blocks, truth.opaque_blocks) == (1, 4)
    cache.store([1, 2])
    assert cache.truth().hits([1, 2]) == (2, 0)


def test_hash_forms_are_the_same_hash() -> None:
    seen = []
    for form in ("unsigned", "signed", "bytes"):
        cache = EngineCache(CacheConfig(block_size=1, device_blocks=50, hash_form=form), seed=1)
        hashes = [each for event in cache.store(range(40)) for each in event["block_hashes"]]
        seen.append([normal(each) for each in hashes])
        if form == "signed":
            assert min(hashes) < 0
        if form == "bytes":
            assert {len(each) for each in hashes} == {32}
    assert seen[0] == seen[1] == seen[2]


def test_vllm_fields_are_the_ones_that_vllm_writes() -> None:
    cache = EngineCache(CacheConfig(block_size=1, device_blocks=1, vllm_fields=True))
    (stored,) = cache.store([1])
    removed = cache.store([2])[0]
    assert stored.keys() == {
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium",
        "lora_id", "lora_name", "group_idx", "kv_cache_spec_kind",
    }  # fmt: skip
    assert (stored["medium"], stored["kv_cache_spec_kind"]) == ("GPU", "full_attention")
    assert (removed["medium"], removed["group_idx"]) == ("GPU", 0)


def test_a_sliding_window_group_stores_and_removes_under_the_same_hashes() -> None:
    config = CacheConfig(block_size=1, device_blocks=4, vllm_fields=True, sliding_window=2)
    cache = EngineCache(config)
    events = cache.store([1, 2, 3])
    stored, removed = (
        [h for e in events if e["type"] == kind and e["group_idx"] == 1 for h in e["block_hashes"]]
        for kind in ("BlockStored", "BlockRemoved")
    )
    assert len(stored) == 3
    assert removed == stored[:1], "the window moves on"
    assert cache.truth().hits([1, 2, 3]) == (3, 0)
    of_group = [e for e in cache.snapshot() if e["group_idx"] == 1]
    assert {e["kv_cache_spec_kind"] for e in of_group} == {"sliding_window"}


def test_same_seed_same_events_and_another_seed_other_hashes(shape: CacheConfig) -> None:
    def run(seed: int) -> list[Any]:
        return list(messages(EngineCache(shape, seed=seed), 9, 50))

    assert run(1) == run(1)
    assert run(1)[0][0]["block_hashes"] != run(2)[0][0]["block_hashes"]


def test_the_cache_forgets_blocks_that_are_nowhere(shape: CacheConfig) -> None:
    cache = EngineCache(shape, seed=1)
    for _ in messages(cache, 1, 1500):
        pass
    truth = cache.truth()
    gone = [prompt for prompt in truth.prompts() if truth.tiers(prompt)[-1] == "missing"]
    assert len(gone) <= cache.pending_copies, "every branch ends in a block that is somewhere"


@pytest.mark.parametrize(
    "setting",
    [
        {"block_size": 0},
        {"device_blocks": 0},
        {"host_blocks": -1},
        {"offload_delay": -1},
        {"orphan_probability": 1.5},
        {"blocks_per_event": 0},
        {"sliding_window": 3},
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, Any]) -> None:
    name = next(iter(setting))
    with pytest.raises(ValueError, match=f"{name} is .*; allowed: "):
        CacheConfig(**setting)

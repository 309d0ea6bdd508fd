"""Bytes to events: what the protocol allows, what it refuses, and what must never happen."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.content_key import pack_tokens
from streams.core.errors import DecodeError
from streams.core.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, SkippedKind, Tier
from streams.core.interpret import Expected
from streams.core.raw_event import BIG_EVENT_BYTES
from streams.core.wire import SPLIT_BYTES, body_digest, decode_batch, decode_sequence, decode_steps

EXPECTED = Expected(block_size=2, dp_rank=0)


def stored(**changes: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "medium": "gpu",
    }
    return {name: value for name, value in (event | changes).items() if value is not ...}


def payload(*events: Any, timestamp: Any = 1.5, rank: Any = 0, extra: tuple[Any, ...] = ()) -> bytes:
    return msgpack.packb([timestamp, list(events), rank, *extra])


def decode(*events: Any, **header: Any) -> Batch:
    return decode_batch(payload(*events, **header), EXPECTED)


def test_a_batch_of_every_type_is_decoded() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [9], "medium": "CPU"}
    batch = decode(stored(), removed, {"type": "AllBlocksCleared"})
    assert batch.timestamp == 1.5
    assert batch.events == (
        BlockStored((7, 8), None, pack_tokens([1, 2, 3, 4]), Tier.DEVICE),  # type: ignore[arg-type]
        BlockRemoved((9,), Tier.HOST),  # type: ignore[arg-type]
        AllBlocksCleared(),
    )
    assert batch.clears


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("gpu", Tier.DEVICE), ("GPU", Tier.DEVICE), ("Cpu", Tier.HOST), (None, Tier.DEVICE), (..., Tier.DEVICE)],
)
def test_medium_names_the_tier(medium: Any, tier: Tier) -> None:
    (event,) = decode(stored(medium=medium)).events
    assert isinstance(event, BlockStored)
    assert event.tier is tier


@pytest.mark.parametrize(
    ("wire", "normalised"),
    [
        (0, 0),
        (-1, 2**64 - 1),
        (2**63, 2**63),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(31) + b"\x05", 5),
        (b"\xff" * 32, 2**64 - 1),
        (b"\x01\x02", 0x0102),
    ],
)
def test_every_form_of_a_hash_is_normalised_to_unsigned_64_bit(wire: Any, normalised: int) -> None:
    (event,) = decode(stored(block_hashes=[wire, 8], parent_block_hash=wire)).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes[0] == event.parent_block_hash == normalised


def test_tokenless_blocks_do_not_look_at_the_block_size() -> None:
    (event,) = decode(stored(token_ids=[], block_size=0, medium="cpu")).events
    assert isinstance(event, BlockStored)
    assert event.tokenless


@pytest.mark.parametrize(
    ("changes", "opaque"),
    [
        ({"lora_id": 1}, {0, 1}),
        ({"lora_id": 0}, {0, 1}),
        ({"lora_name": "adapter"}, {0, 1}),
        ({"lora_name": ""}, set()),
        ({"lora_id": None, "lora_name": None}, set()),
        ({"extra_keys": [None, ["image"]]}, {1}),
        ({"extra_keys": [None, None]}, set()),
        ({"extra_keys": None}, set()),
        ({"extra_keys": [None]}, {0, 1}),
        ({"extra_keys": []}, {0, 1}),
        ({"token_ids": [1, 2, 3, 2**31]}, {1}),
        ({"token_ids": [-1, 2, 3, 4]}, {0}),
        ({"token_ids": [1, 2**40, 3, 2**64 - 1]}, {0, 1}),
        ({"token_ids": [1, 2, 3, 2**31 - 1]}, set()),
    ],
)
def test_blocks_whose_content_is_more_than_text_are_opaque(changes: dict[str, Any], opaque: set[int]) -> None:
    (event,) = decode(stored(**changes)).events
    assert isinstance(event, BlockStored)
    assert event.opaque == opaque


def test_unknown_keys_and_trailing_elements_are_ignored() -> None:
    plain = decode(stored()).events
    assert decode(stored(new_field={"a": [1]}), extra=("more", {})).events == plain
    assert decode(stored() | {5: "not text"}).events == plain


def test_what_a_newer_engine_says_is_skipped_and_counted() -> None:
    newer = {"type": "BlockMoved", "block_hashes": 5, "medium": [1]}
    disk = {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE"}
    batch = decode(newer, newer, disk, stored(medium="disk"))
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.tier is None
    assert {(skipped.kind, skipped.count) for skipped in batch.warnings} == {
        ("unknown_event", 2),
        ("unknown_medium", 2),
    }
    assert "BlockMoved" in batch.warnings[0].sentence


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_reusable_kinds_are_indexed(kind: str | None) -> None:
    assert isinstance(decode(stored(kv_cache_spec_kind=kind)).events[0], BlockStored)


def test_other_kinds_are_skipped_whatever_their_blocks_look_like() -> None:
    batch = decode(stored(kv_cache_spec_kind="mamba", group_idx=3, block_size=999))
    assert batch.events == (SkippedKind("mamba", 3),)
    assert [skipped.kind for skipped in batch.warnings] == ["skipped_kind"]


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (None, 0), (3, 3)])
def test_the_rank_of_the_stream_is_accepted(rank: Any, expected: int) -> None:
    assert decode_batch(payload(rank=rank), Expected(2, expected)).events == ()


def test_a_missing_rank_means_rank_zero() -> None:
    assert decode_batch(msgpack.packb([1, []]), EXPECTED).timestamp == 1.0
    with pytest.raises(DecodeError, match="rank 1"):
        decode_batch(msgpack.packb([1, []]), Expected(2, 1))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        payload()[:-1],
        payload() + b"\x00",
        msgpack.packb({}),
        msgpack.packb([1.0]),
        payload(timestamp="now"),
        payload(timestamp=True),
        payload(rank=1),
        payload(rank="0"),
        payload(rank=True),
        msgpack.packb([1.0, {}, 0]),
        payload(5),
        payload([]),
        payload({}),
        payload({"type": 5}),
        payload({b"type": "BlockStored"}),
        payload(stored(block_hashes=...)),
        payload(stored(block_hashes=None)),
        payload(stored(block_hashes=[True, 8])),
        payload(stored(block_hashes=["a", "b"])),
        payload(stored(block_hashes=["AAAAAAAAAAU=", 8])),
        payload(stored(parent_block_hash="AAAAAAAAAAU=")),
        payload(stored(parent_block_hash="AAAAAAAAAAU=") | {5: "an odd key"}),
        payload(stored(block_hashes=[b"", 8])),
        payload(stored(block_hashes=[7.0, 8])),
        payload(stored(parent_block_hash=...)),
        payload(stored(parent_block_hash="x")),
        payload(stored(token_ids=...)),
        payload(stored(token_ids=None)),
        payload(stored(token_ids=[1, 2, 3])),
        payload(stored(token_ids=[1, 2, 3, True])),
        payload(stored(token_ids=[1, 2, 3, 4.0])),
        payload(stored(token_ids=[1, 2, 3, "4"])),
        payload(stored(token_ids=b"\x01\x02\x03\x04")),
        payload(stored(block_size=4)),
        payload(stored(block_size=2.0)),
        payload(stored(block_size=...)),
        payload(stored(block_size=-2)),
        payload(stored(medium=5)),
        payload(stored(extra_keys="ab")),
        payload(stored(group_idx="0")),
        payload(stored(kv_cache_spec_kind=1)),
        payload({"type": "BlockRemoved"}),
        payload({"type": "BlockRemoved", "block_hashes": 5}),
        b"\x91" * 100_000,
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff" * 5000,
    ],
)
def test_what_does_not_fit_is_a_decode_error(bad: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_batch(bad, EXPECTED)


def test_the_error_names_the_event_and_what_was_expected() -> None:
    with pytest.raises(DecodeError, match=r"event 1: token_ids holds 3 tokens, 2 blocks of 2 need 4"):
        decode(stored(), stored(token_ids=[1, 2, 3]))


@pytest.mark.parametrize("length", [0, 7, 9])
def test_a_sequence_has_exactly_eight_bytes(length: int) -> None:
    with pytest.raises(DecodeError, match="8"):
        decode_sequence(bytes(length))
    assert decode_sequence(b"\x01" + bytes(7)) == 2**56


def _long(blocks: int, seed: int = 1) -> dict[str, Any]:
    rng = random.Random(seed)
    return stored(
        block_hashes=[rng.getrandbits(64) for _ in range(blocks)],
        token_ids=[rng.randrange(2**31) for _ in range(2 * blocks)],
    )


def test_large_payloads_give_the_same_events_in_bounded_steps() -> None:
    events = [_long(200, seed) for seed in range(1500)]
    data = payload(*events)
    assert len(data) > 2 * SPLIT_BYTES
    whole: list[Any] = []
    sizes = []
    for step in decode_steps(data, EXPECTED):
        whole.extend(step)
        sizes.append(len(step))
    assert whole == [decode(event).events[0] for event in events]
    assert max(sizes) < len(events) / 5


def test_an_event_with_very_many_tokens_gives_the_same_as_small_ones() -> None:
    event = _long(BIG_EVENT_BYTES // 8) | {"unknown": list(range(10)), "lora_name": ""}
    data = payload(event)
    assert len(msgpack.packb(event)) > 2 * BIG_EVENT_BYTES
    (decoded,) = decode_batch(data, EXPECTED).events
    assert isinstance(decoded, BlockStored)
    assert decoded.tokens == pack_tokens(event["token_ids"])
    assert list(decoded.block_hashes) == event["block_hashes"]


@pytest.mark.parametrize("bad", [True, 1.0, "x", None])
def test_an_event_with_very_many_tokens_is_checked_as_small_ones_are(bad: Any) -> None:
    event = _long(BIG_EVENT_BYTES // 8)
    event["token_ids"][-1] = bad
    with pytest.raises(DecodeError):
        decode_batch(payload(event), EXPECTED)


@pytest.mark.parametrize("cut", [1, 10, 500_000])
def test_a_truncated_large_payload_is_refused(cut: int) -> None:
    data = payload(*[_long(200, seed) for seed in range(800)])
    with pytest.raises(DecodeError):
        decode_batch(data[:-cut], EXPECTED)


def test_claimed_lengths_allocate_nothing() -> None:
    claim = b"\xdd\x7f\xff\xff\xff"
    evil = [
        b"\x93\x01" + claim,
        b"\x93\x01\x91\x82\xa4type\xabBlockStored\xa9token_ids" + claim,
        b"\x93\x01\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xc6\x7f\xff\xff\xff",
        b"\x93\x01" + claim * 900,
        (b"\x93\x01\x91\xdf\x7f\xff\xff\xff") + b"\xa1a\x01" * (SPLIT_BYTES // 2),
    ]
    tracemalloc.start()
    try:
        for data in evil:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            with pytest.raises(DecodeError):
                decode_batch(data, EXPECTED)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 4 * len(data) + 2_000_000
    finally:
        tracemalloc.stop()


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    [*stored(), "lora_id", "lora_name", "extra_keys", "kv_cache_spec_kind", "group_idx", "x"]
)
_EVENTS = st.dictionaries(_NAMES, _VALUES, max_size=6).map(lambda changes: stored() | changes) | _VALUES


@settings(max_examples=400, deadline=None)
@given(st.lists(_EVENTS, max_size=3), st.floats() | _VALUES, st.integers(0, 1) | _VALUES)
def test_well_formed_nonsense_is_decoded_or_refused(events: list[Any], timestamp: Any, rank: Any) -> None:
    try:
        batch = decode_batch(msgpack.packb([timestamp, events, rank]), EXPECTED)
    except DecodeError:
        return
    assert isinstance(batch, Batch)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255), st.booleans())
def test_damaged_bytes_are_decoded_or_refused(noise: bytes, position: int, byte: int, cut: bool) -> None:
    good = bytearray(payload(stored(), stored(medium="cpu")))
    position %= len(good)
    good[position] = byte
    damaged = bytes(good[:position]) if cut else bytes(good) + noise
    for data in (noise, damaged):
        try:
            decode_batch(data, EXPECTED)
        except DecodeError:
            continue


def test_the_digest_of_a_body_leaves_the_timestamp_out() -> None:
    assert body_digest(payload(stored(), timestamp=1.0)) == body_digest(payload(stored(), timestamp=2.5))
    assert body_digest(payload(stored(), timestamp=1)) == body_digest(payload(stored(), timestamp=2))
    assert body_digest(payload(stored())) != body_digest(payload(stored(block_hashes=[7, 9])))
    assert body_digest(b"") == body_digest(b"")
    assert body_digest(b"garbage") != body_digest(b"other")

"""Keys in etcd: names, namespaces, and which of two registrations counts."""

from __future__ import annotations

import json

import pytest

from routing.instances.core import Deleted, Input, Registered, StoredLoad, StoredLoadDeleted
from routing.instances.keys import MAX_SHOWN_INVALID, KeyEvent, KeyNames, KeyTable
from routing.instances.model import LoadReport, Registration, Role

NAME = "a:1"
LOAD = b'{"waiting_requests_num": 2, "gpu_cache_usage_perc": 0.5}'


def value(incarnation: str = "one", **fields: object) -> bytes:
    return json.dumps({"incarnation_id": incarnation, **fields}).encode()


def put(key: str, content: bytes, revision: int, previous: bytes | None = None) -> KeyEvent:
    return KeyEvent(key.encode(), content, revision, revision, previous)


def deleted(key: str, revision: int, previous: bytes | None = None) -> KeyEvent:
    return KeyEvent(key.encode(), None, revision, 0, previous)


def feed(table: KeyTable, *events: KeyEvent, listed: bool = False) -> list[Input]:
    return table.inputs(events, listed=listed)


def table(namespace: str = "") -> KeyTable:
    return KeyTable(KeyNames(namespace))


@pytest.mark.parametrize(
    ("namespace", "prefix"),
    [
        ("", ""),
        ("prod-a", "/prod-a/"),
        ("/prod-a/", "/prod-a/"),
        ("//a/b//", "/a/b/"),
        ("/", ""),
        ("///", ""),
    ],
)
def test_the_namespace_is_trimmed_and_put_in_front(namespace: str, prefix: str) -> None:
    names = KeyNames(namespace)
    assert names.registration(Role.MIX, NAME) == f"{prefix}XLLM:MIX:{NAME}"
    assert names.load(NAME) == f"{prefix}XLLM:LOADMETRICS:{NAME}"


@pytest.mark.parametrize("namespace", ["", "prod-a"])
def test_one_range_holds_every_key_of_ours_and_nothing_of_the_cache_or_another_namespace(
    namespace: str,
) -> None:
    names = KeyNames(namespace)
    keys = names.range
    ours = [names.registration(role, name) for role in Role for name in (NAME, "\x7f", "é:1")]
    ours += [names.load(NAME)]
    assert all(keys.start <= key.encode() < keys.end for key in ours)
    others = [f"{names.prefix}XLLM:CACHE:x", f"{names.prefix}XLLM:SERVICE:x", f"/other/XLLM:DEFAULT:{NAME}"]
    assert not any(keys.start <= key.encode() < keys.end for key in others)


@pytest.mark.parametrize("namespace", ["", "prod-a"])
@pytest.mark.parametrize("name", ["a:1", "[::1]:8000", "host.example:8000"])
def test_keys_are_taken_apart_again(namespace: str, name: str) -> None:
    names = KeyNames(namespace)
    for role in Role:
        assert names.split(names.registration(role, name).encode()) == (role, name)
    assert names.split(names.load(name).encode()) == (None, name)
    assert names.split(f"{names.prefix}XLLM:EPOCH:1".encode()) is None


def test_the_role_comes_from_the_key_and_the_type_beats_it() -> None:
    (first,) = feed(table(), put("XLLM:PREFILL:a:1", value(), 5))
    assert first == Registered(Registration(NAME, Role.PREFILL, "one"), 5, "XLLM:PREFILL:a:1")
    (second,) = feed(table(), put("XLLM:PREFILL:a:1", value(type=3), 5))
    assert isinstance(second, Registered)
    assert second.registration.role is Role.MIX


def test_of_two_prefixes_the_one_written_last_counts() -> None:
    both = table()
    feed(both, put("XLLM:PREFILL:a:1", value("one"), 5), put("XLLM:DECODE:a:1", value("two"), 6))
    # the older key goes: that process had already been replaced
    assert feed(both, deleted("XLLM:PREFILL:a:1", 7, value("one"))) == []
    (gone,) = feed(both, deleted("XLLM:DECODE:a:1", 8, value("two")))
    assert gone == Deleted(NAME, "two")


def test_when_the_newer_of_two_keys_goes_the_other_counts_again() -> None:
    both = table()
    feed(both, put("XLLM:PREFILL:a:1", value("one"), 5), put("XLLM:DECODE:a:1", value("two"), 6))
    (back,) = feed(both, deleted("XLLM:DECODE:a:1", 7, value("two")))
    assert isinstance(back, Registered)
    assert (back.registration.incarnation_id, back.revision, back.key) == ("one", 5, "XLLM:PREFILL:a:1")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_a_listing_the_revision_counts_whatever_the_order(order: tuple[int, int]) -> None:
    events = (put("XLLM:PREFILL:a:1", value("old"), 5), put("XLLM:DECODE:a:1", value("new"), 9))
    inputs = feed(table(), *(events[i] for i in order), listed=True)
    last = inputs[-1]
    assert isinstance(last, Registered)
    assert last.registration.incarnation_id == "new"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_a_listing_of_a_restored_store_only_its_own_revisions_count(order: tuple[int, int]) -> None:
    follows = table()
    feed(follows, put("XLLM:DEFAULT:a:1", value("old"), 50), put("XLLM:PREFILL:a:1", value("older"), 100))
    events = (put("XLLM:DEFAULT:a:1", value("two"), 3), put("XLLM:PREFILL:a:1", value("three"), 5))
    inputs = feed(follows, *(events[i] for i in order), listed=True)
    assert [each.registration.incarnation_id for each in inputs] == ["three"]
    events = (put("XLLM:DEFAULT:a:1", value("two"), 2), put("XLLM:PREFILL:a:1", value("one"), 1))
    inputs = feed(follows, *(events[i] for i in order), listed=True)
    assert [each.registration.incarnation_id for each in inputs] == ["two"]


def test_in_a_listing_loads_come_after_their_instances() -> None:
    inputs = feed(
        table(), put("XLLM:LOADMETRICS:a:1", LOAD, 3), put("XLLM:DEFAULT:a:1", value(), 2), listed=True
    )
    assert [type(item) for item in inputs] == [Registered, StoredLoad]


def test_in_one_transaction_loads_come_after_their_instances() -> None:
    inputs = feed(
        table(),
        put("XLLM:LOADMETRICS:a:1", LOAD, 5),
        put("XLLM:PREFILL:a:1", value(), 5),
        put("XLLM:LOADMETRICS:a:1", LOAD, 6),
        put("XLLM:PREFILL:a:1", value(), 7),
    )
    assert [(type(item), item.revision) for item in inputs] == [  # type: ignore[union-attr]
        (Registered, 5),
        (StoredLoad, 5),
        (StoredLoad, 6),
        (Registered, 7),
    ]


def test_a_registration_that_counts_again_brings_the_load_that_stands_in_etcd() -> None:
    """A replica that starts now would find that registration and that load."""
    both = table()
    feed(both, put("XLLM:PREFILL:a:1", value("one"), 5), put("XLLM:DECODE:a:1", value("two"), 6))
    feed(both, put("XLLM:LOADMETRICS:a:1", LOAD, 7))
    back, load = feed(both, deleted("XLLM:DECODE:a:1", 8, value("two")))
    assert isinstance(back, Registered)
    assert load == StoredLoad(NAME, LoadReport(2, 0.5), 7)
    feed(both, put("XLLM:DECODE:a:1", value("two"), 9), deleted("XLLM:LOADMETRICS:a:1", 10))
    assert len(feed(both, deleted("XLLM:DECODE:a:1", 11, value("two")))) == 1


def test_a_deletion_names_the_incarnation_that_is_gone() -> None:
    one = table()
    feed(one, put("XLLM:DEFAULT:a:1", value("one"), 5))
    assert feed(one, deleted("XLLM:DEFAULT:a:1", 6)) == [Deleted(NAME, "one")]
    assert feed(one, deleted("XLLM:DEFAULT:a:1", 7)) == []


def test_loads_are_passed_on_with_their_revision() -> None:
    one = table()
    assert feed(one, put("XLLM:LOADMETRICS:a:1", LOAD, 9)) == [StoredLoad(NAME, LoadReport(2, 0.5), 9)]
    assert feed(one, deleted("XLLM:LOADMETRICS:a:1", 10)) == [StoredLoadDeleted(NAME)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"nonsense", "not JSON"),
        (b'{"dp_size": "2"}', "dp_size"),
        (b"x" * 1024 * 1024, "1,048,576 bytes long"),
        (b'{"incarnation_id": "' + b"x" * 1024 * 1024 + b'"}', "bytes long"),
    ],
)
def test_a_value_that_does_not_parse_changes_nothing_and_is_shown(content: bytes, reason: str) -> None:
    one = table()
    feed(one, put("XLLM:DEFAULT:a:1", value("one"), 5))
    inputs = feed(
        one,
        put("XLLM:DEFAULT:a:1", content, 6),
        put("XLLM:LOADMETRICS:a:1", content, 7),
        put("XLLM:DEFAULT:b:1", value("other"), 8),
    )
    assert inputs == [Registered(Registration("b:1", incarnation_id="other"), 8, "XLLM:DEFAULT:b:1")]
    assert [item.key for item in one.invalid] == ["XLLM:DEFAULT:a:1", "XLLM:LOADMETRICS:a:1"]
    assert reason in one.invalid[0].reason
    assert one.invalid_total == 2
    # the registration from before still stands, and ends with its key
    assert feed(one, deleted("XLLM:DEFAULT:a:1", 9, content)) == [Deleted(NAME, "one")]
    assert [item.key for item in one.invalid] == ["XLLM:LOADMETRICS:a:1"]
    feed(one, put("XLLM:LOADMETRICS:a:1", LOAD, 10))
    assert one.invalid == ()
    assert one.invalid_total == 2


def test_impossible_keys_are_shown_and_foreign_ones_are_not_ours() -> None:
    one = table()
    assert feed(one, KeyEvent(b"XLLM:DEFAULT:\xff", value(), 5), put("XLLM:DEFAULT:", value(), 6)) == []
    assert feed(one, put("XLLM:EPOCH:7", b"whatever", 7)) == []
    assert [item.key for item in one.invalid] == ["XLLM:DEFAULT:\\\\xff", "XLLM:DEFAULT:"]
    feed(one, KeyEvent(b"XLLM:DEFAULT:\xff", None, 8))
    assert [item.key for item in one.invalid] == ["XLLM:DEFAULT:"]


def test_not_everything_that_is_wrong_is_shown() -> None:
    one = table()
    feed(one, *(put(f"XLLM:DEFAULT:a:{n}", b"x", n) for n in range(1, 200)))
    assert len(one.invalid) == MAX_SHOWN_INVALID
    assert one.invalid[-1].key == "XLLM:DEFAULT:a:199"
    assert one.invalid_total == 199

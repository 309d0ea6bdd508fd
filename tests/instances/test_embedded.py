"""Leases of the embedded registry."""

from __future__ import annotations

import pytest

from routing.instances.core import Deleted, Registered
from routing.instances.embedded import Entry, LeaseTable, Origin
from routing.instances.model import Registration

ONE = Registration("a:1", incarnation_id="one")
TWO = Registration("a:1", incarnation_id="two")
OTHER = Registration("b:1")


def test_a_lease_ends_once_unless_it_is_renewed() -> None:
    leases = LeaseTable()
    assert leases.put(ONE, 5.0, 100.0) == [Registered(ONE)]
    assert leases.next_deadline() == 105.0
    assert leases.expire(104.999) == []
    assert leases.renew("a:1", 104.0) == []
    assert leases.expire(108.999) == []
    assert leases.expire(109.0) == [Deleted("a:1", "one", "no heartbeat for 5 s")]
    assert leases.expire(200.0) == []
    assert leases.next_deadline() is None


def test_a_heartbeat_after_the_end_registers_again() -> None:
    leases = LeaseTable()
    leases.put(ONE, 5.0, 0.0)
    leases.expire(5.0)
    assert leases.renew("a:1", 6.0) == [Registered(ONE)]
    assert leases.next_deadline() == 11.0


def test_registering_again_takes_the_new_lease() -> None:
    leases = LeaseTable()
    leases.put(ONE, 5.0, 0.0)
    assert leases.put(TWO, 60.0, 1.0) == [Registered(TWO)]
    assert leases.expire(6.0) == []
    assert leases.next_deadline() == 61.0


def test_a_deleted_lease_is_not_revived_by_heartbeats() -> None:
    leases = LeaseTable()
    leases.put(ONE, 5.0, 0.0)
    assert leases.delete("a:1") == [Deleted("a:1", "one", "it was deleted over HTTP")]
    assert leases.delete("a:1") == []
    assert leases.renew("a:1", 1.0) == []
    assert leases.revive("a:1", "one", 1.0) == []


def test_an_expired_lease_that_was_removed_has_to_register_again() -> None:
    leases = LeaseTable()
    leases.put(ONE, 5.0, 0.0)
    assert leases.forget("a:1", 4.0) == []
    assert leases.get("a:1") is not None
    leases.expire(5.0)
    assert leases.forget("a:1", 6.0) == []
    assert leases.get("a:1") is None


def test_entered_instances_are_taken_over_and_compared_with_the_last_time() -> None:
    leases = LeaseTable()
    assert leases.replace_entered([Entry(ONE), Entry(OTHER, 10.0)], 0.0) == [
        Registered(ONE),
        Registered(OTHER),
    ]
    assert leases.next_deadline() == 10.0
    assert leases.replace_entered([Entry(ONE), Entry(OTHER, 10.0)], 5.0) == []
    assert leases.next_deadline() == 10.0
    changed = leases.replace_entered([Entry(TWO)], 6.0)
    assert changed == [Deleted("b:1", None, "it was removed in the admin"), Registered(TWO)]
    assert leases.expire(1e9) == []


def test_what_registered_over_http_is_not_touched_by_the_admin() -> None:
    leases = LeaseTable()
    leases.put(ONE, 5.0, 0.0)
    assert leases.replace_entered([Entry(TWO)], 1.0) == []
    assert leases.replace_entered([], 1.0) == []
    found = leases.get("a:1")
    assert found is not None
    assert (found.registration, found.origin) == (ONE, Origin.API)


def test_an_entered_instance_comes_back_by_a_heartbeat_of_its_incarnation_even_after_its_removal() -> None:
    leases = LeaseTable()
    leases.replace_entered([Entry(ONE, 5.0)], 0.0)
    leases.expire(5.0)
    assert leases.forget("a:1", 5.5) == []
    assert leases.revive("a:1", "two", 6.0) == []
    assert leases.revive("a:1", "one", 6.0) == [Registered(ONE)]
    assert leases.next_deadline() == 11.0
    assert leases.revive("a:1", "one", 7.0) == []


@pytest.mark.parametrize("entered_first", [True, False])
@pytest.mark.parametrize("end", ["it runs out", "it is deleted"])
def test_what_registered_over_http_beats_what_was_entered_until_that_instance_is_removed(
    entered_first: bool, end: str
) -> None:
    leases = LeaseTable()
    if entered_first:
        leases.replace_entered([Entry(TWO)], 0.0)
    assert leases.put(ONE, 5.0, 1.0) == [Registered(ONE)]
    assert leases.replace_entered([Entry(TWO), Entry(OTHER)], 2.0) == [Registered(OTHER)]
    if end == "it is deleted":
        leases.delete("a:1")
    else:
        leases.expire(6.0)
    assert leases.forget("a:1", 20.0) == [Registered(TWO)]
    found = leases.get("a:1")
    assert found is not None
    assert (found.origin, found.expires_at) == (Origin.ADMIN, None)


def test_what_was_taken_out_meanwhile_does_not_come_back() -> None:
    leases = LeaseTable()
    leases.replace_entered([Entry(TWO)], 0.0)
    leases.put(ONE, 5.0, 1.0)
    assert leases.replace_entered([], 2.0) == []
    leases.expire(6.0)
    assert leases.forget("a:1", 20.0) == []


def test_an_entered_instance_that_was_deleted_over_http_waits_for_a_heartbeat_or_another_change() -> None:
    leases = LeaseTable()
    leases.replace_entered([Entry(ONE)], 0.0)
    assert leases.delete("a:1") == [Deleted("a:1", "one", "it was deleted over HTTP")]
    assert leases.delete("a:1") == []
    assert leases.forget("a:1", 1.0) == []
    assert leases.replace_entered([Entry(ONE), Entry(OTHER)], 2.0) == [Registered(OTHER)]
    assert leases.revive("a:1", "one", 3.0) == [Registered(ONE)]
    leases.delete("a:1")
    assert leases.replace_entered([Entry(ONE, 9.0), Entry(OTHER)], 4.0) == [Registered(ONE)]
    assert leases.next_deadline() == 13.0

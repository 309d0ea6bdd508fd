from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from kvportal import live
from kvportal.models import Replica
from kvportal.operations import Operations
from kvportal.opsstate import replica_state
from kvportal.records import ReplicaView, read_replicas, write_replica
from streams import console
from streams.models import ResyncRequest, Stream, StreamStateChange
from streams.resync import ResyncOrder, ResyncSource
from streams.status import Fault, StreamState
from tests.admin.values import NOW, Clock, FakeDirectory, change, lost, spec, status
from tests.support.waiting import wait_until


@pytest.fixture
def operations() -> Iterator[Operations]:
    own = Operations("here")
    yield own
    if own.history.running:
        own.stop()


@pytest.mark.django_db(transaction=True)
def test_one_replica_from_start_to_stop(operations: Operations) -> None:
    directory = FakeDirectory(status(1), status(2))
    operations.follow(directory)
    operations.start()
    assert console.console() is operations
    assert live.current() is operations.live
    operations.record_change(change(1))
    operations.order_resync(ResyncOrder("ann", ResyncSource.API, time.time()))
    wait_until(lambda: operations.history.health().queued == 0 and operations.replicas()[0])
    operations.stop()
    assert console.console() is not operations
    assert live.current() is None
    assert not operations.history.running
    assert not operations.live.running
    assert len(directory.told) == 2
    assert StreamStateChange.objects.count() == 1
    assert ResyncRequest.objects.get().results.get().replica == "here"
    assert Stream.objects.count() == 2
    assert not Replica.objects.exists(), "an orderly stop leaves no replica behind"


@pytest.mark.django_db
def test_new_stream_is_listed_without_waiting_for_the_next_round(operations: Operations) -> None:
    directory = FakeDirectory()
    operations.follow(directory)
    operations.history.step()
    directory.now_statuses = (status(1),)
    operations.history.step()
    assert not Stream.objects.exists()
    operations.record_change(change(1))
    operations.history.step()
    assert Stream.objects.count() == 1


def test_start_of_a_stream_is_no_change(operations: Operations) -> None:
    starting = Fault("connecting", "not connected yet")
    operations.record_change(change(old=StreamState.CONNECTING, new=StreamState.CONNECTING, fault=starting))
    assert operations.history.health().queued == 0
    operations.record_change(change(old=StreamState.CONNECTING, new=StreamState.SYNCING, fault=starting))
    assert operations.history.health().queued == 1


@pytest.mark.django_db
def test_replicas_see_each_other(operations: Operations) -> None:
    now = time.time()
    theirs = {"streams": {"10.0.0.1:8000/dp0": {"state": "unsynchronized", "error": "sequence_gap: x"}}}
    write_replica(ReplicaView("there", now - 60, now, theirs))
    operations.follow(FakeDirectory(status(1)))
    operations.history.step()
    state = json.loads(operations.live.full()[1])
    assert {one["name"]: one["gone_since"] for one in state["replicas"]} == {"here": None, "there": None}
    assert state["streams"][0]["elsewhere"] == [
        {"replica": "there", "state": "unsynchronized", "error": "sequence_gap: x"}
    ]
    own = next(view for view in read_replicas() if view.name == "here")
    assert own.state["streams"]["10.0.0.1:8000/dp0"]["state"] == "synchronized"


@pytest.mark.django_db
def test_stream_is_followed_as_long_as_a_running_replica_follows_it(operations: Operations) -> None:
    directory = FakeDirectory(status(1), status(2))
    operations.follow(directory)
    now = time.time()
    for name, number, heartbeat in (("there", 3, now), ("gone", 4, now - 600)):
        write_replica(ReplicaView(name, now - 900, heartbeat, replica_state([status(number)])))
    operations.history.step()
    assert operations.followed() == {spec(number).id for number in (1, 2, 3)}
    directory.now_statuses = (status(1),)
    assert operations.followed() == {spec(number).id for number in (1, 3)}, (
        "of this replica it is known at once"
    )


@pytest.mark.django_db
def test_row_of_a_stream_tells_to_the_second_when_it_was_left() -> None:
    clock = Clock()
    operations = Operations("here", clock=clock)
    operations.history._monotonic = clock
    directory = FakeDirectory(status(1), status(2))
    operations.follow(directory)
    operations.history.step()
    clock.now += 3.5
    directory.now_statuses = (status(1),)
    operations.history.step()
    seen = {str(row): row.last_seen.timestamp() for row in Stream.objects.all()}
    assert seen == {"10.0.0.1:8000/dp0": NOW, "10.0.0.2:8000/dp0": NOW + 3.5}


def codes(operations: Operations) -> list[str]:
    return [banner["code"] for banner in json.loads(operations.live.full()[1])["banners"]]


def test_index_that_is_off_or_empty_is_said(operations: Operations) -> None:
    assert codes(operations) == ["index_off"]
    directory = FakeDirectory()
    operations.follow(directory)
    assert codes(operations) == ["no_streams"]
    directory.now_statuses = (lost(),)
    assert codes(operations) == []


def test_worker_that_fails_is_said(operations: Operations) -> None:
    operations.follow(FakeDirectory(status()))
    operations.commands.worker_error = "ConnectionError: refused"
    assert codes(operations) == ["worker_failing"]

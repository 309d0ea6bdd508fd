from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from channels.layers import InMemoryChannelLayer, channel_layers

from kvportal import commands as commands_module
from kvportal import records
from kvportal.commands import GROUP, SETTLE_SECONDS, Commands, judge
from kvportal.history import History
from streams.models import ResyncRequest, ResyncResult
from streams.resync import EVERY_STREAM, OutcomeState, ResyncOrder, ResyncSource, ResyncTarget
from streams.status import Fault
from tests.admin.values import NOW, Clock, FakeDirectory, lost, spec, status


class Replica:
    """Commands of one replica with a clock that tests move."""

    def __init__(self, name: str = "here", *, streams: int = 2) -> None:
        self.clock = Clock()
        self.monotonic = Clock(0.0)
        self.directory = FakeDirectory(*(status(n) for n in range(1, streams + 1)))
        self.history = History(name, clock=self.clock)
        self.commands = Commands(self.directory, self.history, clock=self.clock, monotonic=self.monotonic)

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.monotonic.now += seconds


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
def layer() -> Iterator[InMemoryChannelLayer]:
    """A channel layer of the test's own."""
    own = InMemoryChannelLayer()
    before = channel_layers.set("default", own)
    yield own
    channel_layers.set("default", before) if before else channel_layers.backends.pop("default", None)


@pytest.fixture
async def attached(replica: Replica, layer: InMemoryChannelLayer) -> AsyncIterator[Replica]:
    replica.commands.attach(asyncio.get_running_loop())
    await until(lambda: layer.groups.get(GROUP))
    yield replica
    replica.commands.detach()
    await until(lambda: not layer.groups.get(GROUP))


async def until(condition: Any) -> None:
    """Wait for a condition of another task; what is waited for has no event to wait on."""
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


def order(*targets: ResyncTarget, drop: bool = False) -> ResyncOrder:
    return ResyncOrder("ann", ResyncSource.PAGE, NOW, targets or EVERY_STREAM, drop)


def states(replica: Replica) -> list[str]:
    return [record.state for record in replica.history._audits if hasattr(record, "state")]


# ---- carrying out


def test_without_a_loop_an_order_is_carried_out_at_once(replica: Replica) -> None:
    assert replica.commands.order(order(drop=True)) == 2
    assert replica.directory.told == [(spec(1).id, True), (spec(2).id, True)]


def test_order_for_one_stream_reaches_that_one_alone(replica: Replica) -> None:
    assert replica.commands.order(order(ResyncTarget("10.0.0.2:8000", 0))) == 1
    assert replica.directory.told == [(spec(2).id, False)]


def test_stream_named_twice_is_told_once(replica: Replica) -> None:
    replica.commands.order(order(ResyncTarget("10.0.0.2:8000"), ResyncTarget("10.0.0.2:8000", 0)))
    assert replica.directory.told == [(spec(2).id, False)]


def test_order_heard_of_twice_is_carried_out_once(replica: Replica) -> None:
    placed = order()
    replica.commands.order(placed)
    replica.commands.carry_out(placed)
    replica.commands.receive({"type": "resync.ordered", "order": placed.to_message()})
    assert len(replica.directory.told) == 2


def test_failure_of_the_directory_becomes_the_outcome(replica: Replica) -> None:
    replica.directory.failure = RuntimeError("closed")
    replica.commands.order(order())
    assert states(replica) == [OutcomeState.FAILED]


def test_order_without_a_matching_stream_says_so(replica: Replica) -> None:
    assert replica.commands.order(order(ResyncTarget("elsewhere:1", 0))) == 0
    assert states(replica) == [OutcomeState.NO_MATCH]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "resync.ordered"},
        {"type": "resync.ordered", "order": {"key": "x"}},
        {"type": "resync.ordered", "order": None},
        {"type": "something.newer", "order": order().to_message()},
    ],
)
def test_message_that_is_not_understood_is_logged_and_ignored(
    replica: Replica, message: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    replica.commands.receive(message)
    assert replica.directory.told == []
    assert "not understood" in caplog.text


# ---- outcomes


def test_outcome_waits_for_the_new_snapshots(replica: Replica) -> None:
    replica.commands.order(order())
    replica.pass_time(1)
    replica.commands.follow(replica.clock())
    assert states(replica) == [OutcomeState.STARTED]
    replica.directory.now_statuses = tuple(status(n, snapshot_at=NOW + 1.5) for n in (1, 2))
    replica.pass_time(1)
    replica.commands.follow(replica.clock())
    replica.commands.follow(replica.clock())
    assert states(replica) == [OutcomeState.STARTED, OutcomeState.DONE]
    assert replica.history._audits[-1].detail == "2 of 2 streams have a new snapshot after 2.0 s."  # type: ignore[union-attr]


def test_outcome_names_the_stream_that_did_not_make_it() -> None:
    slow = lost(2, error=Fault("snapshot_timeout", "no complete snapshot within 2000 ms"))
    found = {one.spec.id: one for one in (status(1, snapshot_at=NOW + 1), slow)}
    streams = tuple(found)
    assert judge(streams, found, NOW, NOW + 5) is None
    verdict = judge(streams, found, NOW, NOW + SETTLE_SECONDS)
    assert verdict is not None
    state, settled, detail = verdict
    assert (state, settled) == (OutcomeState.INCOMPLETE, 1)
    assert "1 of 2 streams" in detail
    assert "10.0.0.2:8000/dp0: snapshot_timeout: no complete snapshot" in detail


def test_stream_that_left_does_not_hold_an_order_open() -> None:
    verdict = judge((spec(1).id, spec(2).id), {spec(1).id: status(1, snapshot_at=NOW + 1)}, NOW, NOW + 2)
    assert verdict is not None
    assert verdict[0] is OutcomeState.DONE
    assert "1 left the directory" in verdict[2]


# ---- the database


@pytest.mark.django_db
def test_order_leaves_an_audit_row_with_this_replicas_outcome(replica: Replica) -> None:
    replica.commands.order(order(drop=True))
    replica.history.step()
    result = ResyncResult.objects.get()
    assert (result.request.actor, result.request.drop, result.replica) == ("ann", True, "here")
    assert (result.state, result.reached) == ("started", 2)


@pytest.mark.django_db
def test_order_in_the_database_alone_is_found_and_carried_out_once(replica: Replica) -> None:
    replica.commands.poll(NOW)
    ResyncRequest.record(order())
    replica.commands.poll(NOW + 5)
    assert len(replica.directory.told) == 2
    replica.commands.poll(NOW + 10)
    replica.history.step()
    replica.commands.poll(NOW + 15)
    assert len(replica.directory.told) == 2
    assert ResyncResult.objects.get().state == "started"


@pytest.mark.django_db
def test_orders_from_before_the_start_are_not_carried_out(replica: Replica) -> None:
    ResyncRequest.record(order())
    replica.commands.poll(NOW)
    replica.commands.poll(NOW + 5)
    assert replica.directory.told == []


@pytest.mark.django_db
def test_two_replicas_leave_an_outcome_each() -> None:
    here, there = Replica("here"), Replica("there")
    there.commands.poll(NOW)
    here.commands.order(order())
    here.history.step()
    there.commands.poll(NOW + 1)
    there.history.step()
    assert [result.replica for result in ResyncRequest.objects.get().results.all()] == ["here", "there"]
    assert len(there.directory.told) == 2


def test_without_a_database_the_resync_happens_at_once_and_is_audited_later(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, db: None
) -> None:
    from django.db import OperationalError

    def fail(*_: object) -> None:
        raise OperationalError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(ResyncRequest, "record", fail)
        replica.commands.order(order())
        assert not replica.history.step()
        assert len(replica.directory.told) == 2
    assert replica.history.step()
    assert ResyncResult.objects.get().reached == 2


# ---- the channel layer


async def test_order_goes_through_the_channel_layer_to_every_replica(attached: Replica) -> None:
    other = Replica("there")
    other.commands.attach(asyncio.get_running_loop())
    layer = commands_module.get_channel_layer()
    await until(lambda: len(layer.groups[GROUP]) == 2)
    attached.commands.order(order())
    await until(lambda: len(attached.directory.told) == len(other.directory.told) == 2)
    other.commands.detach()
    await until(lambda: len(layer.groups[GROUP]) == 1)


async def test_order_from_another_thread_arrives(attached: Replica) -> None:
    assert await asyncio.to_thread(attached.commands.order, order()) == 2
    await until(lambda: len(attached.directory.told) == 2)


async def test_lost_message_delays_an_order_and_does_not_lose_it(
    attached: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallow(*_: object) -> None:
        pass

    monkeypatch.setattr(commands_module.get_channel_layer(), "group_send", swallow)
    attached.commands.order(order())
    await asyncio.sleep(0)
    attached.commands.follow(NOW)
    assert attached.directory.told == []
    attached.pass_time(commands_module.NUDGE_SECONDS)
    attached.commands.follow(attached.clock())
    assert len(attached.directory.told) == 2


async def test_order_is_carried_out_although_neither_the_layer_nor_the_database_answers(
    attached: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history's thread, which looks after lost messages, waits for the database meanwhile."""

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(commands_module, "NUDGE_SECONDS", 0.01)
    monkeypatch.setattr(commands_module.get_channel_layer(), "group_send", hang)
    attached.commands.order(order())
    await until(lambda: len(attached.directory.told) == 2)


async def test_channel_layer_that_fails_is_done_without(
    attached: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(commands_module.get_channel_layer(), "group_send", fail)
    attached.commands.order(order())
    await until(lambda: len(attached.directory.told) == 2)


async def test_worker_starts_again_after_an_exception(
    replica: Replica, layer: InMemoryChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_module, "RESTART_SECONDS", (0.01, 0.02))
    receive, channels = layer.receive, []

    async def flaky(channel: str) -> Any:
        channels.append(channel)
        if len(channels) <= 3:
            raise RuntimeError("broken pipe")
        return await receive(channel)

    monkeypatch.setattr(layer, "receive", flaky)
    replica.commands.attach(asyncio.get_running_loop())
    await until(lambda: len(channels) == 4)
    assert replica.commands.worker_error is None
    assert len(set(channels)) == 4
    await layer.group_send(GROUP, {"type": "resync.ordered", "order": order().to_message()})
    await until(lambda: len(replica.directory.told) == 2)
    replica.commands.detach()
    await until(lambda: not layer.groups.get(GROUP))


async def test_worker_that_cannot_start_says_why(
    replica: Replica, layer: InMemoryChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(layer, "group_add", fail)
    replica.commands.attach(asyncio.get_running_loop())
    await until(lambda: replica.commands.worker_error)
    assert replica.commands.worker_error == "ConnectionError: refused"
    replica.commands.order(order())
    assert len(replica.directory.told) == 2
    replica.commands.detach()


async def test_a_channel_layer_that_is_away_is_logged_once_and_so_is_its_return(
    replica: Replica,
    layer: InMemoryChannelLayer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(commands_module, "RESTART_SECONDS", (0.01, 0.02))
    caplog.set_level("INFO", commands_module.__name__)
    group_add, attempts = layer.group_add, []

    async def away(group: str, channel: str) -> None:
        attempts.append(channel)
        if len(attempts) <= 5:
            raise ConnectionError("refused")
        await group_add(group, channel)

    monkeypatch.setattr(layer, "group_add", away)
    replica.commands.attach(asyncio.get_running_loop())
    await until(lambda: layer.groups.get(GROUP))
    replica.commands.detach()
    failed, works = (record.getMessage() for record in caplog.records)
    assert failed.startswith("the channel layer (KVPORTAL_REDIS_URL) fails, ")
    assert failed.endswith(": ConnectionError: refused")
    assert works == "the channel layer works again"


async def test_worker_joins_its_group_again(
    replica: Replica, layer: InMemoryChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_module, "REJOIN_SECONDS", 0.02)
    replica.commands.attach(asyncio.get_running_loop())
    await until(lambda: layer.groups.get(GROUP))
    layer.groups.clear()
    await until(lambda: layer.groups.get(GROUP))
    replica.commands.detach()
    await until(lambda: not layer.groups.get(GROUP))


async def test_detached_worker_lets_orders_through_all_the_same(attached: Replica) -> None:
    attached.commands.detach()
    attached.commands.order(order())
    assert len(attached.directory.told) == 2


def test_old_orders_are_forgotten_so_that_memory_stays_bounded(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_module, "REMEMBERED", 10)
    for _ in range(30):
        replica.commands.carry_out(order(ResyncTarget("elsewhere:1", 0)))
    assert len(replica.commands._carried_out) == 10
    assert not replica.commands._placed


@pytest.mark.django_db
def test_baseline_is_taken_from_the_first_look_that_works(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(records, "latest_order_id", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replica.commands.poll(NOW)
    ResyncRequest.record(order())
    replica.commands.poll(NOW)
    replica.commands.poll(NOW + 5)
    assert replica.directory.told == []

"""Our own code fails, or the system has no more of something: that stream starts anew, its thread lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streams import subscriber
from streams.follower import Follower
from streams.resolver import Resolved, Resolver
from streams.simulator import SimulatedEngine
from streams.status import StreamChange
from tests.streams.harness import TIMEOUT, Portal, store
from tests.streams.puppet import Puppet, synchronize
from tests.support.waiting import wait_until

MakeEngine = Callable[..., SimulatedEngine]
OUR_FAULT = RuntimeError("a fault of ours")


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "CRASH_PAUSE", 0.01)


def fails_once(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The function, but its first call raises."""
    left = [error]

    def call(*args: Any) -> Any:
        if left:
            raise left.pop()
        return function(*args)

    return call


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch, portal: Portal, puppet: Puppet) -> Follower:
    """A stream in service that fails at its next message, through a fault of ours."""
    synchronize(portal, puppet, store(1))
    follower = portal.directory._subscribers[puppet.spec.id]._follower
    monkeypatch.setattr(follower, "_continue", fails_once(follower._continue, OUR_FAULT))
    return follower


@pytest.mark.parametrize("name", ["LiveSocket", "SnapshotSocket"])
def test_a_socket_that_cannot_be_made_is_made_later(
    monkeypatch: pytest.MonkeyPatch, portal: Portal, make_engine: MakeEngine, name: str
) -> None:
    error = OSError(24, "Too many open files")
    monkeypatch.setattr(subscriber, name, fails_once(getattr(subscriber, name), error))
    engine = make_engine(seed=1, device_blocks=40)
    engine.step(10)
    portal.follow(engine.spec())
    portal.wait_error(engine.spec(), "internal_error")
    portal.wait_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)


def test_after_a_failure_of_ours_nothing_is_served_before_a_new_connection_and_snapshot(
    crashing: Follower, portal: Portal, puppet: Puppet
) -> None:
    puppet.publish(1, store(2, parent=1))
    puppet.wait_subscribed()
    request = puppet.request()
    assert portal.losses(puppet.spec) == ["internal_error"]
    assert portal.holds(puppet.spec, 1, 2) == (0, 0)
    request.answer(1, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))


def test_a_history_that_fails_costs_no_stream_its_service(portal: Portal, make_engine: MakeEngine) -> None:
    class Failing(list[StreamChange]):
        def append(self, change: StreamChange) -> None:
            super().append(change)
            raise RuntimeError("nobody can be told")

    portal.changes = Failing()
    portal.directory._around = replace(portal.directory._around, on_change=portal.changes.append)
    engine = make_engine(seed=1, device_blocks=40)
    portal.follow_synchronized(engine.spec())
    engine.restart()
    assert portal.wait_losses(engine.spec(), 1) == ["disconnected"]
    portal.wait_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)


def test_a_failure_on_the_way_to_starting_anew_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, crashing: Follower, portal: Portal, puppet: Puppet
) -> None:
    monkeypatch.setattr(crashing.report, "tell", fails_once(crashing.report.tell, OUR_FAULT))
    puppet.publish(1, store(2, parent=1))
    puppet.request().answer(1, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))


def without_threads(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """The system has no thread for those whose name starts like this."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_stream_without_a_thread_is_followed_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=1, device_blocks=40)
    with monkeypatch.context() as patch:
        without_threads(patch, "stream ")
        with pytest.raises(RuntimeError):
            portal.follow(engine.spec())
    assert portal.directory.query(b"") == []
    assert portal.directory.statuses() == ()
    portal.follow_synchronized(engine.spec())
    portal.follow()


def test_a_name_without_a_thread_is_answered_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(lambda host: ("127.0.0.1",))
    answers: list[Resolved] = []
    with monkeypatch.context() as patch:
        without_threads(patch, "resolve ")
        resolver.resolve("engine", answers.append)
    assert [answer.error for answer in answers] == ["can't start new thread"]
    resolver.resolve("engine", answers.append)
    wait_until(lambda: len(answers) == 2, TIMEOUT)
    assert answers[1] == Resolved(("127.0.0.1",))

"""Engines that are named by a host name, and what a name server's trouble may cost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from streams.resolver import MAX_PENDING, Resolved, Resolver, is_numeric
from streams.simulator import SimulatedEngine
from streams.spec import StreamSpec
from tests.streams.harness import Portal
from tests.support.waiting import wait_until

MakePortal = Callable[..., Portal]
MakeEngine = Callable[..., SimulatedEngine]


class Names:
    """A name server in the test's hands."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, ...]] = {}
        self.asked: list[str] = []
        self.answering = threading.Event()
        self.answering.set()

    def look_up(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        if host.startswith("slow"):
            self.answering.wait(60)
        if host not in self.known:
            raise socket.gaierror(-2, "Name or service not known")
        return self.known[host]


@pytest.fixture
def names() -> Iterator[Names]:
    server = Names()
    yield server
    server.answering.set()


def named(spec: StreamSpec, host: str) -> StreamSpec:
    """The same stream with its host called by a name."""
    return replace(
        spec,
        instance_name=f"{host}:1",
        endpoint=spec.endpoint.replace("127.0.0.1", host),
        replay_endpoint=spec.replay_endpoint.replace("127.0.0.1", host),
    )


def test_a_named_engine_is_followed(make_portal: MakePortal, make_engine: MakeEngine, names: Names) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    engine.step(5)
    names.known["engine"] = ("127.0.0.1",)
    portal = make_portal(resolver=Resolver(names.look_up))
    spec = named(engine.spec(), "engine")
    portal.follow_synchronized(spec)
    portal.wait_equals(spec, engine.truth)


def test_every_address_of_a_name_is_tried(
    make_portal: MakePortal, make_engine: MakeEngine, names: Names
) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    names.known["engine"] = ("127.0.0.2", "::1", "127.0.0.1")
    portal = make_portal(resolver=Resolver(names.look_up))
    portal.follow_synchronized(named(engine.spec(), "engine"))


def test_a_name_is_asked_for_again_when_the_engine_cannot_be_reached(
    make_portal: MakePortal, make_engine: MakeEngine, names: Names
) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    names.known["engine"] = ("127.0.0.2",)
    portal = make_portal(resolver=Resolver(names.look_up))
    spec = named(engine.spec(), "engine")
    portal.follow(spec)
    wait_until(lambda: len(names.asked) > 2, 20)
    assert portal.status(spec).error.code == "connect_failed"
    names.known["engine"] = ("127.0.0.1",)
    portal.wait_synchronized(spec)


def test_an_unknown_name_is_shown_and_tried_again(
    make_portal: MakePortal, make_engine: MakeEngine, names: Names
) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    portal = make_portal(resolver=Resolver(names.look_up))
    spec = named(engine.spec(), "nowhere")
    portal.follow(spec)
    wait_until(lambda: len(names.asked) > 2, 20)
    wait_until(lambda: portal.status(spec).error.code == "resolve_failed", 20)
    assert "Name or service not known" in portal.status(spec).error.sentence
    names.known["nowhere"] = ("127.0.0.1",)
    portal.wait_synchronized(spec)


def test_an_unknown_name_of_the_replay_endpoint_costs_a_serving_stream_nothing(
    make_portal: MakePortal, make_engine: MakeEngine, names: Names
) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    names.known["replay"] = ("127.0.0.1",)
    portal = make_portal(resolver=Resolver(names.look_up), resync_interval_ms=200)
    spec = replace(engine.spec(), replay_endpoint=engine.replay_endpoint().replace("127.0.0.1", "replay"))
    portal.follow_synchronized(spec)
    del names.known["replay"]
    portal.wait(spec, lambda status: status.warning and status.warning.code == "resolve_failed", "warns")
    engine.step(5)
    portal.wait_equals(spec, engine.truth)
    assert portal.losses(spec) == []


def test_a_name_server_that_does_not_answer_holds_up_nobody_else(
    make_portal: MakePortal, make_engine: MakeEngine, names: Names
) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    names.answering.clear()
    portal = make_portal(resolver=Resolver(names.look_up))
    slow = [named(engine.spec(), f"slow{number}") for number in range(20)]
    portal.follow(*slow)
    wait_until(lambda: len(names.asked) == 20, 20)
    portal.follow(*slow, engine.spec())
    portal.wait_synchronized(engine.spec())
    for _ in range(5):
        engine.step(5)
        portal.wait_equals(engine.spec(), engine.truth)
    portal.close()
    assert not any(thread.name.startswith("stream ") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("host", "numeric"),
    [("127.0.0.1", True), ("::1", True), ("fe80::1%eth0", True), ("localhost", False), ("10.0.0", False)],
)
def test_addresses_need_no_name_server(host: str, numeric: bool) -> None:
    assert is_numeric(host) is numeric


def test_who_asks_for_a_pending_name_shares_the_answer(names: Names) -> None:
    names.known["slow"] = ("127.0.0.1", "::1")
    names.answering.clear()
    resolver = Resolver(names.look_up)
    answers: list[Resolved] = []
    for _ in range(3):
        resolver.resolve("slow", answers.append)
    assert answers == []
    names.answering.set()
    wait_until(lambda: len(answers) == 3, 20)
    assert answers == [Resolved(("127.0.0.1", "::1"))] * 3
    assert names.asked == ["slow"]


def test_pending_names_are_bounded(names: Names) -> None:
    names.answering.clear()
    resolver = Resolver(names.look_up)
    answers: list[Resolved] = []
    for number in range(MAX_PENDING + 1):
        resolver.resolve(f"slow{number}", answers.append)
    wait_until(lambda: len(answers) == 1, 20)
    assert str(MAX_PENDING) in str(answers[0].error)


@pytest.mark.parametrize("host", ["no such name.invalid", "a..b", "x" * 300])
def test_the_systems_own_look_up_fails_with_a_reason(host: str) -> None:
    answers: list[Resolved] = []
    Resolver().resolve(host, answers.append)
    wait_until(lambda: bool(answers), 60)
    assert answers[0].error

"""Connections that break, engines that restart, engines that freeze."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from streams import sockets
from streams.resolver import Resolver
from streams.simulator import SimulatedEngine
from streams.sockets import Link, split_endpoint
from streams.spec import StreamSpec
from streams.status import StreamState
from tests.streams.harness import SIZE, TIMEOUT, Portal, store
from tests.streams.puppet import Puppet, synchronize
from tests.support.waiting import wait_until

MakeEngine = Callable[..., SimulatedEngine]


def test_a_lost_live_connection_stops_serving_until_a_new_snapshot(portal: Portal, puppet: Puppet) -> None:
    synchronize(portal, puppet, store(1, 2))
    puppet.drop_live()
    puppet.wait_subscribed()
    request = puppet.request()
    status = portal.status(puppet.spec)
    assert status.state is StreamState.SYNCING
    assert status.error.code == "disconnected"
    assert "max_message_bytes" in status.error.sentence
    assert portal.holds(puppet.spec, 1, 2) == (0, 0)
    request.answer(9, store(1))
    portal.wait_sequence(puppet.spec, 9)
    assert portal.holds(puppet.spec, 1, 2) == (1, 0)
    assert portal.losses(puppet.spec) == ["disconnected"]
    puppet.publish(10, store(3, parent=1))
    portal.wait_holds(puppet.spec, (1, 3), (2, 0))


def test_nothing_of_the_old_connection_is_served_while_the_engine_is_away(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=1, device_blocks=50)
    engine.step(20)
    prompts = list(engine.truth().prompts())
    portal.follow_synchronized(engine.spec())
    engine.drop_connection(down_s=1.0, wait=False)
    portal.wait_state(engine.spec(), StreamState.CONNECTING)
    assert all(portal.hits(engine.spec(), prompt) == (0, 0) for prompt in prompts)
    error = portal.wait(engine.spec(), lambda status: status.error, "an error").error
    assert error.code in ("disconnected", "connect_failed")
    portal.wait_synchronized(engine.spec())
    portal.wait_equals(engine.spec(), engine.truth)
    engine.wait_for_subscribers()
    engine.step(10)
    portal.wait_sequence(engine.spec(), 29)
    portal.wait_equals(engine.spec(), engine.truth)


def test_an_idle_replay_channel_may_go_away_and_come_back(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=2, device_blocks=50)
    engine.step(10)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.drop_connection(live=False)
    engine.step(10)
    portal.wait_sequence(engine.spec(), 19)
    assert portal.losses(engine.spec()) == []
    portal.directory.resync()
    portal.wait_snapshots(engine.spec(), 2)
    portal.wait_equals(engine.spec(), engine.truth)


def test_a_replay_connection_lost_during_recovery_is_tried_again(portal: Portal, puppet: Puppet) -> None:
    portal.follow(puppet.spec)
    puppet.request().part(3, store(7))
    puppet.drop_replay()
    sentence = portal.wait_error(puppet.spec, "snapshot_disconnected")
    assert "max_message_bytes" in sentence, "the cut may mean a message over the limit"
    puppet.request().answer(4, store(1))
    portal.wait_sequence(puppet.spec, 4)
    assert portal.holds(puppet.spec, 7) == (0, 0)


def test_a_replay_connection_lost_during_calibration_leaves_the_stream_serving(
    portal: Portal, puppet: Puppet
) -> None:
    synchronize(portal, puppet, store(1), watermark=4)
    portal.directory.resync()
    puppet.request().part(4, store(7))
    puppet.drop_replay()
    portal.wait_warning(puppet.spec, "snapshot_disconnected")
    assert portal.holds(puppet.spec, 1) == (1, 0)
    request = puppet.request()
    assert portal.status(puppet.spec).state is StreamState.SYNCHRONIZED
    request.answer(4, store(1, 2))
    portal.wait_holds(puppet.spec, (1, 2), (2, 0))
    assert portal.status(puppet.spec).warning is None
    assert portal.losses(puppet.spec) == []


def test_a_late_answer_to_an_abandoned_request_is_never_read(
    make_portal: Callable[..., Portal], puppet: Puppet
) -> None:
    portal = make_portal(replay_timeout_ms=1000)
    portal.follow(puppet.spec)
    abandoned = puppet.request()
    request = puppet.request()
    abandoned.answer(5, store(7))
    request.part(6, store(1))
    abandoned.part(6, store(8))
    request.end()
    portal.wait_sequence(puppet.spec, 6)
    assert portal.holds(puppet.spec, 1) == (1, 0)
    assert portal.holds(puppet.spec, 7) == portal.holds(puppet.spec, 8) == (0, 0)


def test_a_visible_restart_serves_nothing_of_the_old_process(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=3, device_blocks=60, host_blocks=30)
    engine.step(40)
    old = engine.truth()
    portal.follow_synchronized(engine.spec())
    engine.restart()
    portal.wait_losses(engine.spec(), 1)
    portal.wait_sequence(engine.spec(), 0)
    portal.wait_equals(engine.spec(), engine.truth)
    assert all(portal.hits(engine.spec(), prompt) == (0, 0) for prompt in old.prompts())
    assert portal.status(engine.spec()).mapped_blocks == 0
    engine.wait_for_subscribers()
    engine.step(30)
    portal.wait_sequence(engine.spec(), 29)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.losses(engine.spec()) == ["disconnected"]


def test_an_invisible_restart_is_noticed_with_the_first_message(
    portal: Portal, make_engine: MakeEngine
) -> None:
    engine = make_engine(seed=4, device_blocks=60)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step(40)
    portal.wait_sequence(engine.spec(), 39)
    engine.restart(visible=False)
    engine.step()
    assert portal.wait_losses(engine.spec(), 1) == ["sequence_regressed"]
    engine.step(5)
    portal.wait_sequence(engine.spec(), 5)
    portal.wait_equals(engine.spec(), engine.truth)
    assert portal.losses(engine.spec()) == ["sequence_regressed"]


def test_an_invisible_restart_without_a_message_is_noticed_by_calibration(
    make_portal: Callable[..., Portal], make_engine: MakeEngine
) -> None:
    portal = make_portal(resync_interval_ms=100)
    engine = make_engine(seed=5, device_blocks=60)
    engine.step(40)
    portal.follow_synchronized(engine.spec())
    engine.wait_for_subscribers()
    engine.step()
    portal.wait_sequence(engine.spec(), 40)
    engine.restart(visible=False)
    assert portal.wait_losses(engine.spec(), 1) == ["snapshot_stale"]
    portal.wait_sequence(engine.spec(), 0)
    assert portal.status(engine.spec()).device_blocks == 0


def test_an_engine_that_comes_later_is_found(portal: Portal, make_engine: MakeEngine) -> None:
    engine = make_engine(seed=6, device_blocks=60)
    spec = engine.spec()
    engine.close()
    portal.follow(spec)
    status = portal.wait(
        spec, lambda status: status.error and status.error.code == "connect_failed", "a refused connection"
    )
    assert spec.endpoint in status.error.sentence
    assert status.state is StreamState.CONNECTING
    ports = [int(each.rpartition(":")[2]) for each in (spec.endpoint, spec.replay_endpoint)]
    late = make_engine(seed=6, device_blocks=60, event_port=ports[0], replay_port=ports[1])
    late.step(10)
    portal.wait_synchronized(spec)
    portal.wait_equals(spec, late.truth)
    assert portal.status(spec).error is None


def test_an_engine_without_replay_channel_is_never_synchronized_and_says_why(
    portal: Portal, puppet: Puppet
) -> None:
    puppet.replay.close(linger=0)
    portal.follow(puppet.spec)
    assert puppet.spec.replay_endpoint in portal.wait_error(puppet.spec, "snapshot_disconnected")
    puppet.drop_replay()
    puppet.request().answer(2, store(1))
    portal.wait_sequence(puppet.spec, 2)


def test_swapped_endpoints_are_refused_until_the_engine_is_mended(portal: Portal, puppet: Puppet) -> None:
    """After a handshake with a socket of the wrong kind ZeroMQ does not try again by itself."""
    swapped = StreamSpec(
        "swapped", 0, puppet.spec.replay_endpoint, puppet.spec.endpoint, SIZE, puppet.spec.topic
    )
    portal.follow(swapped)
    assert "not an engine's live channel" in portal.wait_error(swapped, "connect_failed")
    assert portal.status(swapped).state is StreamState.CONNECTING
    puppet.live.close(linger=0)
    puppet.replay.close(linger=0)
    puppet.spec = swapped
    puppet.drop_live()
    puppet.drop_replay()
    puppet.request().answer(4, store(1))
    portal.wait_sequence(swapped, 4)
    assert portal.holds(swapped, 1) == (1, 0)


@pytest.mark.parametrize(
    "greeting",
    [bytes(100), b"\xff" * 100, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 5],
    ids=["zeros", "ones", "HTTP"],
)
def test_an_engine_is_found_though_something_else_had_its_port_before(
    portal: Portal, puppet: Puppet, greeting: bytes
) -> None:
    host, port = split_endpoint(puppet.spec.endpoint)
    puppet.live.close(linger=0)
    with closing(listen(host, port)) as stranger:
        portal.follow(puppet.spec)
        stranger.settimeout(TIMEOUT)
        connection, _ = stranger.accept()
        with closing(connection):
            connection.sendall(greeting)
        portal.wait_error(puppet.spec, "connect_failed")
    puppet.drop_live()
    puppet.request().answer(4, store(1))
    portal.wait_sequence(puppet.spec, 4)


def listen(host: str, port: int) -> socket.socket:
    """Take a port over as soon as the system lets us."""
    servers: list[socket.socket] = []

    def listens() -> bool:
        try:
            servers.append(socket.create_server((host, port)))
        except OSError:
            return False
        return True

    wait_until(listens, message=f"port {port} stays in use")
    return servers[0]


def test_an_address_that_never_answers_does_not_hold_up_the_others_of_a_name(
    monkeypatch: pytest.MonkeyPatch, puppet: Puppet
) -> None:
    monkeypatch.setattr(sockets, "CONNECT_TIMEOUT_MS", 300)
    _, port = split_endpoint(puppet.spec.endpoint)
    with ExitStack() as stack:
        # Its queue is full, so the system drops what else would connect.
        stack.enter_context(closing(socket.create_server(("127.0.0.2", port), backlog=0)))
        for _ in range(4):
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", port))
        resolver = Resolver(lambda host: ("127.0.0.1", "127.0.0.2"))  # The second is tried first.
        portal = stack.enter_context(Portal(resolver=resolver))
        spec = replace(
            puppet.spec,
            endpoint=f"tcp://engine:{port}",
            replay_endpoint=puppet.spec.replay_endpoint.replace("127.0.0.1", "engine"),
        )
        portal.follow(spec)
        puppet.request().answer(4, store(1))
        portal.wait_sequence(spec, 4)
        assert any(error.startswith("connect_failed") for error in portal.errors(spec))


def test_news_of_a_lost_connection_is_not_taken_for_news_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch, puppet: Puppet, opened: ExitStack
) -> None:
    """ZeroMQ may have connected again by itself before anybody looks at what its monitor told."""
    portal = opened.enter_context(Portal(resolver=Resolver(lambda host: ("127.0.0.1",))))
    puppet.spec = replace(puppet.spec, endpoint=puppet.spec.endpoint.replace("127.0.0.1", "engine"))
    links = sockets.MonitoredSocket.links

    def connected_again(self: sockets.MonitoredSocket) -> list[Link]:
        news = links(self)
        return [*news, Link.UP] if Link.LOST in news else news

    synchronize(portal, puppet, store(1))
    monkeypatch.setattr(sockets.MonitoredSocket, "links", connected_again)
    puppet.live.close(linger=0)
    portal.wait_error(puppet.spec, "connect_failed")
    assert portal.losses(puppet.spec) == ["disconnected"]
    assert portal.status(puppet.spec).state is StreamState.CONNECTING
    assert not puppet.asked(1.0), "a snapshot was requested without a live connection"


def test_a_peer_that_hangs_up_after_every_connection_is_not_stormed(portal: Portal) -> None:
    accepted = []
    closing_down = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(0.05)

        def hang_up() -> None:
            while not closing_down.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                accepted.append(connection)
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            spec = StreamSpec("rude", 0, address, "tcp://127.0.0.1:9", SIZE)
            portal.follow(spec)
            portal.wait_error(spec, "connect_failed")
            seen = len(accepted)
            wait_until(lambda: len(accepted) > seen)
            assert len(accepted) < 20
        finally:
            closing_down.set()
            thread.join()


def test_an_engine_that_drops_every_fresh_connection_is_retried_with_backoff(
    portal: Portal, puppet: Puppet
) -> None:
    """Each connection is made properly, subscribed, and then cut: no storm may come of it."""
    synchronize(portal, puppet, store(1))
    cuts = 0
    deadline = threading.Event()
    timer = threading.Timer(2.0, deadline.set)
    timer.start()
    while not deadline.is_set():
        puppet.drop_live()
        while not deadline.is_set() and not puppet.live.poll(20):
            pass
        cuts += 1
    timer.join()
    assert cuts <= 25, f"{cuts} connections in two seconds"


ENGINE = """
    import sys
    from streams.simulator import SimulatedEngine
    with SimulatedEngine(seed=1, device_blocks=50) as engine:
        engine.step(20)
        print(engine.endpoint(), engine.replay_endpoint(), flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def frozen_engine_spec() -> object:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENGINE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    endpoint, replay_endpoint = process.stdout.readline().split()
    yield process, StreamSpec("frozen", 0, endpoint, replay_endpoint, 16, "xllm-kv")
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=20)


def test_a_frozen_engine_is_noticed_by_heartbeats(
    monkeypatch: pytest.MonkeyPatch, portal: Portal, frozen_engine_spec: tuple[subprocess.Popen, StreamSpec]
) -> None:
    """Its connection stays open for ever. The heartbeat is made quicker than in service."""
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 1000)
    process, spec = frozen_engine_spec
    portal.follow_synchronized(spec)
    process.send_signal(signal.SIGSTOP)
    assert portal.wait_losses(spec, 1) == ["disconnected"]
    process.send_signal(signal.SIGCONT)
    portal.wait_synchronized(spec)
    assert portal.status(spec).sequence == 19

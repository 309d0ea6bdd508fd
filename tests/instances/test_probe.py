"""Probes of `/health`: what counts as alive, how long it may take, and that they run side by side."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from routing.instances.core import ProbeResult, StartProbe
from routing.instances.probe import Prober, ProbeSettings
from streams.resolver import Resolver
from tests.instances.support import Engine, closed_port, silent_port
from tests.support.waiting import wait_until

SETTINGS = ProbeSettings(timeout=0.3, attempts=2)


@contextmanager
def prober(settings: ProbeSettings = SETTINGS) -> Iterator[tuple[Prober, list[ProbeResult]]]:
    results: list[ProbeResult] = []
    prober = Prober(settings, results.append)
    try:
        yield prober, results
    finally:
        prober.stop()


def result_of(name: str, settings: ProbeSettings = SETTINGS) -> ProbeResult:
    with prober(settings) as (probes, results):
        probes.start_probe(StartProbe(name, 7))
        wait_until(lambda: results)
    assert (results[0].name, results[0].token) == (name, 7)
    return results[0]


@contextmanager
def answering(reply: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server that does as it likes with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    try:
                        reply(connection)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@contextmanager
def full_port() -> Iterator[int]:
    """A port whose queue is full: connecting to it neither succeeds nor fails."""
    with socket.socket() as server, ExitStack() as clients:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(2):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("status", "healthy"), [(200, True), (204, False), (404, False), (500, False), (503, False)]
)
def test_only_200_is_healthy(status: int, healthy: bool) -> None:
    with Engine().serving() as engine:
        engine.status = status
        result = result_of(engine.name)
        assert (result.healthy, result.detail) == (healthy, f"status {status}")
        assert engine.asked == (1 if healthy else 2)


def test_the_last_attempt_counts() -> None:
    answers = iter([b"HTTP/1.1 503 Busy\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
    with answering(lambda connection: connection.sendall(next(answers))) as name:
        assert result_of(name).healthy


def test_nobody_there_is_unhealthy() -> None:
    with closed_port() as port:
        result = result_of(f"127.0.0.1:{port}")
        assert not result.healthy
        assert "refused" in result.detail


def test_a_silent_engine_is_unhealthy_after_its_attempts() -> None:
    with silent_port() as port:
        result = result_of(f"127.0.0.1:{port}")
        assert (result.healthy, result.detail) == (False, "no answer within 0.3 s")


def test_a_byte_now_and_then_is_no_answer() -> None:
    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK and so on and so forth\r\n":
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    with answering(drip) as name:
        assert result_of(name).detail == "no answer within 0.3 s"


@pytest.mark.parametrize("reply", [b"", b"SSH-2.0-x\r\n", b"\r\n", b"HTTP/1.1\r\n", b"x" * 5000])
def test_what_is_not_http_is_unhealthy(reply: bytes) -> None:
    with answering(lambda connection: connection.sendall(reply)) as name:
        result = result_of(name)
        assert not result.healthy
        assert result.detail


@pytest.mark.parametrize("name", ["nonsense", "host:99999", "0.0.0.0:80", "no.such.host.invalid:80"])
def test_a_bad_address_is_unhealthy(name: str) -> None:
    result = result_of(name)
    assert not result.healthy
    assert result.detail


def test_hundreds_of_probes_run_side_by_side_and_starting_them_does_not_wait() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as silent,
        ExitStack() as asked,
        prober(ProbeSettings(timeout=60.0, attempts=1)) as (probes, results),
    ):
        for token in range(300):
            probes.start_probe(StartProbe(f"127.0.0.1:{silent.getsockname()[1]}", token))
        for _ in range(300):
            connection, _ = silent.accept()
            assert asked.enter_context(connection).recv(100)
        # Three hundred have asked and none has been answered.
        assert results == []
        asked.close()
        wait_until(lambda: len(results) == 300)
    assert {result.token for result in results} == set(range(300))


def test_mute_engines_are_all_judged_after_their_attempts() -> None:
    with silent_port() as port, prober(ProbeSettings(timeout=0.5, attempts=2)) as (probes, results):
        for token in range(300):
            probes.start_probe(StartProbe(f"127.0.0.1:{port}", token))
        wait_until(lambda: len(results) == 300)
    assert {result.detail for result in results} == {"no answer within 0.5 s"}


class Names:
    """A name server of a test's own; what it does not know it does not answer until it is closed."""

    def __init__(self, **known: tuple[str, ...]) -> None:
        self._known = known
        self._closed = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        if host not in self._known:
            self._closed.wait(60)
            raise OSError(f"no answer for {host}")
        return self._known[host]

    def close(self) -> None:
        self._closed.set()


@contextmanager
def resolving(names: Names, settings: ProbeSettings = SETTINGS) -> Iterator[tuple[Prober, list[ProbeResult]]]:
    results: list[ProbeResult] = []
    prober = Prober(settings, results.append, Resolver(names))
    try:
        yield prober, results
    finally:
        prober.stop()
        names.close()


def test_a_name_that_is_not_resolved_in_time_is_unhealthy() -> None:
    with resolving(Names()) as (probes, results):
        probes.start_probe(StartProbe("slow:80", 1))
        wait_until(lambda: results)
    assert results == [ProbeResult("slow:80", 1, False, "its name was not resolved within 0.3 s")]


def test_names_that_are_not_resolved_hold_nobody_up() -> None:
    names = Names(engine=("127.0.0.1",))
    with Engine().serving() as engine, resolving(names, ProbeSettings(timeout=60.0)) as (probes, results):
        for token in range(200):
            probes.start_probe(StartProbe(f"slow{token}:80", token))
        wait_until(lambda: len(names.asked) == 200)
        probes.start_probe(StartProbe(f"engine:{engine.name.rpartition(':')[2]}", 999))
        wait_until(lambda: results)
        assert [(result.token, result.healthy) for result in results] == [(999, True)]


def test_a_name_that_cannot_be_resolved_says_so() -> None:
    names = Names()
    names.close()
    with resolving(names) as (probes, results):
        probes.start_probe(StartProbe("nowhere:80", 1))
        wait_until(lambda: results)
    assert results[0].detail == "its name cannot be resolved: no answer for nowhere"


def test_an_engine_answers_at_the_address_that_it_listens_on() -> None:
    """Nobody listens at the others: one refuses, one is mute."""
    with full_port() as port:
        with Engine().serving() as engine:
            there = engine.name.rpartition(":")[2]
            names = Names(engine=("127.0.0.2", "::1", "127.0.0.1"), mute=("127.0.0.1", "127.0.0.2"))
            with resolving(names, ProbeSettings(timeout=5.0, attempts=1)) as (probes, results):
                probes.start_probe(StartProbe(f"engine:{there}", 1))
                wait_until(lambda: results)
                assert (results[0].healthy, results[0].detail) == (True, "status 200")
        with resolving(names, ProbeSettings(timeout=4.0, attempts=1)) as (probes, results):
            # The first address takes half of the time, so the refusal of the second is still heard.
            probes.start_probe(StartProbe(f"mute:{port}", 2))
            wait_until(lambda: results)
            assert (results[0].healthy, results[0].detail) == (False, "Connection refused")


def test_stop_does_not_wait_for_names_or_answers() -> None:
    names = Names()
    with silent_port() as port:
        results: list[ProbeResult] = []
        probes = Prober(ProbeSettings(timeout=60.0), results.append, Resolver(names))
        probes.start_probe(StartProbe("slow:80", 1))
        probes.start_probe(StartProbe(f"127.0.0.1:{port}", 2))
        wait_until(lambda: names.asked)
        probes.stop(30.0)
        assert "health-probe" not in {thread.name for thread in threading.enumerate()}
        waiting = [thread for thread in threading.enumerate() if thread.name == "resolve slow"]
        names.close()
        for thread in waiting:
            thread.join(10)
            assert not thread.is_alive()
        assert results == []
        probes.stop()


def test_a_thousand_probes_of_a_living_engine_all_get_their_turn() -> None:
    patient = ProbeSettings(timeout=10.0, attempts=1)
    with Engine().serving() as engine, prober(patient) as (probes, results):
        for token in range(1000):
            probes.start_probe(StartProbe(engine.name, token))
        wait_until(lambda: len(results) == 1000, 30)
    assert all(result.healthy for result in results)


def test_stop_ends_the_threads_and_reports_nothing_more() -> None:
    with silent_port() as port:
        results: list[ProbeResult] = []
        probes = Prober(ProbeSettings(timeout=0.5, attempts=5), results.append)
        for token in range(100):
            probes.start_probe(StartProbe(f"127.0.0.1:{port}", token))
        probes.stop(5.0)
        assert not [thread for thread in threading.enumerate() if thread.name == "health-probe"]
        assert results == []
        probes.start_probe(StartProbe(f"127.0.0.1:{port}", 0))
        assert not [thread for thread in threading.enumerate() if thread.name == "health-probe"]

"""A simulated engine in a real registry: the embedded one over HTTP, and etcd."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from kvportal.simulated_engine.registration import (
    EtcdRegistrar,
    Identity,
    PortalRegistrar,
    Registrar,
    RegistrationKeeper,
)
from routing.endpoints_instances import delete_endpoint, heartbeat_endpoint, put_endpoint
from routing.instances.core import HealthSettings
from routing.instances.embedded import LeaseTable
from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.model import HealthState, InstanceView, Role
from routing.instances.registration import parse_load, parse_registration
from routing.instances.registry import InstanceRegistry
from streams.http import ApiError, Request, Response, error_response
from streams.simulator import SimulatedEngine
from streams.simulator.server import EngineServer
from tests.support.processes import EtcdServer
from tests.support.waiting import wait_until

INTERVAL_S = 0.05


class RegistryServer:
    """The portal's registry with its endpoints, served by the standard library."""

    def __init__(self) -> None:
        self.registry = InstanceRegistry(HealthSettings(suspect_timeout=60), leases=LeaseTable())
        self.seen_token: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.seen_token = self.headers["X-Internal-Token"]
                body = self.rfile.read(int(self.headers["Content-Length"]))
                response = outer.answer(self.command, self.path, body)
                self.send_response(response.status)
                self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                self.wfile.write(response.body)

            do_PUT = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def answer(self, method: str, path: str, body: bytes) -> Response:
        endpoints = {"PUT": put_endpoint, "POST": heartbeat_endpoint, "DELETE": delete_endpoint}
        request = Request(method, path, body, {"name": unquote(path.rpartition("/")[2])})
        try:
            return endpoints[method](self.registry)(request)
        except ApiError as error:
            return error_response(error)

    def instance(self, name: str) -> InstanceView | None:
        return self.registry.snapshot().by_name.get(name)

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.registry.stop()

    def start(self) -> None:
        self.registry.start()
        self._thread.start()


@pytest.fixture
def portal() -> Iterator[RegistryServer]:
    server = RegistryServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer(SimulatedEngine(dp_size=2, block_size=4)) as server:
        server.engine.step(5)
        yield server


def identity_of(engine: EngineServer, role: Role = Role.PREFILL) -> Identity:
    return Identity(f"127.0.0.1:{engine.port}", role, 2, "127.0.0.1")


@contextmanager
def keeping(engine: EngineServer, registrar: Registrar, said: list[str] | None = None) -> Iterator[None]:
    say = (said if said is not None else []).append
    keeper = RegistrationKeeper(engine, registrar, identity_of(engine), interval_s=INTERVAL_S, say=say)
    keeper.start()
    try:
        yield
    finally:
        keeper.stop()


def test_it_registers_over_http_and_reports_load(engine: EngineServer, portal: RegistryServer) -> None:
    name = identity_of(engine).name
    with keeping(engine, PortalRegistrar(portal.url, name, ttl_s=5, token="secret")):
        engine.load.fixed_waiting = 42
        wait_until(lambda: load_of(portal, name) == 42)
        instance = portal.instance(name)
        assert instance is not None
        assert (instance.role, instance.dp_size) == (Role.PREFILL, 2)
        assert instance.incarnation_id == engine.incarnation_id
        assert instance.registration.ttft_profiling_data
        assert portal.seen_token == "secret"
        engine.health = "error"
    wait_until(lambda: state_of(portal, name) is HealthState.SUSPECT)


def test_a_restart_registers_a_new_incarnation(engine: EngineServer, portal: RegistryServer) -> None:
    name = identity_of(engine).name
    with keeping(engine, PortalRegistrar(portal.url, name, ttl_s=5)):
        wait_until(lambda: portal.instance(name))
        first = engine.incarnation_id
        engine.engine.restart()
        assert engine.incarnation_id != first
        wait_until(lambda: incarnation_of(portal, name) == engine.incarnation_id)


def test_a_registration_that_is_gone_is_written_again(engine: EngineServer, portal: RegistryServer) -> None:
    name = identity_of(engine).name
    with keeping(engine, PortalRegistrar(portal.url, name, ttl_s=5)):
        wait_until(lambda: portal.instance(name))
        other = PortalRegistrar(portal.url, name, ttl_s=5)
        other.register(identity_of(engine).document("somebody-else", 1))
        wait_until(lambda: incarnation_of(portal, name) == engine.incarnation_id)


def test_without_heartbeats_the_lease_runs_out_and_with_them_it_comes_back(
    engine: EngineServer, portal: RegistryServer
) -> None:
    name = identity_of(engine).name
    with keeping(engine, PortalRegistrar(portal.url, name, ttl_s=0.3)):
        wait_until(lambda: state_of(portal, name) is HealthState.ACTIVE)
        engine.heartbeats = False
        wait_until(lambda: state_of(portal, name) is not HealthState.ACTIVE)
        engine.heartbeats = True
        wait_until(lambda: state_of(portal, name) is HealthState.ACTIVE)


def test_it_keeps_trying_while_the_portal_is_away_and_says_why(
    engine: EngineServer, portal: RegistryServer
) -> None:
    said: list[str] = []
    portal_away = RegistryServer()
    url = portal_away.url
    portal_away._http.server_close()
    with keeping(engine, PortalRegistrar(url, "127.0.0.1:1", ttl_s=5), said):
        wait_until(lambda: said)
        assert said[0].startswith(f"cannot register or report: {url}: ")
    refused: list[str] = []
    with keeping(engine, PortalRegistrar(portal.url, "two words", ttl_s=5), refused):
        wait_until(lambda: refused)
    assert "400 name: " in refused[0]


def test_it_registers_in_etcd_under_a_lease(engine: EngineServer, etcd_server: EtcdServer) -> None:
    settings = EtcdSettings(endpoints=(etcd_server.endpoint,), namespace="prod-a", request_timeout=1.0)
    identity = identity_of(engine)
    client = EtcdClient(settings)
    registration_key, load_key = (
        f"/prod-a/XLLM:PREFILL:{identity.name}",
        f"/prod-a/XLLM:LOADMETRICS:{identity.name}",
    )
    engine.load.fixed_waiting = 3
    with keeping(engine, EtcdRegistrar(settings, identity, 5, heartbeats=None)):
        value = wait_until(lambda: client.get(registration_key))
        assert value is not None
        registration = parse_registration(identity.name, value)
        assert (registration.role, registration.incarnation_id) == (Role.PREFILL, engine.incarnation_id)
        assert json.loads(value)["register_ts_ms"] > 1_600_000_000_000
        load = wait_until(lambda: client.get(load_key))
        assert load is not None
        assert parse_load(load).waiting_requests_num == 3
        client.delete(load_key)
        wait_until(lambda: client.get(load_key))
    assert client.get(registration_key) is None, "withdrawn"
    assert client.get(load_key) is None
    client.close()


def test_an_etcd_lease_that_ran_out_is_replaced(engine: EngineServer, etcd_server: EtcdServer) -> None:
    settings = EtcdSettings(endpoints=(etcd_server.endpoint,), request_timeout=1.0)
    identity = identity_of(engine)
    key = f"XLLM:PREFILL:{identity.name}"
    client = EtcdClient(settings)
    with keeping(engine, EtcdRegistrar(settings, identity, 1, heartbeats=None)):
        wait_until(lambda: client.get(key))
        engine.heartbeats = False
        wait_until(lambda: client.get(key) is None, timeout=20)
        engine.heartbeats = True
        wait_until(lambda: client.get(key))
        first = client.get(key)
        engine.engine.restart(visible=False)
        wait_until(lambda: client.get(key) != first)
    client.close()


def test_with_etcd_heartbeats_can_go_to_the_portal(
    engine: EngineServer, portal: RegistryServer, etcd_server: EtcdServer
) -> None:
    settings = EtcdSettings(endpoints=(etcd_server.endpoint,), request_timeout=1.0)
    identity = identity_of(engine)
    heartbeats = PortalRegistrar(portal.url, identity.name, ttl_s=5)
    heartbeats.register(identity.document(engine.incarnation_id, 1))
    engine.load.fixed_waiting = 9
    client = EtcdClient(settings)
    with keeping(engine, EtcdRegistrar(settings, identity, 5, heartbeats)):
        wait_until(lambda: load_of(portal, identity.name) == 9)
        assert client.get(f"XLLM:LOADMETRICS:{identity.name}") is None
    client.close()


def load_of(portal: RegistryServer, name: str) -> int | None:
    instance = portal.instance(name)
    return None if instance is None or instance.load is None else instance.load.waiting_requests_num


def state_of(portal: RegistryServer, name: str) -> HealthState | None:
    instance = portal.instance(name)
    return None if instance is None else instance.state


def incarnation_of(portal: RegistryServer, name: str) -> str | None:
    instance = portal.instance(name)
    return None if instance is None else instance.incarnation_id

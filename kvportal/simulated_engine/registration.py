"""How a simulated engine makes itself known: a registration under a lease, renewed by heartbeats.

Two registrars do the same over different wires: `EtcdRegistrar` writes the keys that engines write,
`PortalRegistrar` uses the portal's embedded registry over HTTP. `RegistrationKeeper` runs one of them on a
thread of its own, registers again whenever the registration is gone or the engine lives a new life, and
withdraws it at the end.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.etcd_wire import EtcdError
from routing.instances.keys import KeyNames
from routing.instances.model import WIRE_ROLES, LoadReport, Role
from routing.instances.registration import load_document
from streams.simulator.load import Load
from streams.simulator.server import EngineServer

TIMEOUT_S = 1.0
"""For one call; also bounds how long the end of the engine may wait for its withdrawal."""
_FIRST_RETRY_S = 0.25
_LONGEST_RETRY_S = 5.0


class RegistrationError(Exception):
    """Could not register or report; the message says why and is fit to be shown."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a registration says about an engine."""

    name: str
    """HTTP address, `host:port`."""
    role: Role
    dp_size: int
    host: str

    def document(self, incarnation_id: str, register_ts_ms: int) -> dict[str, Any]:
        """The registration as engines write it."""
        return {
            "name": self.name,
            "rpc_address": self.name,
            "incarnation_id": incarnation_id,
            "register_ts_ms": register_ts_ms,
            "type": WIRE_ROLES.index(self.role),
            "addrs": [self.host],
            "cluster_ids": [1],
            "k_cache_ids": [],
            "v_cache_ids": [],
            "dp_size": self.dp_size,
            "device_ips": [self.host],
            "ports": [26000],
            "ttft_profiling_data": [[512, 31.0], [1024, 55.5], [2048, 104.0], [4096, 201.0]],
            "tpot_profiling_data": [[512, 8, 21.0], [1024, 8, 22.5], [2048, 16, 27.0], [4096, 32, 38.0]],
        }


class Registrar(Protocol):
    """One way to be known. All methods raise `RegistrationError`; one thread uses it."""

    def register(self, document: Mapping[str, Any]) -> None:
        """Write the registration, or write it anew."""

    def report(self, incarnation_id: str, load: Load) -> bool:
        """Renew the lease and report the load. False: the registration is gone."""

    def withdraw(self, incarnation_id: str) -> None:
        """Give the registration up."""


class PortalRegistrar:
    """The portal's HTTP interface: registration in its embedded registry, heartbeats."""

    def __init__(self, url: str, name: str, ttl_s: float, token: str = "") -> None:
        self._url = urlsplit(url)
        self._name = name
        self._ttl_s = ttl_s
        self._headers = {"Content-Type": "application/json"} | ({"X-Internal-Token": token} if token else {})
        self._path = f"/v1/internal/instances/{quote(name, safe='')}"

    def register(self, document: Mapping[str, Any]) -> None:
        self._expect(204, *self._call("PUT", self._path, {**document, "ttl_s": self._ttl_s}))

    def report(self, incarnation_id: str, load: Load) -> bool:
        heartbeat = {
            "name": self._name,
            "incarnation_id": incarnation_id,
            "load_metrics": {
                "waiting_requests_num": load.waiting_requests_num,
                "gpu_cache_usage_perc": load.gpu_cache_usage_perc,
            },
            "latency_metrics": {
                "recent_max_ttft": load.recent_max_ttft,
                "recent_max_tbt": load.recent_max_tbt,
            },
        }
        status, answer = self._call("POST", "/v1/internal/instances/heartbeat", heartbeat)
        if status in (404, 409):
            return False
        self._expect(204, status, answer)
        return True

    def withdraw(self, incarnation_id: str) -> None:
        self._call("DELETE", self._path, {"incarnation_id": incarnation_id})

    def _call(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        secure = self._url.scheme == "https"
        connection_type = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connection_type(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, json.dumps(body).encode(), self._headers)
            response = connection.getresponse()
            return response.status, response.read(65_536)
        except (OSError, http.client.HTTPException) as error:
            raise RegistrationError(f"{self._url.geturl()}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _expect(self, wanted: int, status: int, answer: bytes) -> None:
        if status != wanted:
            raise RegistrationError(f"{self._url.geturl()}: {status} {_message(answer)}")


class EtcdRegistrar:
    """Keys in etcd under a lease. The load is written there too, unless `heartbeats` takes it."""

    def __init__(
        self, settings: EtcdSettings, identity: Identity, ttl_s: int, heartbeats: PortalRegistrar | None
    ) -> None:
        self._client = EtcdClient(settings)
        keys = KeyNames(settings.namespace)
        self._registration_key = keys.registration(identity.role, identity.name)
        self._load_key = keys.load(identity.name)
        self._ttl_s = ttl_s
        self._heartbeats = heartbeats
        self._lease: int | None = None

    def register(self, document: Mapping[str, Any]) -> None:
        with _etcd_errors():
            if self._lease is None or not self._client.keep_alive(self._lease):
                self._lease = self._client.grant_lease(self._ttl_s)
            self._client.put(self._registration_key, json.dumps(document).encode(), lease=self._lease)

    def report(self, incarnation_id: str, load: Load) -> bool:
        with _etcd_errors():
            if self._lease is None or not self._client.keep_alive(self._lease):
                self._lease = None
                return False
            if self._heartbeats is None:
                report = LoadReport(load.waiting_requests_num, load.gpu_cache_usage_perc)
                self._client.put(self._load_key, load_document(report), lease=self._lease)
        if self._heartbeats is not None:
            # The portal may hear of a registration later than we do; the next heartbeat will be right.
            self._heartbeats.report(incarnation_id, load)
        return True

    def withdraw(self, incarnation_id: str) -> None:
        with _etcd_errors():
            if self._lease is not None:
                self._client.revoke_lease(self._lease)
        self._client.close()


class RegistrationKeeper:
    """Keeps one engine registered from `start` to `stop`. `say` is told of every change, in one line."""

    def __init__(
        self,
        server: EngineServer,
        registrar: Registrar,
        identity: Identity,
        *,
        interval_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._server = server
        self._registrar = registrar
        self._identity = identity
        self._interval_s = interval_s
        self._say = say
        self._registered: str | None = None
        """Incarnation that was registered last."""
        self._register_ts_ms = 0
        self._failures = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sim-registration", daemon=True)
        self.status = "not registered yet"
        """For people."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Withdraw the registration and end the thread, within about two calls' time."""
        self._ending.set()
        self._thread.join(3 * TIMEOUT_S)

    def _run(self) -> None:
        pause = 0.0
        while not self._ending.wait(pause):
            pause = self._interval_s
            if self._server.heartbeats:
                try:
                    self._beat()
                except RegistrationError as error:
                    pause = self._failed(error)
            else:
                self._status("heartbeats stopped by an order")
        if self._registered is not None:
            with suppress(RegistrationError):
                self._registrar.withdraw(self._registered)

    def _beat(self) -> None:
        incarnation_id = self._server.incarnation_id
        if self._registered != incarnation_id:
            self._register(incarnation_id)
        if not self._registrar.report(incarnation_id, self._server.next_load()):
            self._status("the registration is gone; registering again")
            self._register(incarnation_id)
        self._failures = 0
        self._status(f"registered as {self._identity.name}, incarnation {incarnation_id}")

    def _register(self, incarnation_id: str) -> None:
        if self._registered != incarnation_id:
            self._register_ts_ms = time.time_ns() // 1_000_000  # wall clock: other machines compare it
        self._registrar.register(self._identity.document(incarnation_id, self._register_ts_ms))
        self._registered = incarnation_id

    def _failed(self, error: RegistrationError) -> float:
        self._failures += 1
        self._status(f"cannot register or report: {error}")
        return min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(self._failures, 10))

    def _status(self, text: str) -> None:
        if text != self.status:
            self.status = text
            self._say(text)


@contextmanager
def _etcd_errors() -> Iterator[None]:
    try:
        yield
    except EtcdError as error:
        raise RegistrationError(f"etcd: {error}") from error


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "without an explanation"

"""What several tests of this package share."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from routing.instances.etcd import EtcdSettings
from routing.instances.model import HealthState
from routing.instances.registry import InstanceRegistry
from scripts.supervisor import free_ports
from tests.support.processes import PORT_ATTEMPTS, START_TIMEOUT, EtcdServer
from tests.support.waiting import wait_until

QUICK = {"request_timeout": 0.5, "heartbeat_interval": 0.2, "max_backoff": 0.3}
"""Times of a client in tests: the rules are the same, only sooner."""


def quick_settings(*endpoints: str, **more: Any) -> EtcdSettings:
    return EtcdSettings(endpoints=endpoints, **{**QUICK, **more})


def etcd_post(server: EtcdServer, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    """Ask an etcd for what the client under test has no method for."""
    headers = {"Authorization": token} if token else {}
    request = Request(f"{server.url}/v3/{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=10) as answer:
        return dict(json.load(answer))


class TestEtcd(EtcdServer):
    """An etcd that elects itself quickly and may ask for a password: being refused is an answer, too."""

    __test__ = False  # not a class of tests

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "--heartbeat-interval=10", "--election-timeout=100")

    def ready(self) -> bool:
        try:
            etcd_post(self, "kv/range", {"key": "AA=="})
        except HTTPError as error:
            return b"user name is empty" in error.read()
        except OSError:
            return False
        return True

    def ask_for_password(self, password: str) -> None:
        """From now on only `root` is let in."""
        etcd_post(self, "auth/user/add", {"name": "root", "password": password})
        etcd_post(self, "auth/role/add", {"name": "root"})
        etcd_post(self, "auth/user/grant", {"user": "root", "role": "root"})
        etcd_post(self, "auth/enable", {})

    def add_user(self, name: str, password: str, *, as_root: str) -> None:
        """Somebody who is let in, and has no right to anything."""
        token = etcd_post(self, "auth/authenticate", {"name": "root", "password": as_root})["token"]
        etcd_post(self, "auth/user/add", {"name": name, "password": password}, token)

    def change_password(self, old: str, new: str) -> None:
        token = etcd_post(self, "auth/authenticate", {"name": "root", "password": old})["token"]
        etcd_post(self, "auth/user/changepw", {"name": "root", "password": new}, token)


class EtcdMember(TestEtcd):
    """One of several members of an etcd, on ports that were chosen for all of them."""

    __test__ = False

    def __init__(self, directory: Path, name: str, ports: list[int], peers: str) -> None:
        directory.mkdir(parents=True)
        super().__init__(directory)
        # Of a flag that is given twice the last counts. An election must not follow from a busy machine.
        self.extra_flags += ("--heartbeat-interval=50", "--election-timeout=500")
        self.extra_flags += ("--name", name, "--initial-cluster", peers)
        self.ports = ports
        self.others_run = False

    def ready(self) -> bool:
        """Before the others run it cannot answer."""
        return not self.others_run or super().ready()

    def leads(self) -> bool:
        status = etcd_post(self, "maintenance/status", {})
        return bool(status["leader"] == status["header"]["member_id"])


@contextmanager
def etcd_cluster(directory: Path, size: int = 3) -> Iterator[list[EtcdMember]]:
    """All members of a running etcd, the leader first."""
    with ExitStack() as stack:
        for attempt in range(PORT_ATTEMPTS):
            members = _members(directory / str(attempt), size)
            for member in members:
                stack.callback(member.kill)
                member.start()
            for member in members:
                member.others_run = True
            # A member ends by itself when somebody else has taken one of its ports meanwhile.
            wait_until(lambda: not _all_run(members) or all(m.ready() for m in members), START_TIMEOUT)  # noqa: B023
            if _all_run(members):
                yield sorted(members, key=lambda member: not member.leads())
                return
        raise AssertionError("no free ports for a cluster")


def _members(directory: Path, size: int) -> list[EtcdMember]:
    ports = free_ports(2 * size)
    pairs = [[ports[2 * n], ports[2 * n + 1]] for n in range(size)]
    peers = ",".join(f"member-{n}=http://127.0.0.1:{peer}" for n, (_, peer) in enumerate(pairs))
    return [EtcdMember(directory / f"member-{n}", f"member-{n}", pair, peers) for n, pair in enumerate(pairs)]


def _all_run(members: list[EtcdMember]) -> bool:
    return all(member.process is not None and member.process.running for member in members)


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections and that nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def states_of(registry: InstanceRegistry, name: str) -> list[HealthState | None]:
    """The states of an instance from now on, in order, also those that nobody came to see in time; None while
    it is not known."""
    states: list[HealthState | None] = []

    def look() -> None:
        view = registry.snapshot().by_name.get(name)
        state = None if view is None else view.state
        if states[-1:] != [state]:
            states.append(state)

    registry.subscribe(look)
    return states


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        yield bound.getsockname()[1]


def registration_value(incarnation: str | None = "one", **fields: Any) -> bytes:
    identity = {} if incarnation is None else {"incarnation_id": incarnation}
    return json.dumps({**identity, **fields}).encode()


class _Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


class Engine:
    """The `/health` of an engine, on a port that the system chose."""

    def __init__(self) -> None:
        self.status: int | None = 200
        """What is answered; None: nothing at all."""
        self.asked = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.asked += 1
                if engine.status is None:
                    time.sleep(30)
                self.send_response(engine.status if self.path == "/health" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Engine]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

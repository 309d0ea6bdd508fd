"""What several tests of this package share."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from routing.instances.etcd import EtcdSettings
from tests.support.processes import EtcdServer
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


def _stands_still(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


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

    def freeze(self) -> None:
        """Returns once every thread stands still: until then it might still answer."""
        super().freeze()
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(lambda: all(_stands_still(task / "stat") for task in tasks.iterdir()))

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


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections and that nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


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
